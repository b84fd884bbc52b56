"""power_sgd: a basis also of matrices that lack rank; nothing is lost, low rank is exact, bytes by
formula, and zeros do not trap it.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from firecaffe.errors import CheckpointError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.codec import LowRank
from firecaffe.gradients.compressors.power_sgd import (
    PowerSGD,
    first_query,
    matrix_columns,
    orthonormal,
)
from tests.unit.gradients.compressors.local_wire import (
    LocalWire,
    flatten,
    make_layouts,
    tree_sum,
    unflatten,
)

RANK = 4


COLUMNS: dict[tuple[int, ...], int | None] = {
    **dict.fromkeys([(), (1,), (1000,), (0, 7), (1, 1000)]),
    (8, 8): None,  # 4 · (8 + 8) is 8 · 8
    (8, 9): 9,
    (9, 8): 8,
    (64, 3, 3, 3): 27,
}


def test_a_weight_is_a_matrix_where_that_is_shorter() -> None:
    assert {shape: matrix_columns(shape, RANK) for shape in COLUMNS} == COLUMNS


def test_the_first_query_depends_on_the_name_alone() -> None:
    torch.manual_seed(0)
    first = first_query("fc.weight", RANK, 500)
    torch.manual_seed(1)
    assert torch.equal(first_query("fc.weight", RANK, 500), first)
    assert not torch.equal(first_query("conv.weight", RANK, 500), first)
    assert abs(first.mean()) < 0.1
    assert abs(first.std() - 1) < 0.1


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "full": lambda full: full,
    "one column zero": lambda full: full * torch.tensor([1, 0, 1, 1]),
    "equal columns": lambda full: full[:, :1].repeat(1, RANK),
    "zero": torch.zeros_like,
    "tiny": lambda full: full * 1e-30,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_basis_is_orthonormal_and_holds_every_column(kind: str) -> None:
    full = torch.randn(30, RANK, generator=torch.Generator().manual_seed(0))
    product = KINDS[kind](full)
    basis = orthonormal(product)
    assert torch.allclose(basis.T @ basis, torch.eye(RANK), atol=1e-6)
    error = (basis @ (basis.T @ product) - product).norm()
    assert error <= 1e-6 * product.norm()


SHAPES: dict[str, tuple[int, ...]] = {"w": (20, 30), "bias": (20,), "c": (9, 4, 3, 3), "s": (3, 5)}
LAYOUT = make_layouts(SHAPES, [["w", "bias", "c", "s"]])[0]
COMPRESSED = ("w", "c")
NUM_NODES = 3


def gradients(step: int, rank: int | None = None) -> list[dict[str, Tensor]]:
    """Of each node; all nodes' matrices share `rank` columns where it is given."""
    generator = torch.Generator().manual_seed(step)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    nodes = [{name: draw(math.prod(shape)) for name, shape in SHAPES.items()} for _ in range(3)]
    if rank is not None:
        for name in COMPRESSED:
            rows = SHAPES[name][0]
            columns = math.prod(SHAPES[name][1:])
            shared = draw(rows, rank)
            for node in nodes:
                node[name] = (shared @ draw(rank, columns)).view(-1)
    return nodes


def reduce(compressor: PowerSGD, nodes: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], int]:
    """The total of one step on one rank, and the bytes that it sent."""
    vectors = [(index, flatten(LAYOUT, node)) for index, node in enumerate(nodes)]
    wire = LocalWire(len(nodes))
    return unflatten(LAYOUT, compressor.reduce(0, vectors, wire)), wire.sent_bytes


def test_total_and_memories_are_all_gradients() -> None:
    compressor = PowerSGD(RANK, [LAYOUT])
    owed = {name: torch.zeros(math.prod(SHAPES[name])) for name in SHAPES}
    for step in range(5):
        nodes = gradients(step)
        total, _ = reduce(compressor, nodes)
        state = compressor.state()
        for name in SHAPES:
            owed[name] += tree_sum([node[name] for node in nodes]) - total[name]
        for name in COMPRESSED:
            memories = sum(state[f"{node}.{name}"] for node in range(NUM_NODES))
            assert torch.allclose(owed[name], torch.as_tensor(memories), atol=1e-4)
        for name in ("bias", "s"):  # not compressed: the sum in tree order
            assert torch.equal(total[name], tree_sum([node[name] for node in nodes]))
    kept = {f"{node}.{name}" for node in range(NUM_NODES) for name in COMPRESSED}
    assert set(compressor.state()) == kept | {"q.w", "q.c"}


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_a_sum_of_that_rank_or_less_arrives_whole(rank: int) -> None:
    nodes = gradients(0, rank)
    total, _ = reduce(PowerSGD(RANK, [LAYOUT]), nodes)
    for name in COMPRESSED:
        whole = tree_sum([node[name] for node in nodes])
        assert (total[name] - whole).norm() < 1e-5 * whole.norm()
    nodes = gradients(0, 5)
    total, _ = reduce(PowerSGD(RANK, [LAYOUT]), nodes)
    whole = tree_sum([node["w"] for node in nodes])
    assert (total["w"] - whole).norm() > 1e-3 * whole.norm()


def test_bytes_of_a_node() -> None:
    assert COMPRESSORS["power_sgd"] == LowRank(16)
    _, sent_bytes = reduce(PowerSGD(RANK, [LAYOUT]), gradients(0)[:1])
    factors = RANK * (20 + 30) + RANK * (9 + 36)
    assert sent_bytes == 4 * (factors + 20 + 15)


def test_it_wakes_from_zeros_also_where_the_first_rows_are_dead() -> None:
    compressor = PowerSGD(RANK, [LAYOUT])
    zeros = [{name: torch.zeros(math.prod(SHAPES[name])) for name in SHAPES}] * NUM_NODES
    total, _ = reduce(compressor, zeros)
    assert not any(value.any() for value in total.values())
    nodes = gradients(1, 2)
    for node in nodes:
        node["w"].view(20, 30)[:10] = 0
    whole = tree_sum([node["w"] for node in nodes])
    total, _ = reduce(compressor, nodes)
    assert (total["w"] - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_what_is_not_finite_is_seen_once(number: float) -> None:
    compressor = PowerSGD(RANK, [LAYOUT])
    reduce(compressor, gradients(0))
    nodes = gradients(1)
    nodes[1]["w"][17] = number
    total, _ = reduce(compressor, nodes)
    assert not total["w"].isfinite().any()
    assert total["c"].isfinite().all()
    assert all(value.isfinite().all() for value in compressor.state().values())
    assert torch.equal(compressor.state()["q.w"], first_query("w", RANK, 30))
    total, _ = reduce(compressor, gradients(2))
    assert total["w"].isfinite().all()


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("q.w", (4, 31), r"'q.w' has shape \(4, 31\); this model needs \(4, 30\)"),
        ("q.bias", (4, 1), "'q.bias' has shape .* needs none"),
        ("0.bias", (20,), "'0.bias', which this model"),
    ],
)
def test_another_models_state_is_refused(key: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        PowerSGD(RANK, [LAYOUT]).load_state({key: torch.zeros(shape)}, [0])
