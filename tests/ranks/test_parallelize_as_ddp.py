"""What DistributedDataParallel promises, `parallelize` keeps: groups, uneven inputs, copies, sparse
gradients, its errors. All on two or three ranks that share one start."""

import copy
import io
import os
import pickle
import threading
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import firecaffe
from firecaffe.errors import FirecaffeError
from firecaffe.script.ddp import HookState
from firecaffe.script.script_exchange import timeout_of
from firecaffe.transport.exchange import Exchange
from tests.ranks.test_parallelize import Wrap, gradients_of, register
from tests.world import Ranks


def network(sparse: bool = False) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Embedding(7, 5, sparse=sparse)
    return nn.Sequential(first, nn.Flatten(), nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 3))


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
    return torch.randint(7, (4, 2), generator=generator)


def steps(model: nn.Module, count: int = 3) -> list[Tensor]:
    found = []
    for step in range(count):
        model.zero_grad()
        torch.autograd.backward(model(batch(step)).square().mean())
        found += gradients_of(model)
    return found


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative to the norm of each."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)


def subgroups() -> dict[str, float]:
    """Ranks 0 and 2 train one model, with another one in its place after it is dropped; rank 1
    trains its own."""
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group = groups[dist.get_rank() == 1]
    found = {}
    expected = steps(DistributedDataParallel(network(), process_group=group))
    for attempt in range(2):
        model = firecaffe.parallelize(network(), process_group=group)
        found[f"parallelize {attempt}"] = largest_difference(steps(model), expected)
        del model
    registered = register(network(), process_group=group)
    found["comm_hook"] = largest_difference(steps(registered), expected)
    return found


def mesh() -> dict[str, float]:
    from torch.distributed.device_mesh import init_device_mesh

    all_ranks = init_device_mesh("cpu", (dist.get_world_size(),))
    model = firecaffe.parallelize(network(), device_mesh=all_ranks)
    expected = steps(DistributedDataParallel(network()))
    return {"device_mesh": largest_difference(steps(model), expected)}


def uneven(wrap: Wrap, **words: Any) -> list[Tensor]:
    """The weights after rank r had r + 1 batches."""
    model = wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model], **words):
        for step in range(dist.get_rank() + 1):
            optimizer.zero_grad()
            torch.autograd.backward(model(batch(step)).square().mean())
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def joins() -> dict[str, float]:
    return {
        f"join {words} {wrap.__name__}": largest_difference(
            uneven(wrap, **words), uneven(DistributedDataParallel, **words)
        )
        for words in ({}, {"divide_by_initial_world_size": False})
        for wrap in (firecaffe.parallelize, register)
        # DDP itself takes no heed of the word if a hook is registered by hand.
        if not (wrap is register and "divide_by_initial_world_size" in words)
    }


def copies() -> dict[str, float]:
    model = firecaffe.parallelize(network())
    expected = steps(model)
    threads = threading.active_count()
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    others = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "save": torch.load(file, weights_only=False),
        "averaged": averaged.module,
    }
    assert threading.active_count() == threads
    found = {}
    for name, other in others.items():
        real = Exchange.all_reduce
        with patch.object(Exchange, "all_reduce", autospec=True, side_effect=real) as sums:
            found[name] = largest_difference(steps(other), expected)
        assert sums.called, f"{name}: nothing went through our exchange"
    return found


def sparse() -> dict[str, float]:
    expected = steps(DistributedDataParallel(network(sparse=True)))
    found = steps(firecaffe.parallelize(network(sparse=True)))
    return {"sparse": largest_difference(found, expected)}


def second_hook() -> None:
    """Whatever hook comes second, ours or the user's: DDP's kind of error, in our words."""
    for hook in (firecaffe.adapt.ddp_hook(), (None, allreduce_hook)):
        model = firecaffe.parallelize(network())
        with pytest.raises(RuntimeError, match="DistributedDataParallel") as caught:
            model.register_comm_hook(*hook)
        assert isinstance(caught.value, FirecaffeError)


def auto() -> dict[str, float]:
    model = firecaffe.parallelize(network(), exchange="auto")
    [(_, state)] = model._comm_hooks
    assert isinstance(state, HookState)
    assert state.choice is not None
    assert "shared memory" in state.choice.reason
    expected = steps(DistributedDataParallel(network()))
    return {"auto": largest_difference(steps(model), expected)}


def all_checks() -> dict[str, float]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=97))
    found = subgroups() | mesh() | joins() | copies() | sparse() | auto()
    second_hook()
    model = firecaffe.parallelize(network())
    [(_, state)] = model._comm_hooks
    assert isinstance(state, HookState)
    group = state.meet(torch.device("cpu"), []).exchange_group
    assert group is not None
    found["timeout"] = abs(timeout_of(group, torch.device("cpu")).total_seconds() - 97)
    return found


def test_gradients_are_those_of_ddp_in_all_its_ways(ranks: Ranks) -> None:
    for found in ranks.run(3, all_checks):
        assert max(found.values()) <= 1e-6, found
