"""An owner: has a run of the parameters' elements, and executes the events of the log on it.

Rank 0 tells it the events, in their order. Learners bring it their gradients of these elements and
ask it for versions of them, in any order: an event waits for its gradient, a learner for its
version.

What an owner holds, in the pieces of a training's state, and how these are cut and put together.

A piece of the whole training (`training.state`) and that of an owner have the same names in them;
an owner's tensors are runs of the whole ones. So the whole is cut by loading its runs into the
owner's pieces, and put together by loading the whole ones from the owners' runs.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from firecaffe.errors import PeerLostError
from firecaffe.solvers.delayed_nesterov import set_delay
from firecaffe.solvers.optimizer_state import OptimizerNumbers, OptimizerTensors
from firecaffe.synchrony.events import Push
from firecaffe.synchrony.leaves import Leaf
from firecaffe.synchrony.policy import Work
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.piece import Piece, Weights
from firecaffe.training.served.holders import Told
from firecaffe.training.served.memory import Gradient, ServerMemory, bytes_in_file
from firecaffe.training.served.messages import Parcel
from firecaffe.training.served.server import Server
from firecaffe.training.served.shards.cut import Shard
from firecaffe.training.tensor_file import InMemory

PIECES = ("parameter", "optimizer", "ema", "server")
"""The pieces of the state that owners hold parts of."""


class Runs(nn.Module):
    """The runs of parameters that an owner has, by their parameters' names."""

    def __init__(self, whole: Mapping[str, nn.Parameter], shard: Shard) -> None:
        super().__init__()
        self.named = {
            name: nn.Parameter(shard.run_of(name, whole[name].detach()).clone())
            for name in shard.pieces
        }

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Names with dots, which a module's own parameters may not have."""
        return iter(self.named.items())


class RunMemory(ServerMemory):
    """A server's memory, of runs. Versions are kept as the bytes that are sent."""

    def __init__(self, runs: Runs, squares: bool, shard: Shard, layout: Parcel) -> None:
        super().__init__(runs, runs.named, squares)
        self._runs, self._shard, self._layout = runs, shard, layout
        self.sent: dict[int, Tensor] = {}
        """The bytes of a version, on the host."""
        self.nothing = torch.zeros(shard.nbytes, dtype=torch.uint8)
        """As many bytes."""
        self.newest = -1
        """The last version that was kept."""

    def keep(self, version: int) -> None:
        self.newest = version
        if version in self.sent:  # not in `versions`, where those of a checkpoint are, too
            return
        size = self.nothing.nbytes
        data = bytes_in_file(size) if self.is_full(size) else torch.zeros_like(self.nothing)
        views = self._shard.views(data, self._layout)
        for name, run in self._runs.named.items():
            views[name].copy_(run.detach())
        self.sent[version], self.versions[version] = data, views

    def release(self, needed: set[int]) -> None:
        super().release(needed)
        for version in self.sent.keys() - needed:
            del self.sent[version]


class Held:
    """The pieces of an owner's state."""

    def __init__(
        self, runs: Runs, optimizer: optim.Optimizer, ema: Ema | None, memory: RunMemory
    ) -> None:
        self.memory = memory
        self._pieces: dict[str, Piece] = {
            "parameter": Weights(runs.named_parameters),
            "optimizer": OptimizerTensors(runs, optimizer),
            "server": memory,
        }
        if ema is not None:
            self._pieces["ema"] = ema.piece
        self._numbers = OptimizerNumbers(runs, optimizer)

    def take(self, whole: Mapping[str, Piece], numbers: Mapping[str, Any], shard: Shard) -> None:
        """Takes its runs of the whole pieces, and the optimizer's numbers."""
        for kind, piece in self._pieces.items():
            runs = {}
            for path, part in whole[kind].parts().items():
                name = parameter_of(kind, path)
                if name in shard.pieces and not path.startswith("tail/"):
                    runs[path] = _run(path, name, part.tensor, shard)
            piece.load(InMemory(runs))
        for leaf in _leaves(whole["server"]):  # also of gradients that are of no weight here
            self.memory.gradients.setdefault(leaf, Gradient({}, []))
        own = {path: value for path, value in numbers.items() if _first(path) in shard.pieces}
        self._numbers.load_state_dict(own)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors, by KIND/PATH, and the optimizer's numbers."""
        tensors = {
            f"{kind}/{path}": part.tensor
            for kind, piece in self._pieces.items()
            for path, part in piece.parts().items()
        }
        return tensors, self._numbers.state_dict()


