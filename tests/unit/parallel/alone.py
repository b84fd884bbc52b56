"""One rank that holds all parts, for tests in one process."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.split import Split, choose_layers, split_layers

TOLERANCE = 1e-10


def split_alone(model: nn.Module, words: Mapping[str, str], num_parts: int) -> Split:
    """`firecaffe.split`, but no process group is joined."""
    group = PartGroup(Group(0, 1, torch.device("cpu")), num_parts)
    return split_layers(model, choose_layers(model, words), group)


def split_copy(model: nn.Module, words: Mapping[str, str], num_parts: int) -> Split:
    """A copy of the model, in parts."""
    return split_alone(copy.deepcopy(model), words, num_parts)


def assert_close(found: Tensor, expected: Tensor, what: object) -> None:
    """The largest difference, relative to the largest number."""
    assert found.shape == expected.shape, what
    largest = max(float(expected.abs().max()), 1e-3)  # a true 0 is left with its rounding
    assert float((found - expected).abs().max()) <= TOLERANCE * largest, what


def gradients_of(split: Split) -> dict[str, Tensor]:
    """The gradients of the whole network's parameters, by name."""
    found = {}
    for name, held in split._held():
        own = [each.grad for each in held.own]
        grads = [each for each in own if each is not None]
        if grads:
            found[name] = torch.cat(grads, held.dim) if held.cut else grads[0]
    return found


def compare(
    model: nn.Module,
    words: Mapping[str, str],
    num_parts: int,
    x: Tensor,
    one: Callable[[Any], Tensor] = lambda outputs: outputs,
) -> Split:
    """Compares outputs, and the gradients of inputs and of parameters, of a model in float64 and of
    its split copy. one: makes one tensor of the outputs. Returns the copy.
    """
    split = split_copy(model, words, num_parts)
    by_model = {}
    for name, each in (("whole", model), ("split", split)):
        own_x = x.detach().requires_grad_()
        torch.manual_seed(7)
        y = one(each(own_x))
        torch.manual_seed(8)
        each.zero_grad()
        y.backward(torch.randn_like(y))  # type: ignore[no-untyped-call]
        by_model[name] = y.detach(), own_x.grad
    label = type(model).__name__, str(model)[:200], dict(words), num_parts
    for found, expected in zip(by_model["split"], by_model["whole"], strict=True):
        assert found is not None
        assert expected is not None
        assert_close(found, expected, label)
    expected_gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    found_gradients = gradients_of(split)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        assert_close(found_gradients[name], expected, (name, *label))
    state = split.whole_state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, expected in model.state_dict().items():
        assert_close(state[name].double(), expected.double(), (name, *label))
    return split
