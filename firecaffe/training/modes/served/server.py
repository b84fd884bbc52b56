"""The server: holds the weights, and executes events on tensors, in one process.

An update adds its gradients by the tree in the order of their leaves, as a synchronous step does,
and divides the sum by their samples. Late gradients are corrected first. The rules leave a gradient
of staleness 0 as it is.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.data import SampleOrder
from firecaffe.exchange.leaves import tree_sum
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Join, Lose, Pull, Push
from firecaffe.synchrony.server_policies import Leaf, Update, Work
from firecaffe.training.modes.served.server_memory import Gradient, ServerMemory
from firecaffe.training.updates.every_rank import Applier

LAMBDA = 2.0
"""The weight of delay compensation. Source: Zheng et al. 2017, as it is for CIFAR-10."""

DECAY = 0.95
"""The decay of the gradients' mean square in delay compensation. Source: Zheng et al. 2017."""

SQUARE = 1e-7
"""The number added to the mean square in delay compensation. Source: Zheng et al. 2017."""

STEP_DECAY = 0.999
"""The decay of the mean step, in the gap-aware rule; corrected for the mean's start at 0."""

Weights = Mapping[str, Tensor]
"""Weights or gradients of parameters by name, in network order."""


def staleness_scale(form: str, staleness: int) -> float:
    """Return the factor of a gradient: 1, or 1 / τ.

    Source: Zhang et al. 2016, "Staleness-aware async-SGD for distributed deep learning".
    """
    return 1 / max(staleness, 1) if form == "inverse" else 1.0


