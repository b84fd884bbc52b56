"""Local SGD in a user's own training loop: the network is averaged after every few steps.

The differences to the common first weights go through an exchange, as gradients do, and the outer
optimizer moves all ranks' weights by their mean. A GradScaler does not call the optimizer on a rank
whose gradients are not finite, so calls of its `update` are counted, if there is one.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch import distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ProcessGroup

from firecaffe.cluster.agree import agree
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.group import Group
from firecaffe.errors import CheckpointError
from firecaffe.exchange import AUTO
from firecaffe.exchange.route import find_route
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.inventory.network_state import check_state
from firecaffe.parallel.layer_split import Split
from firecaffe.script.ddp import BUCKET_BYTES, bucket_sizes
from firecaffe.script.script_arguments import (
    ArgumentError,
    check_group,
    check_network,
    check_not_wrapped,
    check_number,
    check_optimizer,
    check_trained,
    check_whole_number,
    check_words,
    warn_of_own_state,
)
from firecaffe.script.script_exchange import (
    join_launched_world,
    leave,
    meet,
    open_exchange,
    share_network,
)
from firecaffe.solvers.update_rules import OUTER, Outer
from firecaffe.transport.exchange import Exchange
from firecaffe.user_code import shown


class CountedUpdate:
    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update
        self.calls: list[Callable[[], None]] = []

    def __call__(self, *arguments: Any, **words: Any) -> None:
        self._update(*arguments, **words)
        for call in list(self.calls):
            call()


def after_each_update(scaler: GradScaler, call: Callable[[], None]) -> Callable[[], None]:
    """Run `call` after each `update` of a scaler, and return a function that ends this."""
    if not isinstance(scaler.update, CountedUpdate):
        scaler.update = CountedUpdate(scaler.update)  # type: ignore[method-assign]
    calls = scaler.update.calls
    calls.append(call)

    def end() -> None:
        if call in calls:
            calls.remove(call)

    return end


INNER = ("keep", "zero")

STEPS = "the steps since the last average (a GradScaler is given as scaler=)"

_averaged: "weakref.WeakSet[optim.Optimizer]" = weakref.WeakSet()
"""The optimizers whose steps are counted: a second count would average twice."""


class LocalTraining:
    """Averages the ranks' networks after every few steps, until `detach`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        every: int,
        outer: Outer,
        reducer: GradientReducer,
        named: dict[str, nn.Parameter],
        buffers: BufferChanges,
        forgets: bool,
        scaler: GradScaler | None,
    ) -> None:
        """`named`: the outer optimizer's copies. `forgets`: each average clears the inner state."""
        self.every = every
        self.steps = 0
        """Steps since the last average."""
        self._optimizer, self._outer, self._reducer = optimizer, outer, reducer
        self._named, self._forgets = named, forgets
        trained = dict(model.named_parameters())
        self._pairs = [(named[name], trained[name]) for name in named]
        self._model, self._buffers = model, buffers
        self._begin_round()
        if scaler is None:
            self._detach = optimizer.register_step_post_hook(self._after_step).remove
        else:
            self._detach = after_each_update(scaler, self._after_step)

    @torch.no_grad()
    def average(self) -> None:
        """Average now, if there were steps since the last average. All ranks have to call it.

        Call it at the end of the training, before an evaluation, or before the weights are saved.
        Raises AgreementError if ranks have taken different numbers of steps; PeerLostError.
        """
        reducer, rank = self._reducer, self._reducer.exchange.world.rank
        agree(reducer.exchange.world, {STEPS: str(self.steps)})
        if not self.steps:
            return
        device = reducer.exchange.world.device
        reducer.begin_step(reducer.num_leaves, [rank], lambda: torch.zeros(0, device=device))
        for start, weight in self._pairs:
            start.grad = start - weight
        reducer.add(rank, None, self._buffers.take(rank, 1.0))
        totals = reducer.finish_step()
        self._outer.step(self._optimizer.param_groups[0]["lr"])
        for start, weight in self._pairs:
            weight.copy_(start)
            start.grad = None
        self._buffers.finish_step(totals.tail, reducer.num_leaves)
        self._begin_round()
        if self._forgets:
            self._optimizer.state.clear()
        self.steps = 0

    def detach(self) -> None:
        """Stop averaging; the training goes on alone."""
        self._detach()
        _averaged.discard(self._optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that each rank must save to resume to the same bits.

        It has the steps since the last average, the weights and buffers of that average, the outer
        optimizer's state, and the compressor's memory by RANK.PARAMETER. Save also the network, the
        optimizer and the random numbers.
        """
        start = {name: tensor.detach().clone() for name, tensor in self._named.items()}
        outer = self._outer.optimizer.state_dict()
        parts = {} if self._reducer.memory is None else self._reducer.memory.parts()
        memory = {name: part.tensor.clone() for name, part in parts.items()}
        return {
            "steps": self.steps,
            "start": start,
            "buffers": {name: tensor.clone() for name, tensor in self._first_buffers.items()},
            "outer": outer,
            "memory": memory,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's state. Raises CheckpointError for another rank, compressor or model."""
        self._check_state(state)
        memory, rank = state["memory"], self._reducer.exchange.world.rank
        if memory and not any(name.startswith(f"{rank}.") for name in memory):
            raise CheckpointError(
                f"the state of average_locally has the compressor's memory of another rank, none "
                f"of rank {rank}; each rank saves its own state_dict() and loads that"
            )
        if self._reducer.memory is not None:
            self._reducer.memory.load(memory)
        self.steps = int(state["steps"])
        for name, tensor in self._named.items():
            tensor.copy_(state["start"][name])
        self._outer.optimizer.load_state_dict(state["outer"])
        # Changes of buffers are measured from the round's start. The current values are kept.
        buffers = dict(self._model.named_buffers())
        now = {name: tensor.clone() for name, tensor in buffers.items()}
        for name, buffer in buffers.items():
            buffer.copy_(state["buffers"][name])
        self._begin_round()
        for name, buffer in self._model.named_buffers():
            buffer.copy_(now[name])

    def _check_state(self, state: Any) -> None:
        words = ("steps", "start", "buffers", "outer", "memory")
        if not isinstance(state, Mapping) or not all(word in state for word in words):
            raise CheckpointError(
                f"the state of average_locally is {shown(state)}; expected what its state_dict() "
                "has given"
            )
        buffers = dict(self._model.named_buffers())
        own: dict[str, Mapping[str, Tensor]] = {"start": self._named, "buffers": buffers}
        for what, tensors in own.items():
            shapes = {name: tuple(tensor.shape) for name, tensor in state[what].items()}
            for name in sorted(tensors.keys() | shapes.keys()):
                shape = tuple(tensors[name].shape) if name in tensors else "not in the model"
                if shapes.get(name, "not there") != shape:
                    raise CheckpointError(
                        f"the state of average_locally is that of another network: {name} is "
                        f"{shapes.get(name, 'not there')}, here {shape}"
                    )

    def _begin_round(self) -> None:
        self._buffers.begin_step()
        self._first_buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps >= self.every:
            self.average()


@from_script
def average_locally(
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    every: int = 8,
    outer: str = "average",
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    inner_momentum: str = "keep",
    scaler: GradScaler | None = None,
    exchange: str = AUTO,
    compressor: str = NO_COMPRESSOR,
    timeout_s: float | None = None,
    process_group: ProcessGroup | None = None,
) -> LocalTraining:
    """Let the ranks of a script train separately, and average their networks after every few steps.

    This joins the launcher's world if `torch.distributed` is not initialized yet, as `parallelize`
    does, and gives all ranks the weights and buffers of the first. The rest of the loop does not
    change; ranks have to take equally many steps. Called after some steps with
    DistributedDataParallel, on the network inside it, it is post-local SGD.

    Args:
        model: The network itself, on its device, not in DDP.
        optimizer: The optimizer of its parameters.
        every: Steps between two averages.
        outer: The outer optimizer: average (the weights become the average), slowmo or nesterov.
        outer_lr: The outer rate; by default 1 with slowmo, 0.7 with nesterov.
        outer_momentum: The outer momentum; by default 0.5 with slowmo, 0.9 with nesterov.
        inner_momentum: Whether an average keeps the optimizer's state: keep or zero.
        scaler: The loop's GradScaler, if it has one: each of its updates counts as a step, because
            it skips the optimizer's step on a rank whose gradients are not finite.
        exchange: See `parallelize`.
        compressor: See `parallelize`; applied to the differences.
        timeout_s: See `parallelize`.
        process_group: The ranks that are averaged; by default all. For split networks, the ranks
            that hold the same parts.

    Raises: RecipeError if an argument is impossible, or there is nothing to train; LaunchError if
    the ranks do not find each other; AgreementError if they have different arguments or networks.
    `optimizer.step()` or `scaler.update()` raise PeerLostError if another rank is lost, and
    AgreementError if ranks have taken different numbers of steps.

    Sources are in docs/explanation/synchrony.md.
    """
    check_network("average_locally", "model", model)
    check_not_wrapped("average_locally", "model", model, "give the network itself, model.module")
    check_words(exchange, compressor, timeout_s)
    check_group("average_locally", process_group)
    _check(every, outer, outer_lr, outer_momentum, inner_momentum)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise ArgumentError(
            f"average_locally: scaler is {shown(scaler)}; expected a torch.amp.GradScaler"
        )
    trained = _trained(model, compressor)
    check_optimizer("average_locally", optimizer, model)
    if optimizer in _averaged:
        raise ArgumentError(
            "average_locally: the network of this optimizer is averaged already; call detach() "
            "of the first one"
        )
    device = next(iter(trained.values())).device
    join_launched_world(device, timeout_s)
    _check_rows(model, process_group)
    world, per_host = meet(process_group, device, timeout_s)
    words = (every, outer, outer_lr, outer_momentum, inner_momentum, exchange, compressor)
    counted = "calls of step" if scaler is None else "updates of a scaler"
    facts = {"the words of average_locally": str(words), "what average_locally counts": counted}
    share_network(world, model, facts)
    named = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in trained.items()}
    if world.exchange_group is None:
        opened = Exchange(world, find_route("tree", 1, 1))
    else:
        sizes = bucket_sizes(sum(parameter.nbytes for parameter in trained.values()))
        size = world.world_size
        opened, _ = open_exchange(world, per_host, exchange, compressor, sizes, size)
    buffers = BufferChanges(model)
    reducer = GradientReducer(
        named,
        range(len(named)),
        buffers.zero_changes(),
        torch.zeros(0, device=device),
        world.world_size,
        opened,
        BUCKET_BYTES,
    )
    made = Outer(list(named.values()), outer, outer_lr, outer_momentum)
    training = LocalTraining(
        model, optimizer, every, made, reducer, named, buffers, inner_momentum == "zero", scaler
    )
    _averaged.add(optimizer)
    weakref.finalize(training, _close, reducer, world)
    warn_of_own_state(model, "average_locally", averages=True)
    return training


