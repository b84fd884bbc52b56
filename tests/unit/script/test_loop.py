"""A script's own loop: which ranks share a host, their first forward, a scaler's updates."""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from benchmarks.training.unusual.layers import PIXELS, WIDTH, Clamp, Words
from benchmarks.training.unusual.teachers import Teacher
from firecaffe.script.first_forward import tell_of_own_state
from firecaffe.script.local import after_each_update
from firecaffe.script.script_exchange import host_key, ranks_per_host


def test_ranks_of_a_host_stand_together() -> None:
    assert ranks_per_host(["a", "a", "b", "b"]) == [2, 2]
    assert ranks_per_host(["a", "b", "b"]) == [1, 2]
    assert ranks_per_host(["a", "b", "a"]) == [1, 1, 1]


def test_a_host_is_also_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for rank, local_rank in ((0, 0), (1, 1), (2, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        keys.append(host_key())
    assert ranks_per_host(keys) == [2, 1]
    monkeypatch.delenv("LOCAL_RANK")
    assert ranks_per_host([host_key(), keys[0]]) == [1, 1]


IMAGES, VALUES = torch.randn(2, 1, 8, 8), torch.randn(2, WIDTH)
assert IMAGES[0].numel() == PIXELS


def told(network: nn.Module, inputs: torch.Tensor, averages: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tell_of_own_state(network, "parallelize", averages)
        network.eval()(inputs)
        network.train()(inputs)
        network(inputs)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("network", "inputs", "averages", "said"),
    [
        (Words(max_norm=0.1), IMAGES, False, "parallelize.*table.weight"),
        # An average takes trained weights, and no others.
        (Words(max_norm=0.1), IMAGES, True, ""),
        (Teacher(), VALUES, True, "teacher.weight, teacher.bias"),
        (nn.Sequential(Clamp()), VALUES, True, "extra state of 0"),
        (nn.Sequential(nn.Linear(WIDTH, 2), nn.BatchNorm1d(2)), VALUES, False, ""),
    ],
)
def test_state_that_forward_changes_is_told_once(
    network: nn.Module, inputs: torch.Tensor, averages: bool, said: str
) -> None:
    lines = told(network, inputs, averages)
    assert len(lines) == bool(said)
    assert re.search(said, " ".join(lines))
    assert not network._forward_hooks
    assert not network._forward_pre_hooks


def test_a_copy_looks_for_itself() -> None:
    network = Words(max_norm=0.1)
    tell_of_own_state(network, "parallelize", averages=False)
    with pytest.warns(UserWarning, match=r"table\.weight"):
        copy.deepcopy(network)(IMAGES)
    assert network._forward_hooks


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert not told(Words(max_norm=0.1), IMAGES, averages=False)
    monkeypatch.undo()


def test_several_are_called_and_each_ends_by_itself() -> None:
    scaler, called = GradScaler("cpu", enabled=False), list[str]()
    ends = [after_each_update(scaler, lambda: called.append("a"))]
    ends.append(after_each_update(scaler, lambda: called.append("b")))
    scaler.update()
    ends[0]()
    ends[0]()
    scaler.update()
    assert called == ["a", "b", "b"]
    ends[1]()
    scaler.update()
    assert called == ["a", "b", "b"]
