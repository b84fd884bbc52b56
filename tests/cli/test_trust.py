"""A run's folder, and a file, is data: code that it names runs only if the user says so."""

import json
import shutil
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import tomli_w

import firecaffe
from firecaffe.api.explanation import advice
from firecaffe.cli import main
from firecaffe.compression import fcz
from firecaffe.errors import FirecaffeError, OwnCodeError, RecipeError
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.runs.measure import TOP1
from firecaffe.shrink import attempt
from firecaffe.training.load import Trained
from firecaffe.training.trial import Trial
from tests.cli.stale_run import train_stale
from tests.typed import python, refused

PAYLOAD = """
from pathlib import Path

Path(__file__).with_name("ran").touch()


def call(*args, **words):
    raise LookupError("called")
"""

EVERY = ("model.name", "data.name", "task.name", "solver.type")
READERS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "evaluate": (["evaluate", "RUN"], EVERY[:3]),
    "evaluate on two ranks": (["evaluate", "RUN", "--nproc-per-node", "2"], EVERY[:3]),
    "predict": (["predict", "RUN"], EVERY[:2]),
    "export": (["export", "RUN", "--to", "safetensors", "--overwrite"], EVERY[:1]),
    "verify": (["verify", "RUN", "--steps", "1"], EVERY),
    "replay": (["replay", "RUN"], EVERY),
    "compress": (["compress", "RUN", "--overwrite"], EVERY),
    "plan": (["plan", "--model", "lenet", "--workers", "1", "--runs", "RUN"], EVERY[:2]),
}
"""Commands that take a run's folder, and the words by which it may name code that they need."""

CASES = [(reader, word) for reader, (_, words) in READERS.items() for word in words]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_stale(tmp_path_factory.mktemp("trust") / "run")


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run's folder that somebody has sent, with a file of code."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    forecast = {"cluster": "cpu-host", "workers": 1, "exchange": "tree", "compressor": "none"}
    (folder / "forecast.json").write_text(json.dumps(forecast))
    (folder / "payload.py").write_text(PAYLOAD)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop("payload", None)


def name_in(folder: Path, word: str, **more: Any) -> None:
    """Puts the file's function into the run's recipe."""
    recipe = tomllib.loads((folder / "recipe.toml").read_text())
    section, _, field = word.partition(".")
    recipe[section] |= {field: f"{folder / 'payload.py'}:call", **more}
    (folder / "recipe.toml").write_text(tomli_w.dumps(recipe))


def typed(reader: str, folder: Path) -> list[str]:
    return [str(folder) if word == "RUN" else word for word in READERS[reader][0]]


def test_a_round_of_compress_that_came_with_the_run_runs_no_code(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished round is taken, and whoever has sent the run may have put one there."""
    trial = Trial(run.name, recipe_of_run(run), run.parent)
    name_in(run, "model.name", weights=str(run))

    def seen(trained: Trained, *_: object) -> NoReturn:
        raise FirecaffeError(f"made of {trained.recipe.model.name}")

    monkeypatch.setattr(attempt, "rounds_of", lambda *_: [trial])
    monkeypatch.setattr(attempt, "run_trials", lambda *_, **__: None)
    monkeypatch.setattr(attempt, "write_network", seen)
    made: Any = attempt.AttemptMaker
    maker = made(trial.recipe, None, 1, 1, None, SimpleNamespace(measure=TOP1), 1, 0, str)
    with pytest.raises(FirecaffeError, match="made of lenet"):
        maker.make(tmp_path / "made")
    assert not (run / "ran").exists()


@pytest.mark.parametrize(("reader", "word"), CASES)
def test_a_folder_names_no_code_that_a_command_runs(
    reader: str, word: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name_in(run, word)
    if reader == "compress":  # takes no network of a server's
        text = (run / "recipe.toml").read_text().replace('mode = "stale"', 'mode = "every_step"')
        (run / "recipe.toml").write_text(text)
    assert main(typed(reader, run)) == 2
    assert not (run / "ran").exists()
    line, *more = capsys.readouterr().err.splitlines()
    assert not more
    for part in (str(run), f"{word} is", f"--{word} {run / 'payload.py'}:call", "--trust-code"):
        assert part in line
    # What runs then may fail: it was called.
    assert main([*typed(reader, run), "--trust-code"]) == OwnCodeError.exit_code
    assert (run / "ran").exists()
    assert "raised LookupError: called" in capsys.readouterr().err


@pytest.mark.parametrize("word", EVERY[:3])
def test_code_that_is_named_again_runs(word: str, run: Path) -> None:
    name_in(run, word)
    assert "raised LookupError: called" in refused(
        2, "evaluate", run, f"--{word}", f"{run / 'payload.py'}:call"
    )
    assert (run / "ran").exists()


@pytest.mark.parametrize("name", ["subprocess:getoutput", "timm:resnet18", "FILE"])
def test_load_runs_no_code_of_a_folder(name: str, run: Path) -> None:
    name_in(run, "model.name")
    if name != "FILE":
        text = (run / "recipe.toml").read_text().replace(f"{run / 'payload.py'}:call", name)
        args = {"cmd": f"touch {run / 'ran'}"}
        words = tomllib.loads(text)
        words["model"] |= {"args": args}
        (run / "recipe.toml").write_text(tomli_w.dumps(words))
    for where in (run, next((run / "checkpoints").glob("step-*"))):
        with pytest.raises(RecipeError, match="trust_code=True"):
            firecaffe.load(where)
    assert not (run / "ran").exists()
    if name == "FILE":
        with pytest.raises(OwnCodeError, match="called"):
            firecaffe.load(run, trust_code=True)
        assert (run / "ran").exists()


def test_load_runs_no_code_of_a_file(run: Path) -> None:
    file = run.parent / "net.fcz"
    fcz.write(file, {}, {"model": {"name": f"{run / 'payload.py'}:call"}, "input_shape": [1, 8, 8]})
    with pytest.raises(RecipeError, match="trust_code=True"):
        firecaffe.load(file)
    for command in (["evaluate"], ["predict"], ["profile"], ["export", "--to", "safetensors"]):
        assert "--trust-code" in refused(2, *command, file)
    assert not (run / "ran").exists()
    with pytest.raises(OwnCodeError, match="called"):
        firecaffe.load(file, trust_code=True)


def test_what_only_describes_a_run_calls_nothing(run: Path) -> None:
    """explain, compare and the report read words."""
    for word in EVERY:
        name_in(run, word)
    (said,) = advice(run, [1.0], trust_code=False)
    assert "--trust-code" in said
    assert main(["explain", str(run)]) == 0
    assert main(["compare", str(run), "--html", str(run / "report.html")]) == 0
    assert not (run / "ran").exists()
    (said,) = advice(run, [1.0], trust_code=True)
    assert "called" in said


def test_a_run_that_is_resumed_names_no_code(run: Path, tmp_path: Path) -> None:
    """The recipe that is typed says what is trained; the run's own words are compared with it."""
    shutil.copy(run / "recipe.toml", tmp_path / "own.toml")
    name_in(run, "model.name")
    words = ["--resume", str(run), "--run.folder", str(tmp_path / "on"), "--train.steps", "4"]
    python("-m", "firecaffe", "train", tmp_path / "own.toml", *words)
    python("-m", "firecaffe", "train", tmp_path / "own.toml", "--model.weights", run)
    assert not (run / "ran").exists()
