"""A user's mistakes: each one clear line, a non-zero exit code, and no rank started."""

import gzip
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from firecaffe.cli import main
from tests.cli.mistakes.line import GOOD, INT8, PAIRS, error_of
from tests.typed import refused, said_by


@pytest.mark.parametrize(
    ("options", "code", "parts"),
    [
        (["--train.stps", "3"], 2, ["train.stps", "mean train.steps?"]),
        (["--train.epoch", "3"], 2, ["train.epoch", "mean train.epochs?"]),
        (
            ["--solver.base", "0.5"],
            2,
            ["solver.base", "mean solver.base_lr or solver.base_momentum?"],
        ),
        (["--train.base_lr", "0.5"], 2, ["train.base_lr", "mean solver.base_lr?"]),
        (["--nproc", "2"], 2, ["no option --nproc", "mean --nproc-per-node?"]),
        (["--resume_from", "x"], 2, ["no option --resume-from", "mean --resume?"]),
        (["--global-batch-size", "8"], 2, ["mean --train.global_batch_size?"]),
        (["-x"], 2, ["no option -x"]),
        (["other.toml"], 2, ["takes one recipe", "recipe.toml and other.toml"]),
        (["--train.steps", "many"], 2, ["train.steps is many; it must be a whole number"]),
        (["--solver.base_lr", "nan"], 2, ["solver.base_lr is nan; it must be a finite number"]),
        (["--solver.lr_mult", "3"], 2, ["solver.lr_mult is 3; it must be a table"]),
        (["--max-restarts", "x"], 2, ["--max-restarts is x; it must be a whole number"]),
        (["--train.autocast", "int8"], 2, ["train.autocast", "bfloat16", "int8"]),
        (
            ["--exchange.algorithm", "trees"],
            2,
            ["exchange.algorithm", "'trees'", "tree, ring", "mean tree?"],
        ),
        (["--model.name", "nin_smal"], 2, ["model.name", "'nin_smal'", "mean nin_small?"]),
        (["--data.name", "imagenet"], 2, ["data.name", "'imagenet'", "fashion-mnist"]),
        (["--solver.type", "sdg"], 2, ["solver.type", "'sdg'", "mean sgd?"]),
        (["--solver.lr", "1"], 2, ["solver.lr", "mean solver.base_lr?"]),
        (["--train.batch_size", "8"], 2, ["train.batch_size", "mean train.global_batch_size?"]),
        (["--exchange.compressor", "int9"], 2, ["exchange.compressor", "mean int8?"]),
        (["--synchrony.mode", "locale"], 2, ["synchrony.mode", "mean local?"]),
        (["--solver.lr_policy", "cyclic"], 2, ["solver.lr_policy", "poly"]),
        (["--train.micro_batch_size", "3"], 2, ["train.global_batch_size", "8", "3"]),
        (["--train.micro_batch_size", "0"], 2, ["train.micro_batch_size", "0", "1 to 16,777,216"]),
        (["--nproc-per-node", "5"], 2, ["5 ranks", "4 micro-batches"]),
        (["--nproc-per-node", "0"], 2, ["--nproc-per-node", "0", "at least 1"]),
        (["--model.name", "alexnet"], 2, ["'alexnet'", "1x28x28"]),
        (["--data.crop", "99"], 2, ["data.crop", "99"]),
        (["--data.name", "mnist", "--data.path", "/nowhere"], 3, ["/nowhere", "mnist"]),
        (["--resume", "/nowhere"], 4, ["/nowhere", "no checkpoint"]),
        (["--master-port", "99999999"], 6, ["--master-port", "99999999"]),
        (["--exchange.bucket_bytes", "0"], 2, ["exchange.bucket_bytes", "0"]),
        (["--exchange.timeout_s", "1e12"], 2, ["exchange.timeout_s", "1e+12", "0.1 to 1e+06"]),
        (["--exchange.timeout_s", "1e-5"], 2, ["exchange.timeout_s", "1e-05"]),
        (["--exchange", "ring"], 2, ["exchange is 'ring'", "--exchange.WORD"]),
        (
            [*INT8, "--exchange.compressor_level", "3"],
            2,
            ["exchange.compressor_level is 3", "4 micro-batches", "level 2"],
        ),
        ([*INT8, "--nproc-per-node", "5"], 2, ["5 ranks", "4 micro-batches"]),
        ([*INT8, *PAIRS, "--nproc-per-node", "3"], 2, ["3 ranks", "2 sums of 2 micro-batches"]),
        ([*INT8, "--exchange.algorithm", "ring"], 2, ["compressor = int8", "ring", "use tree"]),
        (["--exchange.compressor", "int4"], 2, ["exchange.compressor", "'int4'", "none, float16"]),
        (["--exchange.compressor_level", "-1"], 2, ["exchange.compressor_level", "-1", "0 to"]),
        (["--max-restarts", "-1"], 2, ["--max-restarts", "-1", "at least 0"]),
        (["--nnodes", "4:2"], 2, ["--nnodes", "'4:2'", "MIN:MAX"]),
        (["--nnodes", "two"], 2, ["--nnodes", "'two'", "MIN:MAX"]),
        (["--nnodes", "1:9999999999"], 2, ["--nnodes", "MIN:MAX", "10,000"]),
        (
            ["--nnodes", "1:3", "--synchrony.mode", "backup", "--synchrony.backup_workers", "2"],
            2,
            ["--nnodes 1:3 may come to 2 hosts", "synchrony.backup_workers", "one number"],
        ),
        (["--nnodes", "2"], 2, ["--rdzv-endpoint", "HOST:PORT"]),
        (["--nnodes", "2", "--rdzv-endpoint", "a:99999"], 2, ["'a:99999'", "HOST:PORT"]),
        (["--nnodes", "2", "--rdzv-endpoint", "a:29500"], 2, ["--rdzv-id is missing"]),
        (["--rdzv-endpoint", "a:29500"], 2, ["--rdzv-endpoint", "--nnodes"]),
        (
            ["--nnodes=2", "--rdzv-endpoint=a:29500", "--rdzv-id=x", "--master-port=29501"],
            2,
            ["--master-port is 29501", "one host"],
        ),
        (["--train.steps", "3", "--train.epochs", "2"], 2, ["train.steps = 3", "train.epochs = 2"]),
        (["--solver.gamma", "0.5"], 2, ["--solver.gamma 0.5", "solver.lr_policy is 'fixed'"]),
        (["--inject", "kill"], 2, ["no option --inject"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_train(
    recipe: Path,
    options: list[str],
    code: int,
    parts: list[str],
) -> None:
    found_code, line = error_of(["train", str(recipe), *options])
    assert found_code == code, line
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (GOOD + "speed = 3\n", ["train.speed"]),
        (GOOD.replace("steps = 1", 'steps = "one"'), ["train.steps", "one"]),
        (GOOD + "[optimiser]\nlr = 1\n", ["optimiser"]),
        ("[train\n", ["no TOML"]),
        (f"exchange = 3\n{GOOD}", ["exchange is 3", "a section"]),
        (f'model = "lenet"\n{GOOD}', ["model is 'lenet'", "a section"]),
        (f"[exchnge]\n{GOOD}", ["no section 'exchnge'", "exchange, checkpoint"]),
    ],
)
def test_recipe_file(recipe: Path, text: str, parts: list[str]) -> None:
    recipe.write_text(text)
    code, line = error_of(["train", str(recipe)])
    assert code == 2, line
    for part in parts:
        assert part in line


STALE = ("--synchrony.mode", "stale", "--synchrony.clock", "simulated")
LOCAL = ("--synchrony.mode", "local", "--synchrony.local_steps", "1")
TWO = ("--synchrony.replicas", "2")
FEW = ("--synchrony.local_steps", "99", "--train.steps", "99", "--synchrony.fragments", "99")
BACKUP = ("--synchrony.mode", "backup", "--synchrony.backup_workers", "2")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["trian"], ["'trian'", "mean train?", "verify"]),
        (["train", "no.toml"], ["firecaffe: recipe no.toml: No such file or directory"]),
        (["train", "--train.steps", "3"], ["takes one recipe, found none"]),
        (["check", "RECIPE", *BACKUP, "--nnodes", "1:3"], ["--nnodes 1:3 may come to 2 hosts"]),
        (["verify", "RECIPE", *STALE], ["stale gives other results", "replay"]),
        (["demo", "RECIPE", *STALE], ["stale gives other results", "replay"]),
        (["train", "RECIPE", *LOCAL, *TWO, "--nproc-per-node", "3"], ["replicas is 2 on 3 wor"]),
        (["verify", "RECIPE", *LOCAL, *TWO, "--nproc-per-node", "1,3"], ["replicas is 2 on 3 wor"]),
        (["train", "RECIPE", *LOCAL, "--synchrony.warm_epochs", "99"], ["steps, but the training"]),
        (["train", "RECIPE", *LOCAL, *FEW], ["synchrony.fragments is 99, but the network has"]),
        *(
            (["verify", "RECIPE", "--nproc-per-node", numbers], ["--nproc-per-node"])
            for numbers in ("1", "2,2", "1,x", "0,1", "")
        ),
        (["verify", "RECIPE", "--nproc-per-node", "1,9"], ["9 ranks"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_commands(recipe: Path, argv: list[str], parts: list[str]) -> None:
    code, line = error_of([str(recipe) if word == "RECIPE" else word for word in argv])
    assert code == 2, line
    for part in parts:
        assert part in line


def test_truncated_data(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, number in (("train", 60_000), ("t10k", 10_000)):
        images = b"\x00\x00\x08\x03" + number.to_bytes(4) + (28).to_bytes(4) * 2 + b"\x01" * 1000
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = b"\x00\x00\x08\x01" + number.to_bytes(4) + bytes(number)
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    words = ["--data.name", "mnist", "--data.path", str(folder)]
    code, line = error_of(["train", str(recipe), *words])
    assert (code, "-images-idx3-ubyte.gz" in line) == (3, True)


def test_run_folder_exists(recipe: Path, tmp_path: Path) -> None:
    code, line = error_of(["train", str(recipe), "--run.folder", str(tmp_path)])
    assert (code, str(tmp_path) in line, "exists already" in line) == (8, True, True)


@pytest.mark.parametrize("command", ["train", "check", "bench exchange"])
@pytest.mark.parametrize(
    "words", [["--nproc-per-node", "3"], ["--master-port", "29501"], ["--max-restarts", "1"]]
)
def test_options_of_our_launcher_under_another(
    monkeypatch: pytest.MonkeyPatch,
    recipe: Path,
    command: str,
    words: list[str],
) -> None:
    """But for `train --nproc-per-node 3`, they had no effect."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    argv = [*command.split(), *([str(recipe)] if command == "train" else []), *words]
    (line,) = refused(2, *argv).splitlines()
    assert words[0] in line
    known = words[0] != "--max-restarts" or command == "train"
    assert ("as rank 0 of 2" if known else "has no option") in line


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_port_in_use(recipe: Path, taken_port: int) -> None:
    code, line = error_of(["train", str(recipe), "--master-port", str(taken_port)])
    assert code == 6
    assert f"--master-port {taken_port}" in line
    assert "in use" in line


def test_print_config_resolves_every_word(recipe: Path, tmp_path: Path) -> None:
    resolved = said_by("train", recipe, "--solver.base_lr", "0.3", "--print-config")
    assert "base_lr = 0.3" in resolved
    assert not resolved.startswith("#")
    assert "steps = 1" in resolved
    again = tmp_path / "again.toml"
    again.write_text(resolved)
    assert said_by("train", again, "--print-config") == resolved
    scaled = ["--solver.scale", "sqrt", "--solver.reference_batch_size", "2"]
    config = said_by("train", again, *scaled, "--print-config")
    assert config.startswith("# learning rate: 0.6 = 0.3 x 2 (sqrt, batch 8 over")


def test_verify_leaves_the_folder_of_a_finished_run_alone(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    recipe.write_text(f'{GOOD}[run]\nfolder = "{tmp_path / "run"}"\n')
    main(["verify", str(recipe), "--nproc-per-node", "1,2"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("ranks were started")


def test_a_broken_pipe_in_a_rank_is_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a lost peer; a rank's stdout never raises it."""

    def break_off(_: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("firecaffe.cli.schedule.main", break_off)
    monkeypatch.setenv("RANK", "1")
    assert main(["schedule", "tree", "4"]) == 8
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_current_folder_that_has_been_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, said = error_of(["plan", "--model", "lenet"])
    assert (code, "current folder" in said) == (8, True)
