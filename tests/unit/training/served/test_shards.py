"""Owners of parts of the weights against a server that has them all: the same bits."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe.cluster.world import World
from firecaffe.data import TensorDataset
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.recipe.config import TrainConfig
from firecaffe.solvers.config import SolverConfig, needs_norms
from firecaffe.solvers.optimizer import SOLVERS, make_optimizer
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Pull, Push
from firecaffe.synchrony.leaf_queue import LeafQueue
from firecaffe.synchrony.server_policies import Asynchronous, Work
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.served.build_served import leaves_of
from firecaffe.training.served.holders import Told
from firecaffe.training.served.messages import ALIGNMENT, Parcel
from firecaffe.training.served.server import Server
from firecaffe.training.served.server_memory import Gradient
from firecaffe.training.served.server_steps import ServedStepper, weight_of
from firecaffe.training.served.shards.owner import Held, Owner, RunMemory, Runs, put_together
from firecaffe.training.served.shards.telling import Order, Teller
from firecaffe.training.served.shards.weight_cuts import Shard, cut
from firecaffe.training.served.work_gradient import Contribution
from firecaffe.training.state import State, state_of
from tests.unit.training.served.made import Made, in_order
from tests.unit.training.served.test_server import Net

CONFIG = TrainConfig(global_batch_size=10, micro_batch_size=2, seed=5)
STEPS, RATE = 4, 0.05


class Wide(Net):
    """Parameters that are longer than what cuts are multiples of."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(3, 301), nn.Linear(301, 6))  # type: ignore[assignment]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_a_cut_has_each_element_once(count: int) -> None:
    tensors = {
        "matrix": torch.zeros(13, 57),
        "scalar": torch.zeros(()),
        "none": torch.zeros(0),
        "double": torch.zeros(31, dtype=torch.float64),
        "half": torch.zeros(77, dtype=torch.bfloat16),
    }
    shards = cut(Parcel(tensors), count)
    assert len(shards) == count
    for name, each in tensors.items():
        found = [place for shard in shards for place in shard.pieces.get(name, ())]
        assert found == list(range(each.numel()))
    assert sum("none" in shard.pieces for shard in shards) == 1
    sizes = [shard.nbytes for shard in shards]
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_cut_between_parameters_keeps_them_whole(count: int) -> None:
    tensors = {str(size): torch.zeros(size, 16) for size in (5, 60, 0, 1, 31, 30)}
    parcel = Parcel(tensors)
    shards = cut(parcel, count, whole=True)
    names = [name for shard in shards for name in shard.pieces]
    assert names == list(tensors)
    for shard in shards:
        views = shard.views(shard.of(parcel), parcel)
        assert {name: views[name].shape for name in shard.pieces} == {
            name: tensors[name].shape for name in shard.pieces
        }
    sizes = [shard.nbytes for shard in shards]
    assert max(sizes) - min(sizes) <= 60 * 16 * 4


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_busiest_port_carries_2_of_w_parts_of_that_of_one_server(world_size: int) -> None:
    """Each way, with a work of each learner, on a network like LeNet."""
    parcel = Parcel({"conv": torch.zeros(20, 25), "inner": torch.zeros(500, 800)})
    shards, whole = cut(parcel, world_size), parcel.data.nbytes
    of_one_server = (world_size - 1) * whole
    # Out: an owner's part of the weights to all others, and its own gradient but for its part.
    busiest = max((world_size - 1) * each.nbytes + whole - each.nbytes for each in shards)
    assert busiest == pytest.approx(2 / world_size * of_one_server, rel=0.001)


def test_the_runs_of_a_shard_are_views_of_the_bytes_that_are_sent() -> None:
    tensors = {"a": torch.randn(9, 11), "b": torch.randn(40).double()}
    parcel = Parcel(tensors)
    parcel.fill(tensors)
    for shard in cut(parcel, 3):
        views = shard.views(shard.of(parcel), parcel)
        for name, elements in shard.pieces.items():
            run = tensors[name].flatten()[elements.start : elements.stop]
            assert torch.equal(views[name].flatten(), run)
            assert torch.equal(views[name], shard.run_of(name, tensors[name]))
            assert len(run) * run.itemsize <= shard.nbytes


