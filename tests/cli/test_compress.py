"""`firecaffe compress` as a user types it: the file, what is said of it, and what is refused."""

import json
from pathlib import Path

import pytest

import firecaffe
import firecaffe.cli
from firecaffe.compression import fcz
from firecaffe.recipe.checked_recipe import recipe_of_run
from tests import typed

RECIPE = """
[model]
name = "lenet"
[data]
name = "generated"
hold_out = 0.02
[train]
global_batch_size = 32
micro_batch_size = 8
steps = 30
eval_batch_size = 500
device = "cpu"
[solver]
base_lr = 0.02
"""

SCHEME = """
biases = 16
[[rounds]]
name = "prune"
length = 0.3
[rounds.prune]
keep = { "*" = 0.3, "ip1" = 0.05 }
[[rounds]]
name = "share"
length = 0.1
rate = 0.1
[rounds.share]
bits = { "*" = 4 }
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.toml").write_text(RECIPE)
    done = typed.firecaffe("train", folder / "small.toml", "--run.folder", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


NETWORK = """
from torch import nn
def network(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 5, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 144, 64), nn.ReLU(), nn.Linear(64, num_classes),
    )
"""
WEIGHTS = 8 * 25 + 8 + 16 + 8 * 144 * 64 + 64 + 650


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of a network of one's own, a sixth of LeNet, and its own.py."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(NETWORK)
    recipe = folder / "small.toml"
    recipe.write_text(RECIPE.replace("lenet", f"{folder}/own.py:network"))
    typed.firecaffe("train", recipe, "--run.folder", folder / "run").check_returncode()
    return folder


@pytest.fixture
def scheme(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(SCHEME)
    return path


@pytest.fixture(scope="module")
def compressed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path, str]:
    """The run as a file, by one worker: the command, the file, and what was said of it."""
    folder = tmp_path_factory.mktemp("compressed")
    (folder / "mine.toml").write_text(SCHEME)
    scheme, out = folder / "mine.toml", folder / "small.fcz"
    command = ["compress", str(run), "--scheme", str(scheme), "--out", str(out)]
    done = typed.firecaffe(*command, "--json")
    assert done.returncode == 0, done.stderr
    return command, out, done.stdout


def test_a_file_from_a_run_and_again(
    run: Path, compressed: tuple[list[str], Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, out, said = compressed
    found = json.loads(said)
    rounds = out.parent / "small-rounds"
    assert [each["folder"] for each in found["rounds"]] == [
        str(rounds / "1-prune"),
        str(rounds / "2-share"),
    ]
    assert [each["steps"] for each in found["rounds"]] == [9, 3]
    assert json.loads(out.with_suffix(".json").read_text()) == found

    # The file holds what the rounds have left, and is what it says.
    assert found["bytes"] == out.stat().st_size
    assert found["ratio"] == pytest.approx(4 * 431_080 / out.stat().st_size)
    rows = {each["name"]: each for each in found["tensors"]}
    assert rows["ip1.weight"]["kept_share"] == pytest.approx(0.05)
    assert rows["conv2.weight"]["kept_share"] == pytest.approx(0.3)
    assert all(rows[f"{layer}.weight"]["values"] <= 16 for layer in ("conv1", "conv2", "ip1"))
    with fcz.read(out) as file:
        tensors = dict(file.tensors())
    trained = firecaffe.load(rounds / "2-share").state_dict()
    for name, values in tensors.items():
        assert (values == trained[name].half().float().numpy()).all()

    # What is said of it is what evaluate says of the file, and of the run.
    for where, worth in ((out, "decoded"), (run, "float")):
        capsys.readouterr()
        assert firecaffe.cli.main(["evaluate", str(where), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["top1"] == found[worth]["test"]
    lost = found["float"]["held_out"] - found["decoded"]["held_out"]
    assert found["lost"]["held_out"] == pytest.approx(100 * lost)

    # Begun again, it trains nothing and comes to the same bytes.
    content, times = out.read_bytes(), {each: each.stat().st_mtime_ns for each in rounds.glob("*")}
    assert firecaffe.cli.main(command) == 8
    assert "exists already; --overwrite" in capsys.readouterr().err
    assert firecaffe.cli.main([*command, "--overwrite"]) == 0
    said = capsys.readouterr().out
    assert out.read_bytes() == content
    assert {each: each.stat().st_mtime_ns for each in times if each.is_dir()} == {
        each: time for each, time in times.items() if each.is_dir()
    }
    assert f"{out.stat().st_size:,} bytes" in said
    assert "over 10 Mbit/s" in said

    # The rounds' folder is of this scheme alone.
    (out.parent / "mine.toml").write_text(SCHEME.replace("0.05", "0.06"))
    assert firecaffe.cli.main([*command, "--overwrite"]) == 8
    assert "another compression (another scheme); give --out" in capsys.readouterr().err


def test_a_target_chooses_layers_by_held_out_samples(
    own: Path, scheme: Path, tmp_path: Path
) -> None:
    out = tmp_path / "small.fcz"
    scheme.write_text(SCHEME.replace('"ip1"', '"4"'))
    command = ["compress", str(own / "run"), "--scheme", str(scheme), "--out", str(out)]
    command += ["--trust-code"]
    pytest.importorskip("matplotlib")
    picture = tmp_path / "small.png"
    done = typed.firecaffe(*command, "--target", "30x", "--plot", picture, "--json")
    assert done.returncode == 0, done.stderr
    assert "lost on held-out samples if a layer alone keeps" in done.stderr
    found = json.loads(done.stdout)
    assert out.stat().st_size <= 4 * WEIGHTS / 30
    assert 1 <= len(found["tried"]) <= 3
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {each["name"] for each in found["sensitivity"]} == {"0", "4", "6"}
    first = recipe_of_run(tmp_path / "small-rounds" / "30x" / "1-prune")
    assert set(first.prune.keep) == {"0", "4", "6"}

    # A size that no file has ends with the nearest, which is there.
    done = typed.firecaffe(*command, "--overwrite", "--target", "300B")
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 16
    assert "--target 300B: none of 3 sizes reaches it; the nearest is" in said
    assert "points of test" in said


def test_the_weights_of_a_recipes_file(
    run: Path, compressed: tuple[list[str], Path, str], scheme: Path, tmp_path: Path
) -> None:
    """What `export` has written, beside a recipe: the same file as from the run."""
    recipe = tmp_path / "small.toml"
    typed.firecaffe(
        *("export", run, "--to", "safetensors", "--out", tmp_path / "w.safetensors")
    ).check_returncode()
    recipe.write_text(RECIPE.replace('"lenet"', f'"lenet"\nweights = "{tmp_path}/w.safetensors"'))
    out = tmp_path / "a.fcz"
    typed.firecaffe("compress", recipe, "--scheme", scheme, "--out", out).check_returncode()
    assert out.read_bytes() == compressed[1].read_bytes()


def test_layers_in_two_and_normalization_folded(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a network of one's own. Without shared values nothing is rounded, so the decoded network
    is worth what the last round was.
    """
    scheme = tmp_path / "mine.toml"
    rounds = '[[rounds]]\nlength = 0.1\n[rounds.prune]\nkeep = { "4.*" = 0.5 }\n'
    scheme.write_text(f'normalization = "fold"\n[low_rank]\nrank = {{ 4 = 16 }}\n{rounds}')
    words = ("--scheme", scheme, "--out", tmp_path / "net.fcz", "--json", "--trust-code")
    done = typed.firecaffe("compress", own / "run", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["weights"] == WEIGHTS  # before it was in two
    assert found["decoded"]["test"] == found["rounds"][-1]["test"]
    rows = {each["name"]: each for each in found["tensors"]}
    assert rows["4.reduce.weight"]["shape"] == [16, 8 * 144]
    assert rows["4.expand.weight"]["kept_share"] == 0.5
    assert rows["1.running_mean"]["kept_share"] == 0.0
    model = f"{own}/own.py:network"
    assert firecaffe.cli.main(["evaluate", str(tmp_path / "net.fcz"), "--json"]) == 2
    assert "code that is not firecaffe's" in capsys.readouterr().err
    named = ["evaluate", str(tmp_path / "net.fcz"), "--model.name", model, "--json"]
    assert firecaffe.cli.main(named) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == found["decoded"]["test"]


def test_two_workers_come_to_the_same_bytes(
    run: Path, compressed: tuple[list[str], Path, str], scheme: Path, tmp_path: Path
) -> None:
    out = tmp_path / "2.fcz"
    words = ("--scheme", scheme, "--out", out, "--nproc-per-node", 2)
    done = typed.firecaffe("compress", run, *words)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == compressed[1].read_bytes()


@pytest.mark.slow
def test_four_workers_come_to_the_same_bytes_by_each_scheme(run: Path, tmp_path: Path) -> None:
    for scheme in ("best", "deep_compression"):
        files = []
        for workers in (1, 2, 4):
            out = tmp_path / f"{scheme}-{workers}.fcz"
            words = ("--scheme", scheme, "--out", out, "--nproc-per-node", workers)
            typed.firecaffe("compress", run, *words).check_returncode()
            files.append(out.read_bytes())
        assert files[0] == files[1] == files[2]


RECORD = "--out result.fcz with the record result.json: exists already"
ROUND = '[[rounds]]\n[rounds.prune]\nkeep = {{ "{pattern}" = {keep} }}\n'


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--target", "forty"], 2, "--target is 'forty'; expected a ratio (40x)"),
        (["--scheme", "bst"], 2, "--scheme is 'bst'; there are best, deep_compression"),
        (["--scheme", "none.toml"], 2, "--scheme none.toml: No such file"),
        (["--scheme", "layer.toml"], 2, "prune.keep has 'fc*', which no layer with weights match"),
        (["--scheme", "zero.toml"], 2, "round 1-round: prune.keep '*' is 0.0; it must be"),
        (["--scheme", "bits.toml"], 2, "share.bits '*' is 17; it must be 1 to 16"),
        (["--out", "net.zip"], 2, "--out is net.zip; it must end in .fcz"),
        (["--out", "no/net.fcz"], 8, "--out no/net.fcz: there is no folder no"),
        (["--out", "result.fcz"], 8, RECORD),
        (["--out", "result.fcz", "--overwrite"], 8, RECORD),
        (["--target", "10MB"], 2, "--target 10MB: the network's weights are 1,724,320 bytes as"),
        (["--target", "9x", "--scheme", "again.toml"], 2, "scheme again neither prunes nor shares"),
        (["--plot", "x.gif"], 2, "--plot is x.gif; it must end in .png or .html"),
        (["--nproc-per-node", "0"], 2, "--nproc-per-node is 0; it must be at least 1"),
        (["--nproc-per-node", "5"], 2, "5 ranks but only 4 micro-batches"),
        (["--solver.base_lr", "1"], 2, "RUN/recipe.toml --model.weights RUN takes other words"),
        (["--best"], 2, "checkpoint.best = true and train.eval_every"),
        (["--scheme", "low.toml"], 2, "scheme low: model.low_rank of ip2 is 99; it must be"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("layer.toml").write_text(ROUND.format(pattern="fc*", keep=0.1))
    Path("zero.toml").write_text(ROUND.format(pattern="*", keep=0.0))
    Path("bits.toml").write_text('[[rounds]]\n[rounds.share]\nbits = { "*" = 17 }\n')
    low = "[low_rank]\nrank = { ip2 = 99 }\n"
    Path("low.toml").write_text(low + ROUND.format(pattern="*", keep=0.1))
    Path("again.toml").write_text('[[rounds]]\nname = "again"\n')
    Path("result.json").write_text("{}")  # as in a run's folder
    out = [] if "--out" in words else ["--out", "net.fcz"]
    line = typed.refused(code, "compress", run, *out, *words)
    assert line.count("\n") == 1
    assert message in line
    assert not list(tmp_path.glob("*-rounds"))


def test_a_run_that_has_not_finished_or_holds_nothing_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "recipe.toml").write_text((run / "recipe.toml").read_text())
    fresh, whole = tmp_path / "fresh.toml", tmp_path / "whole.toml"
    fresh.write_text(RECIPE)
    weights = f'name = "lenet"\nweights = "{run}"'
    whole.write_text(RECIPE.replace('name = "lenet"', weights).replace("hold_out = 0.02", ""))
    for words, code, part in (
        ([half], 8, f"{half}: has not finished; firecaffe train"),
        ([tmp_path / "none"], 8, "there is no run"),
        ([fresh], 2, "model.weights is empty; compress takes a finished run"),
        ([whole, "--target", "40x"], 2, "--target 40x chooses by held-out training samples, and"),
    ):
        out = ["--out", str(tmp_path / "net.fcz")]
        assert part in typed.refused(code, "compress", *words, *out)
