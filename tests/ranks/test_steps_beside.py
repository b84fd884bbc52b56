"""Steps that are timed beside an exchange: it goes on for as long as any rank computes."""

import threading
from typing import Any
from unittest.mock import patch

import pytest
import torch

from firecaffe.api import cluster_check
from firecaffe.cluster.world import World, join
from firecaffe.errors import RecipeError
from firecaffe.measure import step_times as measured_step
from firecaffe.measure.step_times import StepTimes, time_steps_beside_exchange
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import meet_local_ranks
from tests.world import Ranks

WAIT_S = 300.0


def sums_beside(failing_rank: int | None, in_memory: bool) -> tuple[str, int]:
    """Rank r computes until it has seen 2 (r + 1) sums; what came of it, and all sums."""
    summed = threading.Condition()
    sums = 0
    all_reduce = Exchange.all_reduce

    def counted(self: Exchange, vector: torch.Tensor, lane: int = 0) -> None:
        nonlocal sums
        all_reduce(self, vector, lane)
        assert not vector[1:].any()
        with summed:
            sums += 1
            summed.notify()

    def compute(*_: Any) -> str:
        with summed:
            assert summed.wait_for(lambda: sums >= 2 * (world.rank + 1), WAIT_S)
        if world.rank == failing_rank:
            raise RecipeError("this rank cannot")
        return "timed"

    with (
        patch.object(Exchange, "all_reduce", counted),
        patch.object(measured_step, "time_steps", compute),
        join("cpu") as world,
    ):
        local = meet_local_ranks(world, WAIT_S) if in_memory else None
        assert (local is not None) == in_memory
        try:
            said: Any = time_steps_beside_exchange(check_recipe(Recipe()), world, local, 8, 0.0, 1)
        except RecipeError as error:
            said = error
        finally:
            if local is not None:
                local.close()
    return str(said), sums


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_go_on_until_the_last_rank_has_computed(
    ranks: Ranks, world_size: int, in_memory: bool
) -> None:
    found = ranks.shared(world_size, sums_beside, None, in_memory)
    (sums,) = {each for _, each in found}
    assert sums > 2 * world_size
    assert {said for said, _ in found} == {"timed"}


def test_a_rank_that_cannot_compute_holds_nobody_up(ranks: Ranks) -> None:
    found = ranks.run(3, sums_beside, 1, False)
    assert [said for said, _ in found] == ["timed", "this rank cannot", "timed"]
    assert len({each for _, each in found}) == 1


@pytest.mark.parametrize(("beside_s", "slowdown"), [(0.5, 0.25), (0.3, 0.0)])
def test_the_slowdown_is_of_the_size_that_is_trained(
    monkeypatch: pytest.MonkeyPatch, beside_s: float, slowdown: float
) -> None:
    recipe = Recipe()
    size = recipe.train.micro_batch_size

    def timed(micro_batch_size: int, compute_s: float) -> StepTimes:
        return StepTimes(micro_batch_size, 1, (9.0, compute_s, 0.0), (0.0,), (0.0,), 0)

    rows = [[timed(size // 2, 7.0), timed(size, compute_s)] for compute_s in (0.1, 0.4, 2.0)]
    name = "time_steps_beside_exchange"
    monkeypatch.setattr(cluster_check, name, lambda *_: timed(size, beside_s))
    alone = World(0, 1, torch.device("cpu"))
    slower = cluster_check._slowdown(alone, check_recipe(recipe), None, rows)
    assert slower == pytest.approx(slowdown)
