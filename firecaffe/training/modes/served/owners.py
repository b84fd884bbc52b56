"""This rank among those that own the weights in parts, after the warm steps."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from firecaffe.cluster.agree import POLL_S
from firecaffe.cluster.calls import Worker, raise_failure
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.training.constraints import make_constraints
from firecaffe.training.evaluation_weights import average_of
from firecaffe.training.modes.served.owner import (
    Owner,
    Runs,
    Shard,
    ShardMemory,
    ShardState,
    cut,
    parameter_of,
    put_together,
)
from firecaffe.training.modes.served.owner_messages import (
    OwnerLayout,
    OwnersBench,
    RemoteOwner,
    listen,
    serve_learner,
)
from firecaffe.training.modes.served.server import late_rule
from firecaffe.training.modes.served.server_memory import Parcel
from firecaffe.training.modes.served.work_gradient import (
    Bench,
    Holders,
    KeptTraining,
    UpdateOrder,
    Workbench,
)
from firecaffe.training.piece import LocalWholes
from firecaffe.training.tensor_file import InMemory
from firecaffe.training.updates.every_rank import Applier
from firecaffe.training.updates.spread import UNUSED
from firecaffe.transport.lane import LaneMesh, Line, store_of


class OwnerExchange:
    """Exchanges numbers with other owners. All make the same updates in the same order."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        own: Shard,
        others: Mapping[int, Shard],
        lines: Mapping[int, Line],
    ) -> None:
        self._named, self._own, self._others, self._lines = named, own, others, lines

    def norms(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the norms of all used parameters' gradients. Raises: PeerLostError."""
        of_all = self.of_all({name: float(norm) for name, norm in own.items()})
        return {n: torch.tensor(norm, dtype=self._named[n].dtype) for n, norm in of_all.items()}

    def of_all(self, own: Mapping[str, float]) -> dict[str, float]:
        """Return a number (0 or more) of each used parameter, in network order, from all owners."""
        mine = torch.tensor([own.get(n, UNUSED) for n in self._own.pieces], dtype=torch.float64)
        theirs = {
            rank: torch.zeros(len(shard.pieces), dtype=torch.float64)
            for rank, shard in self._others.items()
        }
        waits = [line.begin_send(mine.view(torch.uint8)) for line in self._lines.values()]
        for rank, line in self._lines.items():
            waits.append(line.begin_receive(theirs[rank].view(torch.uint8)))
        for finish in waits:
            finish()
        gathered = dict(zip(self._own.pieces, mine.tolist(), strict=True))
        for rank, shard in self._others.items():
            gathered |= zip(shard.pieces, theirs[rank].tolist(), strict=True)
        used = (name for name in self._named if gathered.get(name, UNUSED) != UNUSED)
        return {name: gathered[name] for name in used}


TELL, ANSWER, NUMBERS = 2, 3, 4
"""Tags: from rank 0 to an owner, and back; between owners."""

ASKED, ANSWERED = 2, 3
"""Tags: from a learner to an owner, and back."""


class OwnerLines:
    """The lines between learners and owners. Every rank has both.

    Two ranks that are each other's owner and learner use two connections. Gloo's receiver announces
    over the connection that it is ready, after all that was sent over it before. So over a single
    connection, a pull would wait for the other rank's pull in the opposite direction.
    """

    def __init__(self, store: Store, rank: int, size: int, per_rank: int, timeout_s: float) -> None:
        """Meet all other ranks, with `per_rank` learners each. Raises: PeerLostError."""
        self.rank, self.others = rank, [other for other in range(size) if other != rank]
        meet = partial(LaneMesh, rank=rank, world_size=size, timeout_s=timeout_s)
        self._orders = meet(store, "owners")
        self._meshes = {
            (place, side): meet(store, f"owners/{place}/{side}")
            for place, side in product(range(per_rank), ("up", "down"))
        }

    def order_line(self, other: int, send_tag: int, receive_tag: int) -> Line:
        return self._orders.line(other, send_tag, receive_tag)

    def to_owner(self, owner: int, place: int) -> Line:
        """Return the line of this rank's learner with number `place` to an owner."""
        mesh = self._meshes[place, "up" if self.rank < owner else "down"]
        return mesh.line(owner, ASKED, ANSWERED)

    def to_learner(self, rank: int, place: int) -> Line:
        """Return this owner's end of the line from another rank's learner `place`."""
        mesh = self._meshes[place, "up" if rank < self.rank else "down"]
        return mesh.line(rank, ANSWERED, ASKED)

    def cut(self) -> None:
        for mesh in (self._orders, *self._meshes.values()):
            mesh.cut()


class Owners(Holders):
    hold_weights = True

    def __init__(self, whole: KeptTraining) -> None:
        """Divide a training's weights among all ranks, which all call it. Raises: PeerLostError."""
        world, recipe = whole.world, whole.run.recipe
        per_rank = recipe.synchrony.in_flight
        self._owner_lines = lines = OwnerLines(
            store=store_of(world),
            rank=world.rank,
            size=world.world_size,
            per_rank=per_rank,
            timeout_s=recipe.exchange.timeout_s,
        )
        self._whole = whole
        parcel = Parcel(whole.named)
        needs_whole = recipe.updates_whole_layers or whole.coder.remembers
        shards = cut(parcel, world.world_size, needs_whole)
        clips = whole.server.clip_gradients > 0
        self._layout = OwnerLayout(whole.named, parcel, shards, whole.coder, clips)
        self._threads: list[Worker] = []
        self._orders: list[tuple[Worker, Owner | RemoteOwner]] = []
        """Rank 0's thread for each owner: one that waits for a gradient delays no other."""
        self._has_changed = False
        self._moved_by_rank: dict[int, tuple[int, int]] = {}
        self._owner: Owner | None = None
        if shards[lines.rank].nbytes:
            self._owner = self._own()
            self._serve_learners(self._owner, per_rank)
        if lines.rank == 0:
            self._take_buffers()
            self._orders = [(self._thread("orders"), self._reach(rank)) for rank in self._ranks]

    @property
    def _ranks(self) -> list[int]:
        return [rank for rank, shard in enumerate(self._layout.shards) if shard.nbytes]

    @property
    def _other_owners(self) -> list[int]:
        return [rank for rank in self._ranks if rank != self._owner_lines.rank]

    @property
    def moved(self) -> dict[int, tuple[int, int]]:
        return self._moved_by_rank

    def bench(self, bench: Workbench, place: int) -> Bench:
        lines = {rank: self._owner_lines.to_owner(rank, place) for rank in self._other_owners}
        return OwnersBench(bench, self._layout, self._owner_lines.rank, self._owner, lines)

    def tell(self, order: UpdateOrder) -> None:
        self._has_changed = True
        for thread, owner in self._orders:
            thread.submit(partial(owner.take, order))

    def gather(self, look: Callable[[], None]) -> None:
        if not self._has_changed:
            return
        given = [thread.submit(owner.give) for thread, owner in self._orders]
        while wait(given, POLL_S).not_done:
            look()
        parts = [future.result() for future in given]
        self._moved_by_rank = {
            rank: part.moved for rank, part in zip(self._ranks, parts, strict=True)
        }
        whole, memory, live = self._whole.state, self._whole.memory, self._whole.server.memory
        owned = [self._layout.shards[rank] for rank in self._ranks]
        wholes = put_together(self._whole.named, owned, [part.tensors for part in parts])
        frozen = {name: part.tensor for name, part in whole.pieces["parameter"].parts().items()}
        wholes["parameter"] = {**frozen, **wholes["parameter"]}
        wholes["server"] |= {path: part.tensor for path, part in live.parts().items()}
        memory.versions.clear()
        memory.gradients.clear()
        for kind, tensors in wholes.items():
            if kind in whole.pieces:
                whole.pieces[kind].load(InMemory(tensors))
        numbers = {path: value for part in parts for path, value in part.numbers.items()}
        whole.numbers["scalars"].load_state_dict(numbers)
        self._whole.server.late_rule.mean_step.load_state_dict(parts[0].mean_step)
        self._has_changed = False

    def end(self) -> None:
        for thread, owner in self._orders:
            thread.submit(owner.end)
            thread.close(wait=False)

    def join(self, timeout_s: float) -> bool:
        threads = [worker.thread for worker in self._threads]
        end_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def check(self) -> None:
        raise_failure(self._threads)

    def cut(self) -> None:
        if self._owner is not None:
            self._owner.cut()
        for thread, _ in self._orders:
            thread.close(wait=False)
        self._owner_lines.cut()

    def _own(self) -> Owner:
        whole, layout = self._whole, self._layout
        shard = layout.shards[self._owner_lines.rank]
        runs = Runs(whole.named, shard)
        server, recipe = whole.server, whole.run.recipe
        delayed = recipe.synchrony.delayed_updates(len(server.learners))
        optimizer = make_optimizer(whole.named, recipe.solver, delayed, runs.named)
        ema = average_of(recipe.train, runs.named)
        memory = ShardMemory(runs, bool(whole.memory.mean_square), shard, layout.parcel)
        constraints = make_constraints(recipe, whole.named, runs.named, LocalWholes())
        applier = Applier(optimizer, server.applier.scale.apart(optimizer), constraints, ema)
        held = ShardState(runs, applier, memory)
        held.take(whole.state.pieces, whole.state.numbers["scalars"].state_dict(), shard)
        others = {rank: layout.shards[rank] for rank in self._other_owners}
        lines = {rank: self._owner_lines.order_line(rank, NUMBERS, NUMBERS) for rank in others}
        numbers = OwnerExchange(whole.named, shard, others, lines)
        rule = late_rule(server.words.compensate, memory, whole.named, numbers.of_all)
        local_server = replace(
            server,
            named=runs.named,
            applier=applier,
            memory=memory,
            buffers=BufferChanges(nn.Module()),
            norms_of_all=numbers.norms,
            late_rule=rule,
        )
        local_server.load_state_dict(server.state_dict())
        return Owner(local_server, held)

    def _serve_learners(self, owner: Owner, per_rank: int) -> None:
        shard = self._layout.shards[self._owner_lines.rank]
        for rank in self._owner_lines.others:
            for place in range(per_rank):
                line = self._owner_lines.to_learner(rank, place)
                owner.lines.append(line)
                self._start(serve_learner, line, owner, shard, self._layout)
        if self._owner_lines.rank:
            self._start(listen, self._owner_lines.order_line(0, ANSWER, TELL), owner)

    def _reach(self, rank: int) -> Owner | RemoteOwner:
        if rank == 0 and self._owner is not None:
            return self._owner
        return RemoteOwner(self._owner_lines.order_line(rank, TELL, ANSWER))

    def _take_buffers(self) -> None:
        named, live = self._whole.named, self._whole.server.memory
        tensors = {
            path: part.tensor
            for path, part in self._whole.memory.parts().items()
            if path.startswith("tail/") or parameter_of("server", path) not in named
        }
        live.load(InMemory(tensors))

    def _start(self, serve: Callable[..., None], *arguments: object) -> None:
        thread = self._thread(serve.__name__)
        thread.submit(partial(serve, *arguments))
        thread.close(wait=False)

    def _thread(self, name: str) -> Worker:
        self._threads.append(Worker(name))
        return self._threads[-1]
