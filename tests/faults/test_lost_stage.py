"""A stage that dies, freezes, fails or leaves in the middle of a step: nobody waits for it."""

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor

from firecaffe.cluster.world import join
from firecaffe.errors import FirecaffeError, PeerLostError, RecipeError
from firecaffe.parallel.stage_run import StageRunner
from firecaffe.parallel.stages import cut_stages
from tests.ranks.staged import Step, case, each_leaf, in_stages
from tests.world import Ranks

SILENT_S, WAIT_S = 1.5, 60.0
CUTS = ["act", "last"]
SIGNALS = {"gone": signal.SIGKILL, "frozen": signal.SIGSTOP}


class Lost(Step):
    """Its last stage gets a signal in its second micro-batch."""

    signal: int

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        if leaf == 1:
            os.kill(os.getpid(), self.signal)
        return super().loss(leaf, outputs)


class Failing(Step):
    """Its last stage fails in its second micro-batch, or its first one in the third."""

    at = ""

    def inputs(self, leaf: int) -> Any:
        if (self.at, leaf) == ("first", 2):
            raise RecipeError("no such sample")
        return super().inputs(leaf)

    def loss(self, leaf: int, outputs: Any) -> Tensor:
        if (self.at, leaf) == ("last", 1):
            raise RecipeError("no such class")
        return super().loss(leaf, outputs)


def until_failed(at: str) -> str:
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
    except FirecaffeError as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_stage_that_fails_is_waited_for_by_nobody(ranks: Ranks, at: str) -> None:
    others = ["PeerLostError"] * 2
    expected = ["RecipeError", *others] if at == "first" else [*others, "RecipeError"]
    assert ranks.run(3, until_failed, at) == expected


def test_a_step_can_be_left_in_the_middle(ranks: Ranks) -> None:
    """Those that still wait for who has left are told."""
    found = ranks.run(3, until_failed, "all")
    assert found[2] == "nothing"
    assert set(found) <= {"nothing", "PeerLostError"}


def until_lost(how: str) -> tuple[str, int | None]:
    with join("cpu", WAIT_S, SILENT_S) as world:
        made = case("odd")
        stage = cut_stages(made.network, CUTS)[world.rank]
        step = Lost(made, stage.module, 0)
        step.signal = SIGNALS[how]
        try:
            with StageRunner(stage, world) as runner:
                each_leaf(step, stage.module, in_stages(step, runner, range(made.num_leaves)))
        except PeerLostError as error:
            return error.kind, error.rank
    return "nothing", None


@pytest.mark.parametrize("how", SIGNALS)
def test_a_lost_stage_is_named_by_the_others(ranks: Ranks, how: str) -> None:
    assert ranks.run(3, until_lost, how, lost={2})[:2] == [(how, 2)] * 2
