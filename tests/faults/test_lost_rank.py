"""A rank of this host that dies, freezes, fails or leaves, as a stage, in a row or in a sum: nobody
waits for it, the others name it at once, and leave nothing behind.
"""

import os
import re
import select
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import join
from firecaffe.errors import FirecaffeError, PeerLostError, RecipeError
from firecaffe.parallel.layer_split import choose_layers, replace_layers
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.parallel.stage_run import StageRunner
from firecaffe.parallel.stages import cut_stages
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import LocalRanks, meet_local_ranks
from tests.ranks.test_stage_run import LEAVES, Step, case, in_stages
from tests.world import Ranks

SILENT_S, WAIT_S = 1.5, 60.0
CUTS = ["act", "last"]
SIGNALS = {"gone": signal.SIGKILL, "frozen": signal.SIGSTOP}


def kill_this(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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
                for ready in in_stages(step, runner, LEAVES):
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


WORDS, PARTS = {"0": "neurons", "2": "inputs"}, 4
SAMPLES = 6, 6, 4, 5
"""Of each rank's micro-batch."""

LOST = 2


def row_until_lost(way: str) -> tuple[str, int | None]:
    with join("cpu", WAIT_S) as world:
        local = meet_local_ranks(world, WAIT_S) if way == "memory" else None
        row = OwnSamples(world, PARTS, local)
        layers = nn.Sequential(nn.Linear(9, 37), nn.ReLU(), nn.Linear(37, 5))
        model = replace_layers(layers, choose_layers(layers, WORDS), row).module
        samples = torch.ones(SAMPLES[world.rank], 9)
        try:
            for step in range(2):
                with row.apart(SAMPLES):
                    loss = model(samples).sum()
                    if step == 1 and world.rank == LOST:
                        kill_this()
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


LONG_S = 1000.0
"""Where nothing else is said, a rank would wait for longer than the tests do."""
CPU = torch.device("cpu")
MEMORY = "/memfd:firecaffe (deleted)"
"""How the system names memory that ranks share and that no folder has."""


def shared_files() -> set[str]:
    """The files that this process writes to by memory that others see."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = (line.split(maxsplit=5) for line in lines)
    return {name for _, rights, *_, name in mapped if rights == "rw-s"}


def lose(victim: int, how: str) -> tuple[str, set[str]]:
    """What a survivor says, and the files of shared memory that it had mapped."""
    with join("cpu", timeout_s=LONG_S) as world:
        local = meet_local_ranks(world, LONG_S)
        assert local is not None
        exchange = Exchange.of_vectors(world, "tree", local)
        vector = exchange.empty(100_000, torch.float32, CPU)
        exchange.all_reduce(vector)
        files = shared_files()
        gather_text(world, "all are here")
        if world.rank == victim:
            if how == "leaves":
                exchange.close()
                return "", files
            if how == "killed in the sum":
                pytest.MonkeyPatch().setattr(exchange, "tree_sum", kill_this)
            elif how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                kill_this()
        if how == "stopped":
            for peer in local.sockets.values():
                peer.settimeout(2.0)
        if how == "killed, and a rank that saw it has left":
            last = max(rank for rank in range(world.world_size) if rank != victim)
            if world.rank == last:
                wait_for_others_to_leave(local, victim)
        try:
            if how == "killed before vectors are made":
                exchange.empty(1000, torch.float32, CPU)
            else:
                exchange.all_reduce(vector)
        except PeerLostError as error:
            return str(error), files
        finally:
            exchange.close()
    return "", files


def wait_for_others_to_leave(local: LocalRanks, victim: int) -> None:
    """Returns when only the victim's end, or nobody's, is still open."""
    for local_rank, peer in local.sockets.items():
        if local_rank != victim:
            poll = select.poll()
            poll.register(peer, 0)  # no event but the end of the other side
            poll.poll()


@pytest.mark.parametrize(
    ("world_size", "victim", "how"),
    [
        (2, 0, "killed at the barrier"),
        (4, 1, "killed at the barrier"),
        (4, 0, "killed in the sum"),
        (3, 2, "killed in the sum"),
        (3, 1, "killed before vectors are made"),
        (3, 2, "killed, and a rank that saw it has left"),
        (4, 1, "killed, and a rank that saw it has left"),
        (3, 0, "leaves"),
        (4, 1, "stopped"),
    ],
)
def test_the_others_name_the_rank_that_is_gone(
    ranks: Ranks, world_size: int, victim: int, how: str
) -> None:
    results = ranks.run(world_size, lose, victim, how, lost={victim})
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        said, files = result
        # Whoever says goodbye is not lost to the watch; then the host's own sockets tell.
        words = "on this host, " if how == "leaves" else "on "
        assert re.match(rf"rank {victim},? {words}", said), said
        # Memory without a name goes with its last process, however that ends.
        assert files == {MEMORY}
