"""Mistakes of who types `firecaffe train`: one line, its exit code, and no rank started."""

import gzip
import socket
from pathlib import Path

import pytest

from firecaffe.cli import main
from tests.cli.mistakes.line import GOOD, error_of

LOCAL = "--synchrony.mode local --synchrony.local_steps 1"
BACKUP = "--synchrony.mode backup --synchrony.backup_workers 2"
INT8 = "--exchange.compressor int8"
TWO_HOSTS = "--nnodes 2 --rdzv-endpoint a:29500"

OPTIONS = [
    ("--train.stps 3", 2, "mean train.steps?"),
    ("--solver.base 0.5", 2, "mean solver.base_lr or solver.base_momentum?"),
    ("--train.base_lr 0.5", 2, "mean solver.base_lr?"),
    ("--train.batch_size 8", 2, "mean train.global_batch_size?"),
    ("--nproc 2", 2, "no option --nproc; did you mean --nproc-per-node?"),
    ("--resume_from x", 2, "no option --resume-from; did you mean --resume?"),
    ("--global-batch-size 8", 2, "mean --train.global_batch_size?"),
    ("-x", 2, "no option -x"),
    ("--inject kill", 2, "no option --inject"),
    ("other.toml", 2, "takes one recipe, found"),
    ("--train.steps many", 2, "train.steps is many; it must be a whole number"),
    ("--solver.base_lr nan", 2, "solver.base_lr is nan; it must be a finite number"),
    ("--solver.lr_mult 3", 2, "solver.lr_mult is 3; it must be a table"),
    ("--model.args 3", 2, "model.args"),
    ("--max-restarts x", 2, "--max-restarts is x; it must be a whole number"),
    ("--train.autocast int8", 2, "train.autocast"),
    ("--exchange.algorithm trees", 2, "mean tree?"),
    ("--model.name nin_smal", 2, "mean nin_small?"),
    ("--data.name imagenet", 2, "fashion-mnist"),
    ("--solver.type sdg", 2, "mean sgd?"),
    ("--exchange.compressor int9", 2, "mean int8?"),
    ("--exchange.compressor int4", 2, "none, float16"),
    ("--synchrony.mode locale", 2, "mean local?"),
    ("--solver.lr_policy cyclic", 2, "poly"),
    ("--solver.gamma 0.5", 2, "--solver.gamma 0.5"),
    ("--train.micro_batch_size 3", 2, "train.global_batch_size"),
    ("--train.micro_batch_size 0", 2, "1 to 16,777,216"),
    ("--train.steps 3 --train.epochs 2", 2, "train.epochs = 2"),
    ("--nproc-per-node 5", 2, "5 ranks but only 4 micro-batches"),
    ("--nproc-per-node 0", 2, "--nproc-per-node is 0"),
    ("--max-restarts -1", 2, "--max-restarts is -1"),
    ("--model.name alexnet", 2, "1x28x28"),
    ("--data.crop 99", 2, "data.crop"),
    ("--data.name mnist --data.path /nowhere", 3, "/nowhere"),
    ("--resume /nowhere", 4, "no checkpoint"),
    ("--run.folder there", 8, "exists already"),
    ("--master-port 99999999", 6, "--master-port"),
    ("--exchange.bucket_bytes 0", 2, "exchange.bucket_bytes"),
    ("--exchange.timeout_s 1e12", 2, "0.1 to 1e+06"),
    ("--exchange ring", 2, "--exchange.WORD"),
    (f"{INT8} --exchange.compressor_level 3", 2, "level 2"),
    (f"{INT8} --exchange.compressor_level 1 --nproc-per-node 3", 2, "2 sums of 2 micro-batches"),
    (f"{INT8} --exchange.algorithm ring", 2, "use tree"),
    ("--exchange.compressor_level -1", 2, "0 to"),
    ("--nnodes 4:2", 2, "MIN:MAX"),
    ("--nnodes two", 2, "MIN:MAX"),
    ("--nnodes 1:9999999999", 2, "10,000"),
    (f"--nnodes 1:3 {BACKUP}", 2, "--nnodes 1:3 may come to 2 hosts"),
    ("--nnodes 2", 2, "--rdzv-endpoint"),
    ("--nnodes 2 --rdzv-endpoint a:99999", 2, "HOST:PORT"),
    (TWO_HOSTS, 2, "--rdzv-id is missing"),
    (f"{TWO_HOSTS} --rdzv-id x --master-port 29501", 2, "--master-port is 29501"),
    ("--rdzv-endpoint a:29500", 2, "--nnodes"),
    (f"{LOCAL} --synchrony.replicas 2 --nproc-per-node 3", 2, "replicas is 2 on 3 workers"),
    (f"{LOCAL} --synchrony.warm_epochs 99", 2, "synchronous steps, but the training has"),
    (f"{LOCAL}00 --train.steps 100 --synchrony.fragments 99", 2, "fragments is 99, but the netw"),
]