def _check(
    every: int,
    outer: str,
    outer_lr: float | None,
    outer_momentum: float | None,
    inner_momentum: str,
) -> None:
    check_whole_number("average_locally", "every", every, 1)
    for word, value, known in (
        ("outer", outer, tuple(OUTER)),
        ("inner_momentum", inner_momentum, INNER),
    ):
        if value not in known:
            raise ArgumentError(
                f"average_locally: {word} is {shown(value)}; it must be one of {', '.join(known)}"
            )
    for word, number in (("outer_lr", outer_lr), ("outer_momentum", outer_momentum)):
        if number is not None:
            check_number("average_locally", word, number)
    if outer_lr is not None and not 0 < outer_lr < float("inf"):
        raise ArgumentError(f"outer_lr is {outer_lr}; it must be above 0")
    if outer_momentum is not None and not 0 <= outer_momentum < 1:
        raise ArgumentError(
            f"outer_momentum is {outer_momentum}; it must be from 0 up to, not including, 1"
        )
    if outer == "average" and not outer_lr is outer_momentum is None:
        raise ArgumentError("outer average has no outer_lr or outer_momentum; leave them out")


def _trained(model: nn.Module, compressor: str) -> dict[str, nn.Parameter]:
    check_state(model)
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    check_trained("average_locally", trained.values(), compressor)
    return trained


def _check_rows(model: nn.Module, process_group: ProcessGroup | None) -> None:
    # Ranks that hold different parts of one network must not be averaged.
    averaged = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    for module in model.modules():
        row = module.group.group.exchange_group if isinstance(module, Split) else None
        held = [] if row is None else dist.get_process_group_ranks(row)
        if len(set(held).intersection(averaged)) > 1:
            raise ArgumentError(
                f"average_locally: the network is split over the ranks "
                f"{', '.join(map(str, held))}, which have different parts of it; process_group "
                "must be the ranks that have the same parts, one of each network"
            )


def _close(reducer: GradientReducer, world: Group) -> None:
    reducer.close(wait=False)
    leave(world)
