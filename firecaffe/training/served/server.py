"""The server: holds the weights, and executes events on tensors, in one process.

An update adds its gradients by the tree in the order of their leaves, as a synchronous step does,
and divides them by their samples. Late gradients are corrected first, by rules that leave a
gradient of staleness 0 as it is.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

from firecaffe.exchange.leaves import tree_sum
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.solvers.optimizer import set_rate
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Join, Lose, Pull, Push
from firecaffe.synchrony.server_policies import Leaf, Update, Work, row_of, work_of
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.served.server_memory import Gradient, ServerMemory

LAMBDA = 2.0
"""The weight of delay compensation. Source: Zheng et al. 2017, as it is for CIFAR-10."""

DECAY = 0.95
"""The decay of the gradients' mean square in delay compensation. Source: Zheng et al. 2017."""

SQUARE = 1e-7
"""The number added to the mean square in delay compensation. Source: Zheng et al. 2017."""

STEP_DECAY = 0.999
"""The decay of the mean step, in the gap-aware rule; corrected for the mean's start at 0."""


def staleness_scale(form: str, staleness: int) -> float:
    """Return the factor of a gradient: 1, or 1 / τ.

    Source: Zhang et al. 2016, "Staleness-aware async-SGD for distributed deep learning".
    """
    return 1 / max(staleness, 1) if form == "inverse" else 1.0


def compensate_delay(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    pulled: Sequence[Tensor],
    mean_square: Sequence[Tensor],
) -> None:
    """Correct in place by DC-ASGD-a: g + λ g ⊙ g ⊙ (W - W pulled), λ = λ0 / √(mean of g ⊙ g).

    The mean square takes this gradient in first. Source: Zheng et al. 2017, "Asynchronous
    stochastic gradient descent with delay compensation".
    """
    for g, now, then, square in zip(gradients, weights, pulled, mean_square, strict=True):
        square.mul_(DECAY).addcmul_(g, g, value=1 - DECAY)
        g.add_(g * g * (now - then) * (LAMBDA / (square + SQUARE).sqrt()))


def compensate_gap(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    pulled: Sequence[Tensor],
    mean_step: float,
) -> None:
    """Correct in place: g / (1 + gap / mean step), both as root mean squares over all weights.

    Source: Barkai, Hakimi and Schuster 2020, "Gap-aware mitigation of gradient staleness".
    """
    if mean_step > 0:
        torch._foreach_div_(list(gradients), 1 + distance(weights, pulled) / mean_step)


def distance(weights: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return ‖W - W'‖ / √k of k weights."""
    squares = (
        float((now - then).double().square().sum())
        for now, then in zip(weights, others, strict=True)
    )
    return math.sqrt(sum(squares) / sum(weight.numel() for weight in weights))


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

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._sum, self._count = state["sum"], int(state["count"])


@dataclass
class Server:
    """The weights of a training, and what late gradients need. Its numbers are JSON."""

    named: dict[str, nn.Parameter]
    optimizer: optim.Optimizer
    memory: ServerMemory
    words: SynchronyConfig
    learners: set[int]
    buffers: BufferChanges
    clip_gradients: float = 0.0
    ema: Ema | None = None
    norms_of_all: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    """Maps the norms of these gradients to those of all used parameters, in network order."""
    mean_step: MeanStep = field(default_factory=MeanStep)
    _works: dict[Leaf, Work] = field(default_factory=dict)

    def keep(self, work: Work, gradient: Gradient) -> None:
        self.memory.gradients[work.leaf] = gradient

    def take(self, event: Event) -> None:
        """Record an event that was executed; delete what nobody needs any more."""
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
            case Lose():
                self.learners.discard(event.learner)
                gone = (held for held in self._works.values() if held.learner == event.learner)
                for work in [held for held in gone if held.leaf not in self.memory.gradients]:
                    del self._works[work.leaf]
            case Join():
                self.learners.add(event.learner)
        self.memory.release({work.version for work in self._works.values()})

    @torch.no_grad()
    def prepare(self, update: Update, weight_of: Callable[[Leaf], float]) -> tuple[Tensor, Tensor]:
        """Put the mean gradient of an update into every `p.grad`. A full leaf has weight 1.

        Return whether each parameter's gradient is finite, bool, shape (parameters,), and the
        gradient's norm before clipping, 0 without clipping.
        """
        late = [self._corrected(update, work) for work in update.works]
        weight = sum(weight_of(work.leaf) for work in update.works)
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
    def apply(
        self,
        update: Update,
        weight_of: Callable[[Leaf], float],
        rate: float,
        momentum: float | None,
    ) -> None:
        before = None
        if self.words.compensate == "gap":
            before = [parameter.detach().clone() for parameter in self.named.values()]
        set_rate(self.optimizer, rate, momentum)
        self.optimizer.step()
        if before is not None:
            self.mean_step.add(distance(list(self.named.values()), before))
        if self.ema is not None:
            self.ema.update(update.version - 1)
        tails = [self.memory.gradients[work.leaf].tail for work in update.works]
        sums = [self._sum(update, list(parts)) for parts in zip(*tails, strict=True)]
        self.buffers.begin_step()
        weight = sum(weight_of(work.leaf) for work in update.works)
        self.buffers.finish_step(
            [buffer_sum for buffer_sum in sums[1:] if buffer_sum is not None], weight
        )

    def _norm(self) -> Tensor:
        used = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        # One by one and added on the host, so that no bit depends on who has which of them.
        norms = [torch.linalg.vector_norm(gradient).cpu() for gradient in used.values()]
        of_all = self.norms_of_all(dict(zip(used, norms, strict=True)))
        return nn.utils.get_total_norm(list(of_all.values()), foreach=True)

    def _corrected(self, update: Update, work: Work) -> dict[str, Tensor]:
        tensors = self.memory.gradients[work.leaf].tensors
        names = list(tensors)
        if not names:
            return tensors
        gradients, pulled = list(tensors.values()), self.memory.versions[work.version]
        now = [self.named[name] for name in names]
        places = now, [pulled[name].to(self.named[name].device) for name in names]
        if self.words.compensate == "delay":
            squares = [self.memory.mean_square[name] for name in names]
            compensate_delay(gradients, *places, squares)
        elif self.words.compensate == "gap":
            compensate_gap(gradients, *places, self.mean_step.value)
        scale = staleness_scale(self.words.staleness_rate, update.staleness(work))
        if scale != 1:
            torch._foreach_mul_(gradients, scale)
        return tensors

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
        works = [row_of(work) for _, work in sorted(self._works.items())]
        learners = sorted(self.learners)
        return {"works": works, "learners": learners, "mean_step": self.mean_step.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        works = [work_of(row) for row in state["works"]]
        self._works = {work.leaf: work for work in works}
        self.learners = set(state["learners"])
        self.mean_step.load_state_dict(state["mean_step"])
