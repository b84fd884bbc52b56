"""`firecaffe compress` as a user types it: the file, and what is said of it."""

import json
from pathlib import Path

import pytest

import firecaffe
from firecaffe.cli import main
from firecaffe.compression import fcz
from firecaffe.recipe.recorded_recipe import recipe_of
from tests import typed

NETWORK = """
from torch import nn
def network(num_classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 5, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 144, 64), nn.ReLU(), nn.Linear(64, num_classes),
    )
"""
WEIGHTS = 8 * 25 + 8 + 16 + 8 * 144 * 64 + 64 + 650

RECIPE = """
[model]
name = "own.py:network"
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

PRUNE = """
[[rounds]]
name = "prune"
length = 0.3
[rounds.prune]
keep = { "*" = 0.3, "4" = 0.05 }
"""

SCHEME = f"""
biases = 16
{PRUNE}
[[rounds]]
name = "share"
length = 0.1
rate = 0.1
[rounds.share]
bits = {{ "*" = 4 }}
"""

FOLDED = """
normalization = "fold"
[low_rank]
rank = { 4 = 16 }
[[rounds]]
length = 0.1
[rounds.prune]
keep = { "4.*" = 0.5 }
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of a network of one's own, and schemes."""
    home = tmp_path_factory.mktemp("home")
    (home / "own.py").write_text(NETWORK)
    (home / "small.toml").write_text(RECIPE)
    for name, text in {"mine": SCHEME, "prune": PRUNE, "folded": FOLDED}.items():
        (home / f"{name}.toml").write_text(text)
    words = ("small.toml", "--run.folder", "run")
    typed.firecaffe("train", *words, cwd=home).check_returncode()
    return home


def compress(home: Path, *words: object, code: int = 0) -> tuple[str, str]:
    """What it says on stdout and on stderr; words: of a run, or of a recipe."""
    trust = ["--trust-code"] if words[0] == "run" else []
    done = typed.firecaffe("compress", *words, *trust, cwd=home)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def compressed(home: Path) -> str:
    """The run as home/small.fcz, by one worker: what was said of it."""
    return compress(home, "run", "--scheme", "mine.toml", "--out", "small.fcz", "--json")[0]


