"""The work of compressors is what their kernels do: counted by hand for the simplest."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.compressor_work import (
    SIDE,
    SIZE,
    _counted,
    compressor_work,
    decoding_work,
    encoding_work,
)
from firecaffe.planner.price import PRICED, coded_s
from firecaffe.planner.simulate import Network
from firecaffe.training.modes.served.coder import make_coder

CAST = 1.5
"""Passes of a cast: four bytes read and two written, or the other way round."""


def test_casts_are_as_counted_by_hand() -> None:
    """A node is encoded, decoded and added; the total is a copy, encoded and decoded again."""
    work = compressor_work("float16")
    assert work.own.passes == pytest.approx(2 * CAST + 3)
    assert work.of(1, 5).passes == pytest.approx(2 * CAST + 2 + 2 * CAST, rel=1e-3)
    assert decoding_work("bfloat16") == (CAST, 0, 1)


@pytest.mark.parametrize("name", PRICED)
def test_work_grows_with_what_it_is_for(name: str) -> None:
    work = compressor_work(name)
    assert work.own.passes > 0
    assert work.own.kernels + work.own.kernels_per_tensor > 0
    # Payloads of whole tensors are decoded by all workers, one tensor after the other.
    assert (work.other.kernels_per_tensor > 0) == (name in ("one_bit", "top_k"))
    assert (work.own.kernels_per_tensor > 20) == (name in ("one_bit", "top_k"))


def test_many_small_tensors_take_longer_than_a_large_one() -> None:
    cluster = load_cluster("ethernet-1g")
    network = Network(cluster.links, 2)
    device = replace(cluster.device, overhead_s=1e-5)
    [one], [ten] = (
        coded_s("one_bit", 1 / 32, 2, network, device, [10**6], tensors / 10**6)
        for tensors in (1, 10)
    )
    kernels = compressor_work("one_bit").of(1, 1).kernels_per_tensor
    assert ten - one == pytest.approx(9 * kernels * 1e-5)


@pytest.mark.parametrize("name", ["int8", "top_k", "one_bit"])
def test_a_push_to_a_server_is_priced_as_the_coder_does_it(name: str) -> None:
    """Within a third: the coder also pads, and looks whether all is finite."""
    parameter = nn.Parameter(torch.zeros(SIDE, SIDE))
    coder = make_coder(name, {"weight": parameter})
    gradient = torch.arange(SIZE, dtype=torch.float32).sin().view(SIDE, SIDE)
    coder.encode(0, {"weight": gradient})
    passes, kernels = _counted(lambda: coder.encode(0, {"weight": gradient}))
    work = encoding_work(name)
    assert work.passes == pytest.approx(passes, rel=1 / 3)
    assert work.kernels_per_tensor == pytest.approx(kernels, rel=1 / 2)


def test_a_cast_is_pushed_without_a_memory() -> None:
    assert encoding_work("float16") == (CAST, 0, 1)
