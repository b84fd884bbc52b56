"""Attributes of modules are told apart by their values, whatever they are in."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from firecaffe.inventory.attributes import attributes_of


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.word = 0, "a"
        self.list = [0, {"deep": (torch.zeros(2), None)}]
        self.array = np.zeros(3)
        self.of_torch, self.of_python = torch.Generator(), random.Random(0)
        self.of_numpy = np.random.default_rng(0)
        self.of_numpy_before = np.random.RandomState(0)
        self.of_numpy_before.rand()  # the next draws move its place alone
        self.hidden = [nn.BatchNorm1d(2)]
        self.layer = nn.Linear(2, 2)
        self.opaque = object()


def set_deep(holder: Holder) -> None:
    holder.list[1]["deep"][0][1] = 1.0  # type: ignore[index]


def set_hidden(holder: Holder) -> None:
    holder.hidden[0](torch.randn(4, 2))


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "count": lambda holder: setattr(holder, "count", 1),
    "word": lambda holder: setattr(holder, "word", "b"),
    "list[1]['deep'][0]": set_deep,
    "len(list)": lambda holder: holder.list.append(1),
    "array": lambda holder: holder.array.fill(1),
    "of_torch": lambda holder: torch.rand(1, generator=holder.of_torch),
    "of_python": lambda holder: holder.of_python.random(),
    "of_numpy": lambda holder: holder.of_numpy.random(),
    "of_numpy_before": lambda holder: holder.of_numpy_before.rand(),
    "hidden[0].running_mean": set_hidden,
}


@pytest.mark.parametrize("path", CHANGES)
def test_what_changes_is_seen(path: str) -> None:
    holder = nn.Sequential(Holder())
    before = attributes_of(holder)
    CHANGES[path](holder[0])  # type: ignore[arg-type]
    after = attributes_of(holder)
    full = path.replace("len(", "len(0.") if path.startswith("len(") else f"0.{path}"
    assert before.get(full) != after[full]
    changed = {each for each in after if before.get(each) != after[each]}
    assert changed <= {full, "0.list[2]", *(f"0.hidden[0].{each}" for each in BATCH_NORM)}


BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")


def test_what_a_module_has_by_torch_is_no_attribute() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = attributes_of(network)
    network(torch.randn(4, 2))
    network.eval()
    assert attributes_of(network) == before
