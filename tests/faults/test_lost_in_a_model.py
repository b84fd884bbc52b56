"""A stage, or a rank of a row, that dies, freezes, fails or leaves in the middle of a step: nobody
waits for it, and the others name it.
"""

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from firecaffe.cluster.world import join
from firecaffe.errors import FirecaffeError, PeerLostError, RecipeError
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.parallel.stage_run import StageRunner
from firecaffe.parallel.stages import cut_stages
from firecaffe.transport.local_ranks import meet_local_ranks
from tests.ranks.own_samples import PARTS, SAMPLES, loss_of, split_by
from tests.ranks.staged import Step, case, in_stages
from tests.world import Ranks

SILENT_S, WAIT_S = 1.5, 60.0
CUTS = ["act", "last"]
SIGNALS = {"gone": signal.SIGKILL, "frozen": signal.SIGSTOP}


class Failing(Step):
    """Its last stage fails or gets a signal in its second micro-batch, or its first stage fails in
    the third.
    """

    at = ""

    def inputs(self, leaf: int) -> Any:
        if (self.at, leaf) == ("first", 2):
            raise RecipeError("no such sample")
        return super().inputs(leaf)

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        if leaf == 1 and self.at in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.at])
        if (self.at, leaf) == ("last", 1):
            raise RecipeError("no such class")
        return super().loss(leaf, outputs)


def until_failed(at: str) -> tuple[str, str, int | None]:
    """The error that ends this stage, and of a lost peer its kind and rank."""
    try:
        with join("cpu", WAIT_S, SILENT_S) as world:
            made = case("odd")
            stage = cut_stages(made.network, CUTS)[world.rank]
            step = Failing(made, stage.module, 0)
            step.at = at
            with StageRunner(stage, world) as runner:
                for ready in in_stages(step, runner, range(made.num_leaves)):
                    if at == "all":
                        break
                    if ready[1] is not None:
                        torch.autograd.backward(ready[1])
    except PeerLostError as error:
        return "PeerLostError", error.kind, error.rank
    except FirecaffeError as error:
        return type(error).__name__, "", None
    return "nothing", "", None


@pytest.mark.parametrize(("at", "rank"), [("first", 0), ("last", 2)])
def test_a_stage_that_fails_is_waited_for_by_nobody(ranks: Ranks, at: str, rank: int) -> None:
    found = [error for error, *_ in ranks.run(3, until_failed, at)]
    assert found == ["RecipeError" if each == rank else "PeerLostError" for each in range(3)]


def test_a_step_can_be_left_in_the_middle(ranks: Ranks) -> None:
    """Those that still wait for who has left are told."""
    found = [error for error, *_ in ranks.run(3, until_failed, "all")]
    assert found[2] == "nothing"
    assert set(found) <= {"nothing", "PeerLostError"}


@pytest.mark.parametrize("how", SIGNALS)
def test_a_lost_stage_is_named_by_the_others(ranks: Ranks, how: str) -> None:
    assert ranks.run(3, until_failed, how, lost={2})[:2] == [("PeerLostError", how, 2)] * 2


LOST = 2


def row_until_lost(way: str) -> tuple[str, int | None]:
    with join("cpu", WAIT_S) as world:
        local = meet_local_ranks(world, WAIT_S) if way == "memory" else None
        row = OwnSamples(world, PARTS, local)
        model = split_by(row)
        try:
            for step in range(2):
                with row.apart(SAMPLES):
                    loss = loss_of(model, world.rank)
                    if step == 1 and world.rank == LOST:
                        os.kill(os.getpid(), signal.SIGKILL)
                    torch.autograd.backward(loss)
        except PeerLostError as error:
            return error.kind, error.rank
        finally:
            if local is not None:
                local.close()
    return "nothing", None


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_lost_rank_of_a_row_is_named_by_those_that_wait_for_its_samples(
    ranks: Ranks, way: str
) -> None:
    found = ranks.run(4, row_until_lost, way, lost={LOST})
    assert [each for rank, each in enumerate(found) if rank != LOST] == [("gone", LOST)] * 3