def test_a_file_from_a_run_and_again(
    home: Path, compressed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    out, rounds, answer = Path("small.fcz"), Path("small-rounds"), json.loads(compressed)
    folders = [rounds / "1-prune", rounds / "2-share"]
    assert [(each["folder"], each["steps"]) for each in answer["rounds"]] == [
        (str(folders[0]), 9),
        (str(folders[1]), 3),
    ]
    assert json.loads(out.with_suffix(".json").read_text()) == answer

    # The file holds what the rounds have left, and is what it says.
    assert answer["bytes"] == out.stat().st_size
    assert answer["ratio"] == pytest.approx(4 * WEIGHTS / out.stat().st_size)
    rows = {each["name"]: each for each in answer["tensors"]}
    assert rows["4.weight"]["kept_share"] == pytest.approx(0.05, rel=0.01)
    assert rows["0.weight"]["kept_share"] == pytest.approx(0.3)
    assert all(rows[f"{layer}.weight"]["values"] <= 16 for layer in ("0", "4", "6"))
    trained = firecaffe.load(folders[1], trust_code=True).state_dict()
    with fcz.read(out) as file:
        for name, values in file.tensors():
            assert (values == trained[name].half().float().numpy()).all(), name

    # What is said of it is what evaluate says of the file, and of the run.
    for path, worth in ((out, "decoded"), ("run", "float")):
        capsys.readouterr()
        assert main(["evaluate", str(path), "--model.name", "own.py:network", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["top1"] == answer[worth]["test"]
    lost = answer["float"]["held_out"] - answer["decoded"]["held_out"]
    assert answer["lost"]["held_out"] == pytest.approx(100 * lost)

    # Begun again, it trains nothing and comes to the same bytes.
    content, times = out.read_bytes(), [each.stat().st_mtime_ns for each in folders]
    command = ["compress", "run", "--scheme", "mine.toml", "--out", "small.fcz", "--trust-code"]
    assert main(command) == 8
    assert "exists already; --overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    said = capsys.readouterr().out
    assert out.read_bytes() == content
    assert [each.stat().st_mtime_ns for each in folders] == times
    assert f"{out.stat().st_size:,} bytes" in said
    assert "over 10 Mbit/s" in said

    # The rounds' folder is of this scheme alone.
    Path("other.toml").write_text(SCHEME.replace("0.05", "0.06"))
    command[3] = "other.toml"
    assert main([*command, "--overwrite"]) == 8
    assert "another compression (another scheme); give --out" in capsys.readouterr().err


def test_two_workers_and_weights_of_a_recipes_file_come_to_the_same_bytes(
    home: Path, compressed: str
) -> None:
    weights = ("--to", "safetensors", "--out", "w.safetensors", "--trust-code")
    typed.firecaffe("export", "run", *weights, cwd=home).check_returncode()
    model = f'"{home}/own.py:network"\nweights = "w.safetensors"'
    (home / "exported.toml").write_text(RECIPE.replace('"own.py:network"', model))
    compress(
        home, "exported.toml", "--scheme", "mine.toml", "--out", "2.fcz", "--nproc-per-node", 2
    )
    assert (home / "2.fcz").read_bytes() == (home / "small.fcz").read_bytes()


def test_a_target_chooses_layers_by_held_out_samples(home: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ("run", "--scheme", "prune.toml", "--out", "aimed.fcz")
    said, errors = compress(home, *command, "--target", "10x", "--plot", "aimed.png", "--json")
    assert "lost on held-out samples if a layer alone keeps" in errors
    answer = json.loads(said)
    assert (home / "aimed.fcz").stat().st_size <= 4 * WEIGHTS / 10
    assert 1 <= len(answer["tried"]) <= 3
    assert (home / "aimed.png").read_bytes().startswith(b"\x89PNG")
    assert {each["name"] for each in answer["sensitivity"]} == {"0", "4", "6"}
    first = recipe_of(home / "aimed-rounds" / "10x" / "1-prune")
    assert set(first.prune.keep) == {"0", "4", "6"}

    # A size that no file has ends with the nearest, which is there.
    _, errors = compress(home, *command, "--overwrite", "--target", "300B", code=16)
    line = errors.splitlines()[-1]
    assert "--target 300B: none of 3 sizes reaches it; the nearest is" in line
    assert "points of test" in line


def test_layers_in_two_and_normalization_folded(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without shared values nothing is rounded, so the decoded network is worth what the last round
    was.
    """
    said, _ = compress(home, "run", "--scheme", "folded.toml", "--out", "folded.fcz", "--json")
    answer = json.loads(said)
    assert answer["weights"] == WEIGHTS  # before it was in two
    assert answer["decoded"]["test"] == answer["rounds"][-1]["test"]
    rows = {each["name"]: each for each in answer["tensors"]}
    assert rows["4.reduce.weight"]["shape"] == [16, 8 * 144]
    assert rows["4.expand.weight"]["kept_share"] == 0.5
    assert rows["1.running_mean"]["kept_share"] == 0.0
    evaluate = ["evaluate", str(home / "folded.fcz"), "--json"]
    assert main(evaluate) == 2
    assert "code that is not firecaffe's" in capsys.readouterr().err
    assert main([*evaluate, "--model.name", f"{home}/own.py:network"]) == 0
    assert json.loads(capsys.readouterr().out)["top1"] == answer["decoded"]["test"]


@pytest.mark.slow
def test_four_workers_come_to_the_same_bytes_by_each_scheme(home: Path) -> None:
    for scheme in ("best", "deep_compression"):
        files = []
        for workers in (1, 2, 4):
            out = f"{scheme}-{workers}.fcz"
            words = ("--scheme", scheme, "--out", out, "--nproc-per-node", workers)
            compress(home, "run", *words)
            files.append((home / out).read_bytes())
        assert files[0] == files[1] == files[2]