def made(solver: SolverConfig, layout: torch.memory_format) -> Made:
    torch.manual_seed(3)
    net = Wide().train().to(memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn(27, 1, 6, 6, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(images, torch.arange(27) % 6)
    return Made(net, data, CONFIG, make_optimizer(dict(net.named_parameters()), solver))


def state(parts: Made, server: Server, ema: Ema) -> State:
    found = state_of(World(0, 1, torch.device("cpu")), parts.net, parts.optimizer)
    found.pieces |= {"ema": ema.piece, "server": server.memory}
    return found


class Cut:
    """The owners of a training, in this process."""

    def __init__(self, parts: Made, whole: State, solver: SolverConfig, server: Server) -> None:
        parcel, named = Parcel(parts.named), parts.named
        self.named = named
        shards = cut(parcel, 9, needs_norms(solver))
        self.shards = [shard for shard in shards if shard.nbytes]
        self.owners = []
        for shard in self.shards:
            runs = Runs(named, shard)
            ema = Ema(runs.named, 0.9)
            optimizer = make_optimizer(named, solver, 0, runs.named)
            squares = bool(server.memory.mean_square)
            memory = RunMemory(runs, squares, shard, parcel)
            held = Held(runs, optimizer, ema, memory)
            held.take(whole.pieces, whole.numbers["scalars"].state_dict(), shard)
            none = BufferChanges(nn.Module())
            own = Server(runs.named, optimizer, memory, server.words, {0, 1, 2}, none, ema=ema)
            own.load_state_dict(server.state_dict())
            self.owners.append(Owner(own, held, partial(weight_of, parts.order)))

    def parts(self) -> dict[str, dict[str, Tensor]]:
        return put_together(
            self.named, self.shards, [owner.held.parts()[0] for owner in self.owners]
        )

    def numbers(self) -> dict[str, Any]:
        return {k: v for owner in self.owners for k, v in owner.held.parts()[1].items()}


def runs_of(tensors: Mapping[str, Tensor], shard: Shard) -> Gradient:
    return Gradient(
        {
            name: shard.run_of(name, each).clone()
            for name, each in tensors.items()
            if name in shard.pieces
        },
        [],
    )


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("kind", "compensate"),
    [*((kind, "none") for kind in SOLVERS), ("sgd", "delay"), ("adamw", "delay")],
)
def test_owners_come_to_the_bits_of_one_server(
    kind: str, compensate: Any, layout: torch.memory_format
) -> None:
    """From the second step on; softsync, so that gradients wait when the state is looked at."""
    form: Any = "decoupled" if kind == "nesterov" else "l2"
    rates: dict[str, Any] = {"lr_mult": {"@vector": 2.0}, "decay_mult": {"*.bias": 0.0}}
    solver = SolverConfig(type=kind, base_lr=RATE, weight_decay=1e-3, decay_form=form, **rates)
    parts = made(solver, layout)
    words = SynchronyConfig(
        "asynchronous", gradients_per_update=2, compensate=compensate, staleness_rate="inverse"
    )
    queue = LeafQueue(leaves_of(parts.order, 0, STEPS))
    events = in_order(Asynchronous(queue, 3, 0, 2), (0, 1, 2, 0, 0, 2))
    stepper = parts.served(words, events, STEPS)
    heard = Heard(stepper)
    server, ema = stepper.server, Ema(parts.named, 0.9)
    server.ema = ema
    whole = state(parts, server, ema)
    stepper.run(0, RATE)
    owners = Cut(parts, whole, solver, server)
    assert server.memory.gradients  # that wait
    for owner in owners.owners:
        assert owner.held.memory.gradients.keys() == server.memory.gradients.keys()
    pulled = set()
    for step in range(1, STEPS):
        heard.events.clear()
        stepper.run(step, RATE / step)
        for event in heard.events:
            for shard, owner in zip(owners.shards, owners.owners, strict=True):
                if isinstance(event, Push):
                    owner.bring(event.work, runs_of(heard.gradients[event.work], shard))
                owner.take(Told(event, RATE / step, None, 0))
            if isinstance(event, Pull):
                pulled.add(event.work.version)
        for version in pulled & server.memory.versions.keys():
            kept = server.memory.versions[version]
            for shard, owner in zip(owners.shards, owners.owners, strict=True):
                views = shard.views(owner.version(version), Parcel(parts.named))
                expected_runs = runs_of({name: kept[name] for name in parts.named}, shard).tensors
                assert all(torch.equal(views[name], expected_runs[name]) for name in views)
        found = owners.parts()
        for name in ("parameter", "optimizer", "ema", "server"):
            expected = {path: part.tensor for path, part in whole.pieces[name].parts().items()}
            kept_by_rank_0 = {path for path in expected if path.split("/")[-1] not in parts.named}
            if name != "optimizer":
                expected = {k: v for k, v in expected.items() if k not in kept_by_rank_0}
            assert found[name].keys() == expected.keys()
            assert all(torch.equal(found[name][path], expected[path]) for path in found[name])
        assert owners.numbers() == whole.numbers["scalars"].state_dict()


def test_a_norm_that_is_not_finite_spoils_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update by gradients that are clipped to zeros would go unnoticed."""
    solver = SolverConfig(base_lr=RATE)
    parts = made(solver, torch.contiguous_format)
    queue = LeafQueue(leaves_of(parts.order, 0, STEPS))
    words = SynchronyConfig("asynchronous")
    stepper = parts.served(words, in_order(Asynchronous(queue, 3, 0, 1), (0, 1, 2)), STEPS)
    heard, server = Heard(stepper), stepper.server
    server.ema = Ema(parts.named, 0.9)
    owners = Cut(parts, state(parts, server, server.ema), solver, server)
    stepper.run(0, RATE)
    prepare = Server.prepare

    def beyond(*given: Any) -> tuple[Tensor, Tensor]:
        return prepare(*given)[0], torch.tensor(torch.inf)

    monkeypatch.setattr(Server, "prepare", beyond)
    for event in heard.events:
        for shard, owner in zip(owners.shards, owners.owners, strict=True):
            if isinstance(event, Push):
                owner.bring(event.work, runs_of(heard.gradients[event.work], shard))
            owner.take(Told(event, RATE, None, 0))
    found = owners.parts()["parameter"]
    assert all(each.isnan().all() for each in found.values() if each.numel())


class Heard:
    """Notes the events of a stepper, and copies of the gradients that they bring."""

    def __init__(self, stepper: ServedStepper) -> None:
        self._source, self._contributions = stepper.source, stepper.contributions
        stepper.source = stepper.contributions = self
        self.events: list[Event] = []
        self.gradients: dict[Work, dict[str, Tensor]] = {}

    def next(self) -> Event:
        self.events.append(self._source.next())
        return self.events[-1]

    def of(self, work: Work) -> Contribution:
        found = self._contributions.of(work)
        self.gradients[work] = {name: g.clone() for name, g in found.gradient.tensors.items()}
        return found


def test_a_teller_that_is_cut_ends_without_an_order() -> None:
    """Rank 0 would wait for it, and past the time that a rank has once another is lost."""
    orders: list[Order] = []
    errors: list[BaseException] = []
    teller = Teller(orders.append, errors.append)
    teller.cut()
    teller.thread.join(60)
    assert not teller.thread.is_alive()
    assert orders == []