def put_together(
    named: Mapping[str, Tensor], shards: Sequence[Shard], parts: Sequence[Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """The whole tensors by kind and path, from the parts of all owners, in their order. named: the
    whole parameters.
    """
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in PIECES}
    for shard, tensors in zip(shards, parts, strict=True):
        for full, value in tensors.items():
            kind, _, path = full.partition("/")
            name = parameter_of(kind, path)
            if value.ndim == 0:  # an optimizer's count of steps, the same at all
                found[kind][path] = value.clone()
                continue
            if path not in found[kind]:
                found[kind][path] = torch.empty(named[name].shape, dtype=value.dtype)
            elements = shard.pieces[name]
            flat = found[kind][path].view(-1)
            flat[elements.start : elements.stop] = value.cpu().reshape(-1)
    return found


def _leaves(server: Piece) -> Iterator[Leaf]:
    """The leaves whose gradients wait; each has a tail."""
    for path in server.parts():
        if path.startswith("tail/"):
            step, place = path.split("/")[1].split(".")
            yield Leaf(int(step), int(place))


def parameter_of(kind: str, path: str) -> str:
    """The parameter that a tensor of a piece belongs to: NAME, NAME/KEY, or WHAT/WHERE/NAME."""
    return _first(path) if kind == "optimizer" else path.rpartition("/")[2]


def _run(path: str, name: str, value: Tensor, shard: Shard) -> Tensor:
    """The run of a tensor that has the shape of its parameter."""
    return value.clone() if path.endswith("/step") else shard.run_of(name, value)


def _first(path: str) -> str:
    return path.rpartition("/")[0]


class Owner:
    """One rank's. `take` is called by one thread, the rest by any."""

    def __init__(self, server: Server, held: Held, weight_of: Callable[[Leaf], float]) -> None:
        """server: of its elements. weight_of: of a leaf, 1 if it is full."""
        self.held = held
        self._server, self._weight_of = server, weight_of
        self._changed = threading.Condition()
        self._gradients: dict[Work, Gradient] = {}
        """Those of events that have not come yet."""
        self._unwanted: set[Work] = set()
        """Works that do not count, and whose gradient is still to come."""
        self._is_cut = False
        self._threads = torch.get_num_threads()

    def bring(self, work: Work, gradient: Gradient) -> None:
        """A learner brings its gradient."""
        with self._changed:
            if work in self._unwanted:
                self._unwanted.remove(work)
            else:
                self._gradients[work] = gradient
            self._changed.notify_all()

    def version(self, number: int) -> Tensor:
        """The bytes of a version, which do not change any more. It waits for the version: whoever
        asks was given a work at it, so that it will be kept. Raises: PeerLostError if the owner was
        cut.
        """
        memory = self.held.memory
        with self._changed:
            self._wait(lambda: number <= memory.newest)
            # That of a work which was given up meanwhile is gone. What becomes of it is dropped.
            return memory.sent.get(number, memory.nothing)

    @torch.no_grad()
    def take(self, told: Told) -> None:
        """Executes the next event; it waits for the gradient. Raises: PeerLostError as above."""
        event = told.event
        torch.set_num_threads(self._threads)  # each thread has a number of its own
        if isinstance(event, Push):
            self._keep_gradient(event)
            if event.update is not None:
                set_delay(self._server.optimizer, told.delay)
                _, norm = self._server.prepare(event.update, self._weight_of)
                if not norm.isfinite():
                    self._spoil()
                self._server.apply(event.update, self._weight_of, told.rate, told.momentum)
        with self._changed:
            self._server.take(event)
            self._changed.notify_all()

    def _spoil(self) -> None:
        """Each gradient was finite, and the norm of their mean is not: to clip by it would make an
        update of zeros. All owners do this, and whoever computes with these weights tells it.
        """
        for parameter in self._server.named.values():
            if parameter.grad is not None:
                parameter.grad.fill_(torch.nan)

    def cut(self) -> None:
        """Ends all waiting, from any thread."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()

    def _keep_gradient(self, event: Push) -> None:
        with self._changed:
            if event.counts:
                self._wait(lambda: event.work in self._gradients)
                self._server.keep(event.work, self._gradients.pop(event.work))
            elif self._gradients.pop(event.work, None) is None:
                self._unwanted.add(event.work)

    def _wait(self, until: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._is_cut or until())
        if self._is_cut:
            raise PeerLostError("another rank went away")