@pytest.mark.parametrize(("options", "code", "said"), OPTIONS, ids=[row[0] for row in OPTIONS])
def test_options(
    options: str,
    code: int,
    said: str,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(recipe.parent)
    Path("there").mkdir()
    exit_code, line = error_of(capsys, ["train", "recipe.toml", *options.split()])
    assert (exit_code, said in line) == (code, True), line


RECIPES = {
    GOOD + "speed = 3\n": "train.speed",
    GOOD.replace("steps = 1", 'steps = "one"'): "train.steps",
    GOOD + "[optimiser]\nlr = 1\n": "no section 'optimiser'; there are model, data",
    "[train\n": "no TOML",
    f"exchange = 3\n{GOOD}": "exchange is 3",
    'model = "lenet"': "model is 'lenet'",
    '[model]\nname = "own Net"\n': "path/file.py:function",
}


@pytest.mark.parametrize(("text", "said"), RECIPES.items(), ids=RECIPES.values())
@pytest.mark.parametrize("command", ["train", "verify", "plan"])
def test_recipes(
    command: str, text: str, said: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(text)
    code, line = error_of(capsys, [command, str(recipe)])
    assert (code, said in line) == (2, True), line


def test_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = error_of(capsys, ["train", "no.toml"])
    assert (code, line) == (2, "firecaffe: recipe no.toml: No such file or directory")
    code, line = error_of(capsys, ["train", "--train.steps", "3"])
    assert (code, "takes one recipe, found none" in line) == (2, True)


def test_truncated_data(capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path) -> None:
    for part, number in (("train", 60_000), ("t10k", 10_000)):
        images = b"\x00\x00\x08\x03" + number.to_bytes(4) + (28).to_bytes(4) * 2 + b"\x01" * 1000
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = b"\x00\x00\x08\x01" + number.to_bytes(4) + bytes(number)
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    words = ["--data.name", "mnist", "--data.path", str(tmp_path)]
    code, line = error_of(capsys, ["train", str(recipe), *words])
    assert (code, "-images-idx3-ubyte.gz" in line) == (3, True)


@pytest.mark.parametrize("command", ["train recipe.toml", "check", "bench exchange"])
@pytest.mark.parametrize("word", ["--nproc-per-node 3", "--master-port 29501", "--max-restarts 1"])
def test_options_of_our_launcher_under_another(
    command: str,
    word: str,
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for `train --nproc-per-node 3`, they had no effect."""
    monkeypatch.chdir(recipe.parent)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([*command.split(), *word.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    is_option = word != "--max-restarts 1" or command == "train recipe.toml"
    assert word.split()[0] in line
    assert ("as rank 0 of 2" if is_option else "has no option") in line


def test_port_in_use(capsys: pytest.CaptureFixture[str], recipe: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        code, line = error_of(capsys, ["train", str(recipe), "--master-port", port])
    assert (code, f"--master-port {port}" in line, "in use" in line) == (6, True, True)


@pytest.mark.parametrize("command", ["verify", "demo"])
def test_who_was_early_has_no_twins(
    capsys: pytest.CaptureFixture[str], recipe: Path, command: str
) -> None:
    words = ["--synchrony.mode", "stale", "--synchrony.clock", "simulated"]
    code, line = error_of(capsys, [command, str(recipe), *words])
    assert (code, "stale gives other results" in line, "replay" in line) == (2, True, True)


def test_print_config_resolves_every_word(
    capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    assert main(["train", str(recipe), "--solver.base_lr", "0.3", "--print-config"]) == 0
    resolved = capsys.readouterr().out
    assert "base_lr = 0.3" in resolved
    assert "steps = 1" in resolved
    assert not resolved.startswith("#")
    again = tmp_path / "again.toml"
    again.write_text(resolved)
    assert main(["train", str(again), "--print-config"]) == 0
    assert capsys.readouterr().out == resolved
    scaled = ["--solver.scale", "sqrt", "--solver.reference_batch_size", "2"]
    assert main(["train", str(again), *scaled, "--print-config"]) == 0
    assert capsys.readouterr().out.startswith("# learning rate: 0.6 = 0.3 x 2 (sqrt, batch 8 over")


def test_a_device_that_is_not_there_is_bench_s_own_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, line = error_of(capsys, ["bench", "exchange", "--device", "cuda"])
    assert (code, "--device is cuda" in line) == (2, True)


def test_verify_leaves_the_folder_of_a_finished_run_alone(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(f'{GOOD}[run]\nfolder = "{tmp_path}"\n')
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
