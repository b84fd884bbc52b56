"""Where a worker computes and makes its own updates, in weights that others write to, too."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn, optim

from firecaffe.solvers.optimizer import set_rate
from firecaffe.synchrony.leaves import Leaf
from firecaffe.synchrony.policy import Work
from firecaffe.training.served.compute import Contribution, Workbench
from firecaffe.training.served.finite import are_finite
from firecaffe.training.served.memory import Gradient


@dataclass(frozen=True)
class Rule:
    """How a worker makes an update."""

    optimizer_of: Callable[[Mapping[str, nn.Parameter]], optim.Optimizer]
    rate: Callable[[int], float]
    """Of a step, counted from 0."""
    momentum: Callable[[int], float | None]
    """Of a step; None if it does not change."""
    weight_of: Callable[[Leaf], float]
    """Of a leaf, 1 if it is full."""
    clip_gradients: float = 0.0
    """The largest norm of a worker's gradient; 0 does not clip."""


class LocklessBench:
    """A rank's; see `compute.Bench`."""

    def __init__(self, bench: Workbench, optimizer: optim.Optimizer, rule: Rule) -> None:
        """bench: its parameters are the shared weights. optimizer: of them."""
        self._bench, self._optimizer, self._rule = bench, optimizer, rule

    def compute(self, work: Work, weights: Mapping[str, Tensor]) -> Contribution:
        """Computes a work at the present weights, and updates them. weights: the buffers."""
        brought = self._bench.compute(work, weights)
        start = time.perf_counter()
        is_finite = are_finite(self._bench.named, brought.gradient.tensors.items())
        if is_finite.all() and not self._update(work.leaf, brought.gradient.tensors):
            is_finite = torch.zeros_like(is_finite)
        return replace(
            brought,
            gradient=Gradient({}, brought.gradient.tail),
            is_finite=is_finite,
            compute_s=brought.compute_s + time.perf_counter() - start,
        )

    @torch.no_grad()
    def _update(self, leaf: Leaf, gradients: Mapping[str, Tensor]) -> bool:
        """Makes an update. Returns whether it has: not by a norm beyond float32."""
        weight, rule = self._rule.weight_of(leaf), self._rule
        for name, gradient in gradients.items():
            self._bench.named[name].grad = gradient.div_(weight)
        if rule.clip_gradients:
            named = self._bench.named.values()
            norm = nn.utils.clip_grad_norm_(named, rule.clip_gradients, foreach=True)
            if not norm.isfinite():
                self._optimizer.zero_grad()
                return False
        set_rate(self._optimizer, rule.rate(leaf.step), rule.momentum(leaf.step))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return True

    def end(self) -> None:
        """Nothing has to end."""
