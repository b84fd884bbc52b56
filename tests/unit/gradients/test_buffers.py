"""Buffers: every micro-batch from the step's start, mean changes weighted, counts once a step."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.gradients.buffers import BufferChanges, BufferSnapshot


class Counted(nn.Module):
    """Replaces one buffer, changes one in place, counts, and keeps a constant."""

    mean: Tensor
    sum: Tensor
    count: Tensor
    constant: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, 2, dtype=dtype))
        self.register_buffer("sum", torch.zeros(3, dtype=dtype))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("constant", torch.tensor(0.1, dtype=dtype))

    def see(self, value: float) -> None:
        self.mean = self.mean * 0.5 + value
        self.sum += value
        self.count += 1


def run_step(
    changes: BufferChanges,
    micro_batches: Sequence[Callable[[], object]],
    weights: Sequence[float] = (1.0, 1.0),
) -> None:
    """What a micro-batch returns is differentiated: `take` has not touched what backward needs."""
    changes.begin_step()
    total = changes.zero_changes()
    for micro_batch, (run, weight) in enumerate(zip(micro_batches, weights, strict=True)):
        changes.begin_micro_batch()
        loss = run()
        torch._foreach_add_(total, changes.take(micro_batch, weight))
        if isinstance(loss, Tensor):
            torch.autograd.backward(loss)
    changes.begin_micro_batch()
    changes.finish_step(total, sum(weights))


def seen(model: Counted, *values: float) -> list[Callable[[], None]]:
    return [partial(model.see, value) for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step(dtype: torch.dtype) -> None:
    model = Counted(dtype)
    model.mean += 4
    run_step(BufferChanges(model), seen(model, 2.0, 4.0, 8.0), [1, 1, 0.5])
    # Each from the start: mean 4 -> 2 + value; weighted over 2.5.
    expected = 4 + ((2 + 2 - 4) + (2 + 4 - 4) + 0.5 * (2 + 8 - 4)) / 2.5
    torch.testing.assert_close(model.mean, torch.full((2, 2), expected, dtype=dtype))
    torch.testing.assert_close(model.sum, torch.full((3,), (2 + 4 + 4) / 2.5, dtype=dtype))
    assert model.count == 6
    for _ in range(10):  # a mean of three 0.1 would drift
        run_step(BufferChanges(model), seen(model, 1.0, 1.0, 1.0), [1] * 3)
    assert torch.equal(model.constant, torch.tensor(0.1, dtype=dtype))
    assert BufferChanges(nn.Linear(2, 2)).zero_changes() == []


def test_a_shared_buffer_counts_once() -> None:
    model = Counted()
    model.again = nn.Module()
    model.again.register_buffer("sum", model.sum)
    assert sum(part.numel() for part in BufferChanges(model).zero_changes()) == 4 + 3 + 1 + 1


class Odd(nn.Module):
    """Buffers of other types and values, and one that forward uses and then replaces."""

    mask: Tensor
    unsigned: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("causal", torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
        self.register_buffer("large", torch.tensor(123_456_789))
        self.register_buffer("unsigned", torch.tensor([3], dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(2))
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x * self.scale * self.weight).sum()
        self.scale = 0.5 * self.scale + x.detach()
        self.mask = ~self.mask
        self.unsigned = self.unsigned - 1
        return y


def test_odd_buffers() -> None:
    model = Odd()
    run_step(BufferChanges(model), [partial(model, torch.ones(2))] * 2)
    state = model.state_dict()
    assert state["mask"].tolist() == [False, True]
    assert torch.equal(state["causal"], torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
    assert state["large"] == 123_456_789
    assert state["unsigned"] == 2
    assert state["scale"].tolist() == [1.5, 1.5]


def test_a_complex_buffer_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(RecipeError, match="phase is complex"):
        BufferChanges(model)


class Behind(nn.Module):
    """A buffer, and a parameter that is not trained, that are changed in many a way."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0).reshape(2, 2))
        self.teacher = nn.Parameter(torch.arange(4.0).reshape(2, 2), requires_grad=False)

    def turn(self) -> None:
        self.table = self.table.T

    def turn_behind(self) -> None:
        self.table.data = self.table.data.T

    def follow(self) -> None:
        self.teacher.data = self.teacher.data + 1

    def add_behind(self) -> None:
        self.table.data.add_(1)


@pytest.mark.parametrize("way", ["turn", "turn_behind", "follow", "add_behind"])
def test_whatever_way_a_value_is_changed_in(way: str) -> None:
    """Each micro-batch begins with what was there, and an evaluation ends with it."""
    model, expected, begun = Behind(), Behind(), Behind()
    getattr(expected, way)()

    def change() -> None:
        assert torch.equal(model.table, begun.table)
        assert torch.equal(model.teacher, begun.teacher)
        getattr(model, way)()

    run_step(BufferChanges(model, ["teacher"]), [change, change])
    assert torch.equal(model.table, expected.table)
    assert torch.equal(model.teacher, expected.teacher)
    evaluated = Behind()
    kept = BufferSnapshot(evaluated)
    getattr(evaluated, way)()
    kept.put_back()
    assert torch.equal(evaluated.table, begun.table)


def test_from_infinity_to_any_value() -> None:
    model = nn.Module()
    model.register_buffer("least", torch.full((3,), torch.inf))

    def see(*values: float) -> None:
        model.get_buffer("least").copy_(torch.tensor(values))

    run_step(
        BufferChanges(model), [partial(see, 0.0, 2.0, torch.inf), partial(see, 0.0, 4.0, torch.inf)]
    )
    assert model.get_buffer("least").tolist() == [0.0, 3.0, torch.inf]
