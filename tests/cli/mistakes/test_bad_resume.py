"""A resume that cannot be: one line, a non-zero exit code, and no rank started."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from firecaffe.cli import main
from tests.cli.mistakes.line import GOOD, INT8, PAIRS, error_of

FinishedRun = Callable[..., Path]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Gives a run of the recipe with options, one for all who ask: to be read, not changed.

    One rank alone trains in this process when torchrun's words say so.
    """

    @cache
    def train(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("finished")
        (folder / "recipe.toml").write_text(GOOD)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", "0")
            patch.setenv("WORLD_SIZE", "1")
            words = ["--run.folder", str(folder / "run"), "--run.tensorboard", "false"]
            assert main(["train", str(folder / "recipe.toml"), *words, *options]) == 0
        return folder / "run"

    return train


def test_flipped_byte_in_checkpoint(
    recipe: Path, tmp_path: Path, finished_run: FinishedRun
) -> None:
    run = shutil.copytree(finished_run(), tmp_path / "run")
    state = run / "checkpoints" / "step-00000001" / "state.safetensors"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    code, line = error_of(["train", str(recipe), "--resume", str(run)])
    assert (code, "state.safetensors" in line, "damaged" in line) == (4, True, True)


def test_resume_without_a_recipe(finished_run: FinishedRun) -> None:
    """Wherever in the run the path leads."""
    run = finished_run()
    for where in (run, run / "checkpoints" / "step-00000001"):
        code, line = error_of(["train", "--resume", str(where)])
        assert (code, f"the run to resume is {run / 'recipe.toml'}" in line) == (2, True), line


def test_resume_with_another_recipe(recipe: Path, finished_run: FinishedRun) -> None:
    run = finished_run()
    words = ["--resume", str(run), "--solver.momentum", "0.5"]
    code, line = error_of(["train", str(recipe), *words])
    assert (code, "solver.momentum is 0.5" in line) == (4, True)


@pytest.mark.parametrize("policy", ["fixed", "cosine"])
def test_resume_with_fewer_steps(recipe: Path, finished_run: FinishedRun, policy: str) -> None:
    words = ["--solver.lr_policy", policy]
    run = finished_run(*words, "--train.steps", "2")
    words += ["--resume", str(run), "--train.steps", "1"]
    code, line = error_of(["train", str(recipe), *words])
    assert (code, "at step 2" in line, "ends at step 1" in line) == (4, True, True), line


@pytest.mark.parametrize(
    ("saved", "asked", "word", "values"),
    [
        (INT8, ["--exchange.compressor", "one_bit"], "compressor", ("'one_bit'", "'int8'")),
        (INT8, [], "compressor", ("'none'", "'int8'")),
        ([], INT8, "compressor", ("'int8'", "'none'")),
        (INT8, [*INT8, *PAIRS], "compressor_level", ("1", "0")),
    ],
    ids=["another", "none any more", "none before", "another level"],
)
def test_resume_with_another_compressor(
    recipe: Path,
    finished_run: FinishedRun,
    saved: list[str],
    asked: list[str],
    word: str,
    values: tuple[str, str],
) -> None:
    run = finished_run(*saved)
    code, line = error_of(["train", str(recipe), "--resume", str(run), *asked])
    expected = f"exchange.{word} is {values[0]} in the recipe, {values[1]} in the checkpoint"
    assert (code, expected in line) == (4, True), line
