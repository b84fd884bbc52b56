"""What a training carries comes back from a checkpoint, or an error says why not."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn, optim

from firecaffe.errors import CheckpointError
from firecaffe.runs.measure import Measure
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import SOLVERS, make_optimizer
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.server_policies import Asynchronous, LeafQueue, Leaves
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from firecaffe.training.divergence import LossRise
from firecaffe.training.piece import Losses
from firecaffe.training.state import State
from firecaffe.training.tensor_file import InMemory
from firecaffe.transport.collect import HeldPart
from tests.kit.training import ALONE
from tests.kit.training_steps import state_of


class Scale:
    """Stands in for torch's scaler of float16 losses, which is idle on a CPU."""

    def __init__(self) -> None:
        self.state = {"scale": 65536.0, "_growth_tracker": 3}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Net(nn.Module):
    """A shared, a frozen, an unused and a scalar parameter; buffers of several types."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)
        self.again = self.head
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.factors = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("bytes", torch.tensor([0, 255], dtype=torch.uint8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images)).mean((2, 3))
        out: Tensor = self.again(torch.relu(self.head(x))) * self.scale
        return out * self.factors.sum().float()


def train_some(net: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(5, 3, 6, 6, generator=generator)
        optimizer.zero_grad()
        net(images).square().mean().backward()
        optimizer.step()


def build(seed: int, solver: str, channels_last: bool) -> tuple[Net, optim.Optimizer, State]:
    net = Net(seed)
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    config = SolverConfig(type=solver, momentum=0.9, weight_decay=0.01)
    optimizer = make_optimizer(named, config)
    return net, optimizer, state_of(ALONE, net, optimizer)


def taken(state: State) -> Checkpoint:
    tensors = InMemory(state.tensors_held_by_all())
    numbers = {word: each.state_dict() for word, each in state.numbers.items()}
    return Checkpoint(3, {}, "p", state.losses.history, tensors, numbers=numbers)


def bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Any, ...]]:
    """What must come back: dtype, shape, layout and every byte."""
    return {
        name: (t.dtype, t.shape, t.stride(), t.contiguous().view(-1).view(torch.uint8).tolist())
        for name, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("solver", "channels_last"), [*((solver, False) for solver in SOLVERS), ("adam", True)]
)
def test_every_bit_comes_back(tmp_path: Path, solver: str, channels_last: bool) -> None:
    net, optimizer, state = build(1, solver, channels_last)
    state.numbers["scaler"] = Scale()
    train_some(net, optimizer, range(3))
    state.losses.add(0.5)
    scalars = {"count": 3, "rate": 0.1, "nothing": None}
    optimizer.state[net.unused].update(scalars)
    before, digests = bits(state.tensors_held_by_all()), (state.sha256(), state.compare_weights())
    save_checkpoint(tmp_path, taken(state))
    assert bits(state.tensors_held_by_all()) == before

    other, other_optimizer, loaded = build(2, solver, channels_last)
    scale = loaded.numbers["scaler"] = Scale()
    scale.state = {}
    loaded.load(load_newest(tmp_path)[0])
    loaded.check_all_loaded()
    assert bits(loaded.tensors_held_by_all()) == before
    assert (loaded.sha256(), loaded.compare_weights()) == digests
    assert scale.state == Scale().state
    kept = other_optimizer.state[other.unused]
    assert {word: kept[word] for word in scalars} == scalars

    # And the training goes on as if it had not been interrupted.
    train_some(net, optimizer, range(3, 6))
    train_some(other, other_optimizer, range(3, 6))
    assert bits(loaded.tensors_held_by_all()) == bits(state.tensors_held_by_all())


def test_digests_are_those_that_runs_have_recorded() -> None:
    """By the standard library alone: name, type and shape, then the bytes; the losses last."""
    net, optimizer, state = build(1, "adam", False)
    train_some(net, optimizer, range(1))
    state.losses.add(0.25)

    def sha256(*parts: tuple[str, Tensor]) -> str:
        found = hashlib.sha256()
        for name, tensor in parts:
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()

    weights: list[tuple[str, Tensor]] = []
    weights += [(f"parameter/{name}", p) for name, p in net.named_parameters()]
    weights += [(f"buffer/{name}", b) for name, b in net.named_buffers()]
    kept = [
        (f"optimizer/{name}/{key}", optimizer.state[p][key])
        for name, p in net.named_parameters()
        if p in optimizer.state
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    losses = hashlib.sha256(b" 0x1.0000000000000p-2").hexdigest()
    whole = hashlib.sha256(f"{sha256(*weights, *kept)} {losses}".encode()).hexdigest()
    assert state.compare_weights() == (sha256(*weights), [])
    assert state.sha256() == whole
    each = {name: sha256((name, tensor))[:16] for name, tensor in [*weights, *kept]}
    assert state.digest_each() == {**each, "losses": losses[:16]}
    # The live tensors, not copies.
    assert state.tensors_held_by_all()["parameter/scale"].data_ptr() == net.scale.data_ptr()


def test_a_checkpoint_of_earlier_versions_loads(tmp_path: Path) -> None:
    """Its files as they were written then, and not by the code of today."""
    net, optimizer, state = build(1, "sgd", False)
    train_some(net, optimizer, range(1))
    folder = tmp_path / "checkpoints" / "step-00000003"
    folder.mkdir(parents=True)
    tensors = {f"parameter/{name}": p.detach() for name, p in net.named_parameters()}
    tensors |= {f"buffer/{name}": b for name, b in net.named_buffers()}
    for name, p in net.named_parameters():
        if p in optimizer.state:
            tensors[f"optimizer/{name}/momentum_buffer"] = optimizer.state[p]["momentum_buffer"]
    memory = {"0.w": torch.arange(3.0), "q.w": torch.ones(2)}
    save_file(tensors, folder / "state.safetensors")
    save_file(memory, folder / "compressor.safetensors")
    meta = {"step": 3, "identity": {"a": 1}, "probe": "p", "history": "h", "doubts": ["d"]}
    meta |= {"scalars": {"scale/count": 2}, "scaler": {"scale": 2.0}}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    files = ("state.safetensors", "meta.json", "compressor.safetensors")
    sums = {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files}
    (folder / "SHA256SUMS").write_text("".join(f"{sums[file]}  {file}\n" for file in files))

    checkpoint = load_newest(tmp_path)[0]
    assert (checkpoint.step, checkpoint.identity, checkpoint.probe) == (3, {"a": 1}, "p")
    assert checkpoint.doubts == ["d"]
    other, other_optimizer, loaded = build(2, "sgd", False)
    loaded.numbers["scaler"] = scale = Scale()
    loaded.load(checkpoint)
    assert bits(loaded.tensors_held_by_all()) == bits(state.tensors_held_by_all())
    assert other_optimizer.state[other.scale]["count"] == 2
    assert (loaded.losses.history, scale.state) == ("h", {"scale": 2.0})
    with pytest.raises(CheckpointError, match="holds compressor,"):
        loaded.check_all_loaded()  # nothing here keeps it
    del loaded.numbers["scaler"]
    with pytest.raises(CheckpointError, match="holds compressor, scaler,"):
        loaded.check_all_loaded()
    loaded.numbers["scaler"] = scale
    later = Kept()
    loaded.add("compressor", later)
    loaded.check_all_loaded()
    assert bits(later.taken) == bits(memory)


class Kept:
    """A piece that takes whatever there is."""

    held_by_all = False
    is_result = False

    def parts(self) -> dict[str, HeldPart]:
        return {}

    def load(self, stored: Mapping[str, Tensor]) -> None:
        self.taken = dict(stored)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("parameter/head.bias", None, "lacks head.bias, which the model has"),
        ("buffer/mask", None, "lacks mask, which the model has"),
        ("parameter/head.bias", torch.zeros(5), r"head.bias is torch.float32 \(5,\) in the chec"),
        ("parameter/head.bias", torch.zeros(4).double(), r"head.bias is torch.float64 \(4,\) in"),
        ("buffer/mask", torch.zeros(2), r"mask is torch.float32 \(2,\) in the checkpoint, torch"),
        ("parameter/more", torch.zeros(2), "holds parameter/more, which the model does not have"),
        ("buffer/more", torch.zeros(2), "holds buffer/more"),
        ("optimizer/more/step", torch.zeros(2), "holds optimizer/more/step"),
        ("stranger", torch.zeros(2), "holds stranger"),
    ],
)
def test_another_model(name: str, value: Tensor | None, words: str) -> None:
    tensors = build(1, "sgd", False)[2].tensors_held_by_all()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    with pytest.raises(CheckpointError, match=words):
        build(2, "sgd", False)[2].load(Checkpoint(3, {}, "p", tensors=InMemory(tensors)))
    checkpoint = taken(build(1, "sgd", False)[2])
    checkpoint.numbers["scalars"]["more/count"] = 3
    with pytest.raises(CheckpointError, match="holds more/count, which the model does not have"):
        build(2, "sgd", False)[2].load(checkpoint)


@pytest.mark.parametrize(
    ("word", "damage", "said"),
    [
        ("best", {"metric": "top1"}, "missing required field value"),
        ("best", {"metric": 3}, r"\$\.metric: expected str, got int, found 3"),
        ("rise", {"first": [0.0] * 4}, r"\$\.first: expected array of length <= 3"),
        ("rise", {"above": "x"}, r"\$\.above: expected int, got str, found 'x'"),
        ("scalars", {"groups/9/count": 3}, "IndexError"),
        ("synchrony", {"desk": {"version": 3}}, "KeyError"),
    ],
)
def test_numbers_that_are_none(word: str, damage: dict[str, Any], said: str) -> None:
    state = build(1, "sgd", False)[2]
    queue = LeafQueue(Leaves(0, 2, 2, 2, 4))
    state.numbers["best"] = Best(Measure("top1", True))
    state.numbers["rise"] = LossRise()
    state.numbers["synchrony"] = Asynchronous(queue, 2, 0, SynchronyConfig())
    checkpoint = taken(state)
    whole = LossRise().state_dict() if word == "rise" else {}
    checkpoint.numbers[word] = {**whole, **damage}
    with pytest.raises(CheckpointError, match=f"checkpoint's {word} cannot be taken .*{said}"):
        state.load(checkpoint)


def chain(*losses: float) -> str:
    chained = Losses()
    for loss in losses:
        chained.add(loss)
    return chained.history


def test_history_is_a_chain_that_tells_losses_apart_to_the_last_bit() -> None:
    losses = [0.1, 0.1 + 2**-56, 0.0, -0.0, 5e-324, *map(float, ("nan", "inf", "-inf"))]
    assert len({*map(chain, losses)}) == len(losses)
    assert len({chain(1.0, 2.0), chain(2.0, 1.0), chain(1.0), chain(2.0), chain()}) == 5
    # SHA-256 of " 0x1.0000000000000p-1", by coreutils' sha256sum.
    assert chain(0.5) == "4b46b1a4f402036a08a39fe8d90608894b6909a75711f1584e906b338addc921"
