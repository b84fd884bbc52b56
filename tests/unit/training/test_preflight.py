"""What is known before any rank is started: an own task is tried, and what GPUs do not take."""

from pathlib import Path

import pytest
import torch

from firecaffe.errors import CheckpointError, OwnCodeError, RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.training.checks import preflight
from firecaffe.training.forward import check_compiler
from tests.kit.training import recipe_with
from tests.kit.training_fixtures import Patch
from tests.unit.tasks.test_table import OWN

SMALL = "model.name=lenet data.name=generated train.global_batch_size=8 train.micro_batch_size=4"


def look(words: str) -> None:
    preflight(check_recipe(recipe_with(f"{SMALL} train.device=cpu train.steps=1 {words}")), 2)


@pytest.mark.parametrize("function", ["loss_fails", "metric_fails"])
def test_an_own_task_is_tried_on_a_sample(function: str) -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(OwnCodeError, match=rf"task\.name '{OWN}:{function}'.*LookupError") as told:
        look(f"task.name={OWN}:{function}")
    assert "own.py" in told.value.traceback
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(("function", "said"), [("two_losses", "one number"), ("nan", "is nan")])
def test_what_an_own_loss_gives_is_looked_at(function: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        look(f"task.name={OWN}:{function}")


def test_what_can_be_learned_passes() -> None:
    """And the look at the shapes, in evaluation, leaves no layer as one that is not trained."""
    look(f"task.name={OWN}:loss_fails_later")
    look("model.name=resnet18 train.batch_norm_samples=8")


def test_what_gpus_do_not_take_is_known_before_the_ranks(monkeypatch: Patch) -> None:
    """`train.device` is auto: whether there are GPUs is asked of this host."""
    served = "synchrony.mode=asynchronous synchrony.lock=none train.global_batch_size=16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RecipeError, match=r"on GPUs with synchrony\.lock = none"):
        look(f"{served} train.device=auto")


def test_without_a_compiler_it_is_said(monkeypatch: Patch) -> None:
    from torch._inductor import cpp_builder, exc

    def none_is_there() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_is_there)
    check_compiler("cuda")
    with pytest.raises(RecipeError, match=r"train\.compile .* C\+\+ compiler .* CXX") as caught:
        check_compiler("cpu")
    assert len(str(caught.value).splitlines()) == 1


def test_only_rank_0s_host_needs_the_checkpoints(tmp_path: Path) -> None:
    """A run without a shared disk leaves timings, and no checkpoint, on every other host."""
    (tmp_path / "timings").mkdir()
    recipe = check_recipe(recipe_with(f"{SMALL} train.device=cpu train.steps=1"))
    preflight(recipe, 2, tmp_path, is_new=False)
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        preflight(recipe, 2, tmp_path)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="damaged"):
        preflight(recipe, 2, tmp_path, is_new=False)
