"""One rank that holds all parts, for tests in one process."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.layer_split import Split, choose_layers, replace_layers

TOLERANCE = 1e-10


def group_of(num_parts: int) -> PartGroup:
    return PartGroup(Group(0, 1, torch.device("cpu")), num_parts)


def split_copy(model: nn.Module, words: Mapping[str, str], num_parts: int) -> Split:
    """`firecaffe.split` of a copy of the model, but no process group is joined."""
    model = copy.deepcopy(model)
    return replace_layers(model, choose_layers(model, words), group_of(num_parts))


def assert_close(found: Tensor, expected: Tensor, what: object) -> None:
    """The largest difference, relative to the largest number."""
    assert found.shape == expected.shape, what
    largest = max(float(expected.abs().max()), 1e-3)  # a true 0 is left with its rounding
    assert float((found - expected).abs().max()) <= TOLERANCE * largest, what


def assert_all_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: Any) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert_close(found[name].double(), each.double(), (name, *what))


def gradients_of(split: Split) -> dict[str, Tensor]:
    found = {}
    for name, held in split._held():
        grads = [part.grad for part in held.own if part.grad is not None]
        if grads:
            found[name] = torch.cat(grads, held.dim) if held.cut else grads[0]
    return found


def compare(
    model: nn.Module,
    words: Mapping[str, str],
    num_parts: int,
    x: Tensor | Sequence[int],
    one: Callable[[Any], Tensor] = lambda outputs: outputs,
) -> Split:
    """Compares outputs, and the gradients of inputs and of parameters, of a model, from here on in
    float64, and of its split copy.

    x: inputs, or their shape. one: makes one tensor of the outputs. Returns the copy.
    """
    x = (x if isinstance(x, Tensor) else torch.randn(*x)).double()
    split = split_copy(model.double(), words, num_parts)
    results = []
    for each in (model, split):
        own_x = x.detach().requires_grad_()
        torch.manual_seed(7)
        y = one(each(own_x))
        torch.manual_seed(8)
        each.zero_grad()
        y.backward(torch.randn_like(y))  # type: ignore[no-untyped-call]
        assert own_x.grad is not None
        results.append({"outputs": y.detach(), "inputs": own_x.grad})
    label = type(model).__name__, str(model)[:200], dict(words), num_parts
    assert_all_close(results[1], results[0], label)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_all_close(gradients_of(split), gradients, label)
    assert_all_close(split.whole_state_dict(), model.state_dict(), label)
    return split
