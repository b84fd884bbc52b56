"""A rank of a row that dies while the others wait for its samples: they name it."""

import os
import signal

import pytest
import torch

from firecaffe.cluster.world import join
from firecaffe.errors import PeerLostError
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.transport.local_ranks import meet_local_ranks
from tests.ranks.test_own_samples import PARTS, SAMPLES, loss_of, split_by
from tests.world import Ranks

WAIT_S, LOST = 60.0, 2


def until_lost(way: str) -> tuple[str, int | None]:
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
def test_a_lost_rank_is_named_by_those_that_wait_for_it(ranks: Ranks, way: str) -> None:
    found = ranks.run(4, until_lost, way, lost={LOST})
    assert [each for rank, each in enumerate(found) if rank != LOST] == [("gone", LOST)] * 3
