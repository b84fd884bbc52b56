"""Owners of parts of the weights against a server that has them all: the same bits."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe.cluster.calls import Worker as Thread
from firecaffe.data import TensorDataset
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.solvers.config import SolverConfig, needs_norms
from firecaffe.solvers.optimizer import SOLVERS, make_optimizer
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Pull, Push
from firecaffe.synchrony.server_policies import Asynchronous, Leaf, Work
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.modes.served import owners as of_ranks
from firecaffe.training.modes.served.owner import (
    Owner,
    Runs,
    Shard,
    ShardMemory,
    ShardState,
    cut,
    put_together,
)
from firecaffe.training.modes.served.owner_messages import RemoteOwner
from firecaffe.training.modes.served.server import Server, UpdateSettings, late_rule
from firecaffe.training.modes.served.server_memory import ALIGNMENT, Gradient, Parcel, ServerMemory
from firecaffe.training.modes.served.work_gradient import Contribution, UpdateOrder
from firecaffe.training.tensor_file import InMemory
from firecaffe.training.updates.every_rank import Applier
from tests.kit.training import ALONE
from tests.kit.training_steps import Worker, state_of
from tests.unit.training.modes.served.made import in_order, served
from tests.unit.training.modes.served.test_server import Net, queue

STEPS, RATE = 4, 0.05


class Wide(Net):
    """Parameters that are longer than what cuts are multiples of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(3, 301), nn.Linear(301, 6))  # type: ignore[assignment]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_a_cut_has_each_element_once(count: int) -> None:
    tensors = {
        "matrix": torch.randn(13, 57),
        "scalar": torch.randn(()),
        "none": torch.zeros(0),
        "double": torch.randn(31, dtype=torch.float64),
        "half": torch.randn(77, dtype=torch.bfloat16),
    }
    parcel = Parcel(tensors)
    parcel.fill(tensors)
    shards = cut(parcel, count)
    assert len(shards) == count
    for name, each in tensors.items():
        places = [place for shard in shards for place in shard.pieces.get(name, ())]
        assert places == list(range(each.numel()))
    assert sum("none" in shard.pieces for shard in shards) == 1
    sizes = [shard.nbytes for shard in shards]
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT
    for shard in shards:  # runs are views of the bytes that are sent
        for name, view in shard.views(shard.of(parcel), parcel).items():
            assert torch.equal(view, shard.run_of(name, tensors[name]))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_cut_between_parameters_keeps_them_whole(count: int) -> None:
    tensors = {str(size): torch.zeros(size, 16) for size in (5, 60, 0, 1, 31, 30)}
    parcel = Parcel(tensors)
    shards = cut(parcel, count, whole=True)
    names = [name for shard in shards for name in shard.pieces]
    assert names == list(tensors)
    for shard in shards:
        views = shard.views(shard.of(parcel), parcel)
        assert all(views[name].shape == tensors[name].shape for name in shard.pieces)
    sizes = [shard.nbytes for shard in shards]
    assert max(sizes) - min(sizes) <= 60 * 16 * 4


