"""Digests of tensors: what enters; and a rank that has waited in vain is not the one that others
wait for.
"""

from collections.abc import Callable
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from firecaffe.cluster.agree import digest, digest_each, gather_text
from firecaffe.cluster.world import World
from firecaffe.errors import PeerLostError
from firecaffe.transport.collect import HeldPart, Whole, collect
from tests.unit.cluster.watches import watches


def test_names_types_shapes_order_and_every_byte_enter() -> None:
    zeros = torch.zeros(2, 3)
    others = [
        [("weight", zeros)],
        [("bias", zeros)],
        [("weight", zeros.int())],  # the same bytes
        [("weight", zeros.view(3, 2))],
        [("weight", -zeros)],  # equal numbers
        [("weight", zeros), ("bias", zeros)],
        [("bias", zeros), ("weight", zeros)],
        [],
    ]
    assert len({digest(tensors) for tensors in others}) == len(others)
    assert digest_each(others[5]) == {name: digest([(name, zeros)]) for name in ("weight", "bias")}


def test_memory_layout_does_not_enter() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    strided = torch.stack([matrix, matrix], dim=2)[..., 0]
    assert not strided.is_contiguous()
    assert digest([("weight", matrix)]) == digest([("weight", strided)])
    expanded = torch.ones(()).expand(1)  # has a stride of 0
    assert digest([("scale", torch.ones(1))]) == digest([("scale", expanded)])


OF_RANK_1 = [Whole("w", (3,), torch.float32, ((1, None),))]


def time_out(*_: object, **__: object) -> None:
    raise RuntimeError("timed out")


WAITS: dict[str, tuple[int, Callable[[World], object]]] = {
    "gathers": (0, lambda world: gather_text(world, "here")),
    "takes": (0, lambda world: list(collect(world, OF_RANK_1, {}))),
    "gives": (1, lambda world: list(collect(world, OF_RANK_1, {"w": HeldPart(torch.zeros(3))}))),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_rank_waits_until_it_knows_who_is_lost(how: str) -> None:
    """Else a rank that looks meanwhile finds two that do not wait, and may name this one."""
    rank, wait = WAITS[how]
    with watches(2) as (watching, _):
        watch = watching[rank]
        seen: list[bool] = []

        def verdict(timed_out: bool) -> None:
            assert timed_out
            seen.append(watch.place.waits)

        group = Mock(spec=dist.ProcessGroup)
        world = World(rank, 2, torch.device("cpu"), group, watch=watch)
        with (
            patch.object(watch, "verdict", verdict),
            patch.multiple(dist, all_gather=time_out, recv=time_out, send=time_out),
            pytest.raises(PeerLostError),
        ):
            wait(world)
        assert seen == [True]
        assert not watch.place.waits