class MeanStep:
    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    @property
    def value(self) -> float:
        return self._sum / (1 - STEP_DECAY**self._count) if self._count else 0.0

    def add(self, step: float) -> None:
        self._sum = STEP_DECAY * self._sum + (1 - STEP_DECAY) * step
        self._count += 1

    def state_dict(self) -> dict[str, float]:
        return {"sum": self._sum, "count": self._count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._sum, self._count = state["sum"], int(state["count"])


class LateRule:
    """Corrects nothing. Others extend it."""

    def __init__(self) -> None:
        self.mean_step = MeanStep()
        """The mean of updates. Only the gap-aware rule adds to it; a checkpoint always has it."""

    def correct(self, gradients: Weights, weights: Weights, pulled: Weights) -> None:
        """Correct a work's gradients in place, given the weights now and those it pulled."""

    @contextmanager
    def around_update(self, weights: Weights) -> Iterator[None]:
        """Learn from an update, which the block makes."""
        yield


class DelayCompensation(LateRule):
    """DC-ASGD-a: g + λ g ⊙ g ⊙ (W - W pulled), λ = λ0 / √(mean of g ⊙ g).

    The mean square includes this gradient. Source: Zheng et al. 2017, "Asynchronous stochastic
    gradient descent with delay compensation".
    """

    def __init__(self, mean_square: Weights) -> None:
        super().__init__()
        self._mean_square = mean_square

    def correct(self, gradients: Weights, weights: Weights, pulled: Weights) -> None:
        for name, g in gradients.items():
            square = self._mean_square[name]
            square.mul_(DECAY).addcmul_(g, g, value=1 - DECAY)
            moved = weights[name] - pulled[name]
            g.add_(g * g * moved * (LAMBDA / (square + SQUARE).sqrt()))


class GapAware(LateRule):
    """g / (1 + gap / mean step), both as root mean squares over all weights.

    Source: Barkai, Hakimi and Schuster 2020, "Gap-aware mitigation of gradient staleness".
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        of_all: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
    ) -> None:
        """Correct gradients on a rank that may have only some of the parameters.

        sizes: the number of elements of each parameter of the network. of_all: maps numbers of the
        parameters that are here to those of all, in network order.
        """
        super().__init__()
        self._sizes, self._of_all = sizes, of_all

    def correct(self, gradients: Weights, weights: Weights, pulled: Weights) -> None:
        if self.mean_step.value > 0:
            gap = self._distance({name: weights[name] for name in gradients}, pulled)
            if gradients:  # other ranks may have all of them
                torch._foreach_div_(list(gradients.values()), 1 + gap / self.mean_step.value)

    @contextmanager
    def around_update(self, weights: Weights) -> Iterator[None]:
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        yield
        self.mean_step.add(self._distance(weights, before))

    def _distance(self, weights: Weights, others: Weights) -> float:
        """Return ‖W - W'‖ / √k of k weights."""
        squares = self._of_all({n: _square(w, others[n]) for n, w in weights.items()})
        return math.sqrt(sum(squares.values()) / sum(self._sizes[name] for name in squares))


def _square(weight: Tensor, other: Tensor) -> float:
    # In the weight's memory layout, on which the bits of a sum depend.
    moved = torch.empty_like(weight).copy_(weight).sub_(other)
    return float(moved.double().square().sum())


def late_rule(
    name: str,
    memory: ServerMemory,
    named: Mapping[str, nn.Parameter],
    of_all: Callable[[Mapping[str, float]], Mapping[str, float]] = dict,
) -> LateRule:
    """Make the rule of `synchrony.compensate`. named: all parameters; of_all: as in `GapAware`."""
    if name == "gap":
        return GapAware({name: parameter.numel() for name, parameter in named.items()}, of_all)
    return DelayCompensation(memory.mean_square) if name == "delay" else LateRule()


@dataclass(frozen=True)
class UpdateSettings:
    step: int
    """The training's step, counted from 0. It may have several updates."""
    rate: float
    momentum: float | None
    delay: int
    """The updates over which momentum is delayed; 0 if it is not."""


@dataclass
class Server:
    """The weights of a training, and what late gradients need. Its numbers are JSON."""

    named: dict[str, nn.Parameter]
    applier: Applier
    memory: ServerMemory
    words: SynchronyConfig
    learners: set[int]
    buffers: BufferChanges
    order: SampleOrder
    clip_gradients: float = 0.0
    norms_of_all: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    """Maps norms of the gradients here to those of all used parameters, in network order."""
    late_rule: LateRule = field(default_factory=LateRule)
    _works: dict[Leaf, Work] = field(default_factory=dict)
    _overflowed: set[Leaf] = field(default_factory=set)
    """Leaves whose gradient has overflowed, here or at another owner, and waits for its update."""

    def keep(self, work: Work, gradient: Gradient, overflows: bool = False) -> None:
        """Keep a gradient until its update, which the loss scale skips if it `overflows`."""
        self.memory.gradients[work.leaf] = gradient
        self._overflowed |= {work.leaf} if overflows else set()

    def take(self, event: Event) -> None:
        """Record an event that was executed, and delete what is no longer needed."""
        match event:
            case Pull():
                self.memory.keep(event.work.version)
                self._works[event.work.leaf] = event.work
            case Push():
                if not event.counts and self._works.get(event.work.leaf) == event.work:
                    del self._works[event.work.leaf]
                if event.update is not None:
                    applied = (work.leaf for work in event.update.works)
                    for leaf in (*applied, *event.update.dropped):
                        self._works.pop(leaf, None)
                        self.memory.gradients.pop(leaf, None)
                        self._overflowed.discard(leaf)
            case Lose():
                self.learners.discard(event.learner)
                gone = (held for held in self._works.values() if held.learner == event.learner)
                for work in [held for held in gone if held.leaf not in self.memory.gradients]:
                    del self._works[work.leaf]
            case Join():
                self.learners.add(event.learner)
        self.memory.release({work.version for work in self._works.values()})

    @torch.no_grad()
    def prepare(self, update: Update) -> tuple[Tensor, Tensor]:
        """Put the mean gradient of an update into every `p.grad`.

        Return whether each parameter's gradient is finite, bool, shape (parameters,), and the
        gradient's norm before clipping, 0 without clipping. An update that the loss scale skips has
        no gradients.
        """
        skips = any(work.leaf in self._overflowed for work in update.works)
        self.applier.scale.agree(skips)
        if skips:
            for parameter in self.named.values():
                parameter.grad = None
            (first, *_) = self.named.values()
            return first.new_ones(len(self.named), dtype=torch.bool), first.new_zeros(())
        late = [self._corrected(update, work) for work in update.works]
        weight = self._weight(update)
        finite = []
        for name, parameter in self.named.items():
            total = self._sum(update, [gradients.get(name) for gradients in late])
            parameter.grad = None if total is None else total.div_(weight)
            finite.append(torch.ones((), dtype=torch.bool, device=parameter.device))
            if total is not None and total.numel():
                low, high = torch.aminmax(total)
                finite[-1] = low.isfinite() & high.isfinite()
        norm = torch.zeros((), device=finite[0].device)
        if self.clip_gradients:
            norm = self._norm().to(norm.device)
            parameters = self.named.values()
            nn.utils.clip_grads_with_norm_(parameters, self.clip_gradients, norm, foreach=True)
        return torch.stack(finite), norm

    @torch.no_grad()
    def apply(self, update: Update, settings: UpdateSettings) -> None:
        """Make an update, which is prepared."""
        is_skipped = self.applier.scale.has_overflowed
        step, rate, momentum = settings.step, settings.rate, settings.momentum
        with nullcontext() if is_skipped else self.late_rule.around_update(self.named):
            self.applier.apply(step, rate, momentum, number=update.version - 1)
        changes = [self._buffer_changes(update, work) for work in update.works]
        sums = [self._sum(update, list(parts)) for parts in zip(*changes, strict=True)]
        self.buffers.begin_step()
        weight = self._weight(update)
        self.buffers.finish_step([total for total in sums if total is not None], weight)

    def _weight(self, update: Update) -> float:
        return sum(self.order.leaf_weight(*work.leaf) for work in update.works)

    def _norm(self) -> Tensor:
        used = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        # One by one, and added on the host, so that no bit depends on which rank has which one.
        norms = [torch.linalg.vector_norm(gradient).cpu() for gradient in used.values()]
        of_all = self.norms_of_all(dict(zip(used, norms, strict=True)))
        return nn.utils.get_total_norm(list(of_all.values()), foreach=True)

    def _corrected(self, update: Update, work: Work) -> dict[str, Tensor]:
        tensors = self.memory.gradients[work.leaf].tensors
        versions = self.memory.versions.get(work.version, {})
        pulled = {name: versions[name].to(self.named[name].device) for name in tensors}
        self.late_rule.correct(tensors, self.named, pulled)
        scale = staleness_scale(self.words.staleness_rate, update.staleness(work))
        if tensors and scale != 1:
            torch._foreach_mul_(list(tensors.values()), scale)
        return tensors

    def _buffer_changes(self, update: Update, work: Work) -> list[Tensor]:
        changes = self.memory.gradients[work.leaf].tail[1:]
        late = update.staleness(work)
        # The first micro-batch of a step changes integer buffers; two such changes do not add up.
        firsts = [other.leaf for other in update.works if other.leaf.place == 0]
        is_newest = not firsts or work.leaf == max(firsts)
        is_plain = not late and (is_newest or work.leaf.place)
        if is_plain or not changes:  # an owner of weights has none
            return changes
        pulled = self.memory.versions[work.version]
        weight = self.order.leaf_weight(*work.leaf)
        return self.buffers.late(changes, pulled, weight, late, is_newest)

    def _sum(self, update: Update, values: list[Tensor | None]) -> Tensor | None:
        example = next((value for value in values if value is not None), None)
        if example is None:
            return None
        of_leaf = dict(zip((work.leaf for work in update.works), values, strict=True))
        leaves = sorted([*of_leaf, *update.dropped])
        zeros = torch.zeros_like(example)
        parts = [of_leaf.get(leaf) for leaf in leaves]
        return tree_sum([zeros if part is None else part for part in parts], torch.add)

    def state_dict(self) -> dict[str, Any]:
        works = [list(work) for _, work in sorted(self._works.items())]
        learners = sorted(self.learners)
        mean_step = self.late_rule.mean_step.state_dict()
        row = {"works": works, "learners": learners, "mean_step": mean_step}
        overflowed = [list(leaf) for leaf in sorted(self._overflowed)]
        return {**row, "overflowed": overflowed} if overflowed else row

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._works = {work.leaf: work for work in (Work(*row) for row in state["works"])}
        self.learners = set(state["learners"])
        self.late_rule.mean_step.load_state_dict(state["mean_step"])
        self._overflowed = {Leaf(*row) for row in state.get("overflowed", ())}
