"""The work of compressors is what their kernels do: counted by hand for the simplest."""

from dataclasses import replace

import pytest

from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.compressor_work import (
    KernelWork,
    compressor_work,
    decoding_work,
    encoding_work,
)
from firecaffe.planner.price import PRICED, coded_s
from firecaffe.planner.simulate import Network

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


def test_a_server_s_tensors_are_encoded_one_by_one() -> None:
    encoding, alone = encoding_work("int8"), compressor_work("int8").of(1, 0)
    assert encoding == KernelWork(alone.passes, 0, alone.kernels + alone.kernels_per_tensor)
