"""Which samples a step uses: a pure function of (seed, epoch, position).

In an epoch the samples are visited in the order of their hashes, or drawn by weights; step s of
the epoch takes the next `global_batch_size` of them, and leaf l of the step takes its own
`micro_batch_size` of those.
Nothing here knows how many workers there are, and to resume is to know the number of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from firecaffe.data.hash import Stream, hash64, upper_bits
from firecaffe.errors import DataError, RecipeError

SAMPLES, SHARDS = "samples", "shards"
ORDERS = (SAMPLES, SHARDS)
"""All samples in random order, or shard by shard."""


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """The sample at each position of an epoch: a permutation of 0 ... num_samples-1, int64.

    Samples are sorted by `hash64(seed, Stream.ORDER, epoch, sample)` as signed integers. The hash
    is a bijection of the sample, so there are no ties, and the order depends on that formula alone,
    not on a library's generator.
    """
    return hash64(seed, Stream.ORDER, epoch, torch.arange(num_samples)).argsort()


def epoch_order_by_shard(seed: int, epoch: int, shard_counts: Sequence[int]) -> Tensor:
    """Shards in the order of `hash64(seed, Stream.SHARD, epoch, shard)`, and within each its
    samples in the order that `epoch_order` gives them: a permutation that does not know of ranks.
    """
    counts = torch.tensor(shard_counts)
    order_of_shards = hash64(seed, Stream.SHARD, epoch, torch.arange(len(counts))).argsort()
    place_of_shard = torch.empty_like(order_of_shards)
    place_of_shard[order_of_shards] = torch.arange(len(counts))
    place_N = place_of_shard.repeat_interleave(counts)
    mixed = epoch_order(seed, epoch, int(counts.sum()))
    return mixed[place_N[mixed].argsort(stable=True)]


@dataclass(frozen=True, eq=False)
class Drawing:
    """Samples drawn with replacement, by weights that are whole numbers."""

    sums_N: Tensor
    """The weights of all samples up to and with each one, int64, at most 2^52."""

    def epoch_order(self, seed: int, epoch: int) -> Tensor:
        """The sample at each position of an epoch, int64 of (N,): the one whose part of the line
        from 0 to the sum of all weights holds floor(u sum), where u is the upper 53 bits of
        `hash64(seed, Stream.BALANCE, epoch, position)`, over 2^53.
        """
        hashes_N = hash64(seed, Stream.BALANCE, epoch, torch.arange(len(self.sums_N)))
        total = int(self.sums_N[-1])
        # Below 2^53 each step is exact or rounded alike on every machine.
        places_N = (upper_bits(hashes_N, 53).double() / 2**53 * total).long()
        return torch.searchsorted(self.sums_N, places_N.clamp(max=total - 1), right=True)


# The epoch at hand, and the next one for who looks ahead.
@lru_cache(maxsize=2)
def _kept_epoch_order(
    seed: int,
    epoch: int,
    num_samples: int,
    shard_counts: tuple[int, ...],
    drawing: Drawing | None,
) -> Tensor:
    if drawing is not None:
        return drawing.epoch_order(seed, epoch)
    if shard_counts:
        return epoch_order_by_shard(seed, epoch, shard_counts)
    return epoch_order(seed, epoch, num_samples)


@dataclass(frozen=True)
class SampleOrder:
    """The samples of every leaf of every step, for a run without end.

    Leaf l of the epoch's step s holds positions [s G + l m, s G + (l + 1) m) of the epoch, with
    G = global_batch_size and m = micro_batch_size, cut off at num_samples: each sample comes
    exactly once in an epoch (unless they are drawn), and the last step of an epoch may have a
    shorter leaf and empty ones.

    Raises:
        DataError: there are no samples.
        RecipeError: a batch size is not positive, or G is not a multiple of m.
    """

    seed: int
    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    shard_counts: tuple[int, ...] = ()
    """Samples that lie together and are visited together; empty: each for itself."""
    drawing: Drawing | None = None
    """By which weights an epoch's `num_samples` samples are drawn; None: each comes once."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(f"the data set has {self.num_samples} samples, expected at least one")
        if self.micro_batch_size < 1:
            raise RecipeError(f"micro_batch_size is {self.micro_batch_size}, expected at least 1")
        if self.global_batch_size < 1 or self.global_batch_size % self.micro_batch_size != 0:
            raise RecipeError(
                f"global_batch_size is {self.global_batch_size}, expected a multiple of "
                f"micro_batch_size, {self.micro_batch_size}"
            )

    @property
    def num_micro_batches(self) -> int:
        """Leaves of a step, empty ones included."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps that it takes to see every sample once; the last one may be short."""
        return -(-self.num_samples // self.global_batch_size)

    def epoch(self, step: int) -> int:
        """The epoch of a step; both count from 0."""
        return step // self.steps_per_epoch

    def step_in_epoch(self, step: int) -> int:
        """The place of a step in its epoch, from 0."""
        return step % self.steps_per_epoch

    def samples_in_step(self, step: int) -> int:
        """Samples of a step: global_batch_size, or what is left of the epoch."""
        start = self.step_in_epoch(step) * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - start)

    def samples_in_leaf(self, step: int, leaf: int) -> int:
        """Samples of a leaf of a step; none if the epoch has ended before it."""
        left = self.samples_in_step(step) - leaf * self.micro_batch_size
        return max(0, min(self.micro_batch_size, left))

    def samples_before(self, step: int) -> int:
        """Samples of all steps before this one."""
        within = self.step_in_epoch(step) * self.global_batch_size
        return self.epoch(step) * self.num_samples + within

    def steps_for(self, samples: int) -> int:
        """How many steps see that many samples, as nearly as whole steps can; at least one."""
        epochs, left = divmod(samples, self.num_samples)
        return max(1, epochs * self.steps_per_epoch + round(left / self.global_batch_size))

    def micro_batch(self, step: int, leaf: int) -> Tensor:
        """The samples of leaf 0 ... num_micro_batches-1 of a step, int64; may be empty."""
        if not 0 <= leaf < self.num_micro_batches:
            raise IndexError(f"leaf is {leaf}, expected 0 to {self.num_micro_batches - 1}")
        start = self.step_in_epoch(step) * self.global_batch_size + leaf * self.micro_batch_size
        order = _kept_epoch_order(
            self.seed, self.epoch(step), self.num_samples, self.shard_counts, self.drawing
        )
        # A copy: what is kept must not change when a caller changes its batch.
        return order[start : start + self.micro_batch_size].clone()
