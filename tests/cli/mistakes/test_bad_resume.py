"""A resume that cannot be: one line, a non-zero exit code, and no rank started."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.cli.mistakes.line import error_of, train_here

FinishedRun = Callable[[str], Path]

INT8 = "--exchange.compressor int8"
PAIRS = f"{INT8} --exchange.compressor_level 1"
COSINE = "--solver.lr_policy cosine"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Gives a run of the recipe with options, one for all who ask: to be read, not changed."""

    @cache
    def train(options: str) -> Path:
        return train_here(tmp_path_factory.mktemp("finished"), *options.split())

    return train


def test_flipped_byte_in_checkpoint(
    capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path, finished_run: FinishedRun
) -> None:
    run = shutil.copytree(finished_run(""), tmp_path / "run")
    state = run / "checkpoints" / "step-00000001" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    code, line = error_of(capsys, ["train", str(recipe), "--resume", str(run)])
    assert (code, "state.safetensors" in line, "damaged" in line) == (4, True, True)


def test_resume_without_a_recipe(
    capsys: pytest.CaptureFixture[str], finished_run: FinishedRun
) -> None:
    """Wherever in the run the path leads."""
    run = finished_run("")
    for path in (run, run / "checkpoints" / "step-00000001"):
        code, line = error_of(capsys, ["train", "--resume", str(path)])
        assert (code, f"the run to resume is {run / 'recipe.toml'}" in line) == (2, True), line


OTHERS = [
    ("", "--solver.momentum 0.5", "solver.momentum is 0.5"),
    ("--train.steps 2", "--train.steps 1", "at step 2, the recipe ends at step 1"),
    (f"{COSINE} --train.steps 2", f"{COSINE} --train.steps 1", "at step 2"),
    (INT8, "--exchange.compressor one_bit", "'one_bit' in the recipe, 'int8' in the checkpoint"),
    (INT8, "", "exchange.compressor is 'none' in the recipe, 'int8' in the checkpoint"),
    ("", INT8, "exchange.compressor is 'int8' in the recipe, 'none' in the checkpoint"),
    (INT8, PAIRS, "exchange.compressor_level is 1 in the recipe, 0 in the checkpoint"),
]


@pytest.mark.parametrize(("saved", "asked", "said"), OTHERS)
def test_resume_with_another_recipe(
    saved: str,
    asked: str,
    said: str,
    recipe: Path,
    finished_run: FinishedRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--resume", str(finished_run(saved)), *asked.split()]
    code, line = error_of(capsys, ["train", str(recipe), *words])
    assert (code, said in line) == (4, True), line
