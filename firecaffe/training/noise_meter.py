"""Collects norms of gradients on some steps, from which the gradient noise scale follows.

The norms come with the sums of a step, by the same tree. So every rank has them, and the number of
workers changes no bit. A norm reads each gradient once: on one step in EVERY or fewer, this is at
most 1 % of the time of a training, even if it took a fifth of a step.
"""

from dataclasses import asdict
from typing import Annotated, Any, TypedDict

from msgspec import Meta

from firecaffe.data import SampleOrder
from firecaffe.runs.noise_scale import GradientNorms, NoiseScale, noise_scale
from firecaffe.schema import Amount, Count, checked

EVERY = 20
"""The steps from one measured step to the next, at least."""

MOST_STEPS = 256
"""The measured steps of a training, at most."""

MOST_SQUARE = 1e30
"""The largest squared norm that a checkpoint may have."""


class _NoiseRow(TypedDict):
    measured: Annotated[list[tuple[Count, Amount, Amount]], Meta(max_length=100 * MOST_STEPS)]


class NoiseMeter:
    """The state is JSON, equal on all ranks; checkpoints have it."""

    def __init__(self, order: SampleOrder, steps: int, has_norms: bool) -> None:
        """Measure in a training of `steps`, if `has_norms`, the norms of micro-batches and batches.

        There are none of a batch that is a single micro-batch.
        """
        self._order = order
        self._every = max(EVERY, -(-steps // MOST_STEPS))
        self._measures = has_norms and order.num_micro_batches > 1
        self._measured: list[GradientNorms] = []

    def is_due(self, step: int) -> bool:
        """Whether to measure step `step`, counted from 0: never the first, nor a short one."""
        return (
            self._measures
            and step > 0
            and step % self._every == 0
            and self._order.samples_in_step(step) == self._order.global_batch_size
        )

    def add(self, step: int, squares: tuple[float, float] | None) -> dict[str, float]:
        """Add the squares of step `step`, counted from 1, if there are any; see `Found.squares`.

        Return the numbers of the scale for a row of metrics. Norms are left out if they are not
        finite, because a loss scale was too large.
        """
        if squares is None or not all(square <= MOST_SQUARE for square in squares):
            return {}
        of_leaves, of_mean = squares
        mean = of_leaves / self._order.num_micro_batches
        self._measured.append(GradientNorms(step, mean, of_mean))
        scale = self._scale
        return {} if scale is None else scale.numbers

    @property
    def _scale(self) -> NoiseScale | None:
        sizes = self._order.micro_batch_size, self._order.global_batch_size
        return noise_scale(self._measured, *sizes)

    @property
    def row(self) -> dict[str, Any] | None:
        """The scale as result.json has it."""
        scale = self._scale
        return None if scale is None else asdict(scale)

    def state_dict(self) -> dict[str, Any]:
        return {"measured": self._measured} if self._measured else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._measured = [GradientNorms(*row) for row in checked(state, _NoiseRow)["measured"]]
