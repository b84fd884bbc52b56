"""A stage that dies or freezes in the middle of a step: the others name it."""

import os
import signal
from typing import Any

import pytest
from torch import Tensor

from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError
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