def runs_of(tensors: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    own = {name: each for name, each in tensors.items() if name in shard.pieces}
    return {name: shard.run_of(name, each).clone() for name, each in own.items()}


class Served:
    def __init__(
        self, solver: SolverConfig, words: SynchronyConfig, order: tuple[int, ...], layout: Any
    ) -> None:
        torch.manual_seed(3)
        net = Wide().train().to(memory_format=layout)  # type: ignore[call-overload]
        images = torch.randn(27, 1, 6, 6, generator=torch.Generator().manual_seed(2))
        data = TensorDataset(images, torch.arange(27) % 6)
        parts = Worker(net, data, make_optimizer(dict(net.named_parameters()), solver))
        policy = Asynchronous(queue(parts, STEPS), 3, 0, words)
        self.stepper = served(parts, words, in_order(policy, order), STEPS)
        self.server, self.parts = self.stepper.server, parts
        self.server.applier.ema = ema = Ema(parts.named, 0.9)
        self.whole = state_of(ALONE, net, parts.optimizer)
        self.whole.pieces |= {"ema": ema.piece, "server": self.server.memory}
        self._source, self._contributions = self.stepper.source, self.stepper.contributions
        self.stepper.source = self.stepper.contributions = self
        self.events: list[Event] = []
        self.gradients: dict[Work, dict[str, Tensor]] = {}

    def next(self) -> Event:
        self.events.append(self._source.next())
        return self.events[-1]

    def of(self, work: Work) -> Contribution:
        contribution = self._contributions.of(work)
        self.gradients[work] = {
            name: g.clone() for name, g in contribution.gradient.tensors.items()
        }
        return contribution


class Owners:
    """The owners of a training as it is now, in this process."""

    def __init__(self, of: Served, solver: SolverConfig) -> None:
        server, self.named = of.server, of.parts.named
        parcel = Parcel(self.named)
        self.shards = [shard for shard in cut(parcel, 9, needs_norms(solver)) if shard.nbytes]
        self.owners = []
        for shard in self.shards:
            runs = Runs(self.named, shard)
            ema = Ema(runs.named, 0.9)
            optimizer = make_optimizer(self.named, solver, 0, runs.named)
            memory = ShardMemory(runs, bool(server.memory.mean_square), shard, parcel)
            applier = Applier(optimizer, server.applier.scale.of(optimizer), ema=ema)
            held = ShardState(runs, applier, memory)
            held.take(of.whole.pieces, of.whole.numbers["scalars"].state_dict(), shard)
            none = BufferChanges(nn.Module())
            rule = late_rule(server.words.compensate, memory, self.named)
            made = runs.named, applier, memory, server.words, {0, 1, 2}, none
            own = Server(*made, of.parts.order, late_rule=rule)
            own.load_state_dict(server.state_dict())
            self.owners.append(Owner(own, held))

    def take(self, of: Served, rate: float) -> None:
        for event in of.events:
            for shard, owner in zip(self.shards, self.owners, strict=True):
                if isinstance(event, Push):
                    gradient = Gradient(runs_of(of.gradients[event.work], shard), [])
                    owner.bring(event.work, gradient)
                owner.take(UpdateOrder(event, UpdateSettings(0, rate, None, 0)))

    def parts(self) -> dict[str, dict[str, Tensor]]:
        held = [owner.held.parts()[0] for owner in self.owners]
        return put_together(self.named, self.shards, held)

    def numbers(self) -> dict[str, Any]:
        return {k: v for owner in self.owners for k, v in owner.held.parts()[1].items()}


@pytest.mark.parametrize(
    ("kind", "compensate", "layout"),
    [
        *((kind, "none", torch.contiguous_format) for kind in SOLVERS),
        *((kind, "none", torch.channels_last) for kind in ("sgd", "lamb")),
        ("sgd", "delay", torch.contiguous_format),
        ("adamw", "delay", torch.channels_last),
    ],
)
def test_owners_come_to_one_server_s_bits(
    kind: str, compensate: Any, layout: torch.memory_format
) -> None:
    """From the second step on; softsync, so that gradients wait when the state is looked at."""
    form: Any = "decoupled" if kind == "nesterov" else "l2"
    rates: dict[str, Any] = {"lr_mult": {"@vector": 2.0}, "decay_mult": {"*.bias": 0.0}}
    solver = SolverConfig(type=kind, base_lr=RATE, weight_decay=1e-3, decay_form=form, **rates)
    rule: dict[str, Any] = {"compensate": compensate, "staleness_rate": "inverse"}
    words = SynchronyConfig("asynchronous", gradients_per_update=2, **rule)
    one = Served(solver, words, (0, 1, 2, 0, 0, 2), layout)
    named, memory, before = one.parts.named, one.server.memory, one.whole
    one.stepper.run(0, RATE)
    owners = Owners(one, solver)
    assert memory.gradients  # that wait
    for owner in owners.owners:
        assert owner.held.memory.gradients.keys() == memory.gradients.keys()
    pulled = set()
    for step in range(1, STEPS):
        one.events.clear()
        one.stepper.run(step, RATE / step)
        owners.take(one, RATE / step)
        pulled |= {event.work.version for event in one.events if isinstance(event, Pull)}
        for version in pulled & memory.versions.keys():
            kept = {name: memory.versions[version][name] for name in named}
            for shard, owner in zip(owners.shards, owners.owners, strict=True):
                views = shard.views(owner.version(version), Parcel(named))
                runs = runs_of(kept, shard)
                assert all(torch.equal(views[name], runs[name]) for name in views)
        parts = owners.parts()
        for name in ("parameter", "optimizer", "ema", "server"):
            expected = {path: part.tensor for path, part in before.pieces[name].parts().items()}
            if name != "optimizer":  # but for what rank 0 keeps
                expected = {k: v for k, v in expected.items() if k.split("/")[-1] in named}
            assert parts[name].keys() == expected.keys()
            assert all(torch.equal(parts[name][path], expected[path]) for path in expected)
        assert owners.numbers() == before.numbers["scalars"].state_dict()


def test_owners_that_are_cut_end_without_an_order() -> None:
    """Rank 0 would wait for them, and past the time that a rank has once another is lost."""
    cut_owners = object.__new__(of_ranks.Owners)
    lines: Any = SimpleNamespace(cut=lambda: None)
    cut_owners._owner, cut_owners._owner_lines = None, lines
    cut_owners._threads = [Thread("orders")]
    cut_owners._orders = [(thread, RemoteOwner(lines)) for thread in cut_owners._threads]
    cut_owners.cut()
    assert cut_owners.join(60)
    cut_owners.check()


def test_what_waits_in_a_checkpoint_comes_to_the_device_of_the_weights() -> None:
    net = nn.Linear(2, 2, device="meta")
    kept = ServerMemory(net, dict(net.named_parameters()), squares=False)
    stored = {"gradient/1.0/bias": torch.zeros(2), "tail/1.0/0": torch.zeros(1)}
    kept.load(InMemory(stored))
    waiting = kept.gradients[Leaf(1, 0)]
    assert all(tensor.is_meta for tensor in (*waiting.tensors.values(), *waiting.tail))
