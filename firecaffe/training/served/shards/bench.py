"""Where a learner computes whose weights are at their owners."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from firecaffe.synchrony.policy import Work
from firecaffe.training.served.compute import Contribution, Workbench
from firecaffe.training.served.memory import Gradient
from firecaffe.training.served.shards.carrier import Carrier


class OwnersBench:
    """One learner's; see `compute.Bench`."""

    def __init__(self, bench: Workbench, carrier: Carrier) -> None:
        self._bench, self._carrier = bench, carrier

    def compute(self, work: Work, weights: Mapping[str, Tensor]) -> Contribution:
        """Computes a work between its pull and its push. weights: the buffers of its version."""
        parameters = self._carrier.pull(work.version)
        brought = self._bench.compute(work, {**parameters, **weights})
        is_finite = self._carrier.push(work, brought.gradient)
        tail = Gradient({}, brought.gradient.tail)
        moved = self._carrier.moved
        return replace(brought, gradient=tail, is_finite=is_finite, moved=moved)

    def end(self) -> None:
        self._carrier.end()
