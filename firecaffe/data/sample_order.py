"""The samples of each step: a pure function of (seed, epoch, position).

An epoch visits samples in the order of their hashes, or draws them by weights. Each step uses the
next `global_batch_size` of them, and each of its leaves the next `micro_batch_size` of these. The
number of workers plays no role, and the step number is all that is needed to resume.

`data.balance` chooses weights. They become integers whose sum is at most 2^52, so that sums are the
same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from firecaffe.data import DataConfig
from firecaffe.data.dataset import Dataset, TensorDataset, numbers_of
from firecaffe.data.hash import Stream, hash64, upper_bits
from firecaffe.errors import DataError, RecipeError

SAMPLES, SHARDS = "samples", "shards"
ORDERS = (SAMPLES, SHARDS)


def epoch_order(seed: int, epoch: int, num_samples: int) -> Tensor:
    """Return the sample at each position of an epoch: a permutation of 0 ... num_samples-1, int64.

    Samples are sorted by `hash64(seed, Stream.ORDER, epoch, sample)`, signed. The hash is a
    bijection of the sample, so there are no ties. No library's random generator is involved.
    """
    return hash64(seed, Stream.ORDER, epoch, torch.arange(num_samples)).argsort()


def epoch_order_by_shard(seed: int, epoch: int, shard_counts: Sequence[int]) -> Tensor:
    """Sort shards by `hash64(seed, Stream.SHARD, epoch, shard)`, their samples by `epoch_order`."""
    counts = torch.tensor(shard_counts)
    order_of_shards = hash64(seed, Stream.SHARD, epoch, torch.arange(len(counts))).argsort()
    place_of_shard = torch.empty_like(order_of_shards)
    place_of_shard[order_of_shards] = torch.arange(len(counts))
    place_N = place_of_shard.repeat_interleave(counts)
    mixed = epoch_order(seed, epoch, int(counts.sum()))
    return mixed[place_N[mixed].argsort(stable=True)]


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """Draws of samples with replacement, by integer weights."""

    sums_N: Tensor
    """Inclusive cumulative weights, int64, at most 2^52."""

    def epoch_order(self, seed: int, epoch: int) -> Tensor:
        """Return an epoch's samples: the first whose cumulative weight exceeds floor(u total).

        u is the upper 53 bits of `hash64(seed, Stream.BALANCE, epoch, position)`, divided by 2^53.
        """
        hashes_N = hash64(seed, Stream.BALANCE, epoch, torch.arange(len(self.sums_N)))
        total = int(self.sums_N[-1])
        # Below 2^53 each operation is exact, or rounded the same way on every machine.
        places_N = (upper_bits(hashes_N, 53).double() / 2**53 * total).long()
        return torch.searchsorted(self.sums_N, places_N.clamp(max=total - 1), right=True)


# Two epochs: the current one, and the next one for prefetching.
@lru_cache(maxsize=2)
def _kept_epoch_order(
    seed: int,
    epoch: int,
    num_samples: int,
    shard_counts: tuple[int, ...],
    drawing: WeightedDraws | None,
) -> Tensor:
    if drawing is not None:
        return drawing.epoch_order(seed, epoch)
    if shard_counts:
        return epoch_order_by_shard(seed, epoch, shard_counts)
    return epoch_order(seed, epoch, num_samples)


@dataclass(frozen=True)
class SampleOrder:
    """The samples of every leaf of every step, without end.

    Leaf l of the epoch's step s holds positions [s G + l m, s G + (l + 1) m), cut off at
    num_samples, with G = global_batch_size and m = micro_batch_size. An epoch's last step may have
    a short leaf and empty leaves. Raises DataError if there are no samples, and RecipeError if a
    batch size is not positive or G is not a multiple of m.
    """

    seed: int
    num_samples: int
    global_batch_size: int
    micro_batch_size: int
    shard_counts: tuple[int, ...] = ()
    """Sizes of the shards whose samples are visited together. Empty: there are no shards."""
    drawing: WeightedDraws | None = None
    """Draws an epoch's `num_samples` samples by weights. None: each sample is used once."""

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
        return -(-self.num_samples // self.global_batch_size)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def step_in_epoch(self, step: int) -> int:
        return step % self.steps_per_epoch

    def samples_in_step(self, step: int) -> int:
        start = self.step_in_epoch(step) * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - start)

    def samples_in_leaf(self, step: int, leaf: int) -> int:
        left = self.samples_in_step(step) - leaf * self.micro_batch_size
        return max(0, min(self.micro_batch_size, left))

    def leaf_weight(self, step: int, leaf: int) -> float:
        """Return a leaf's number of samples as a share of a full leaf's."""
        return self.samples_in_leaf(step, leaf) / self.micro_batch_size

    def samples_before(self, step: int) -> int:
        within = self.step_in_epoch(step) * self.global_batch_size
        return self.epoch(step) * self.num_samples + within

    def steps_for(self, samples: int) -> int:
        """Return the number of steps, at least 1, that is nearest to `samples` samples."""
        epochs, left = divmod(samples, self.num_samples)
        return max(1, epochs * self.steps_per_epoch + round(left / self.global_batch_size))

    def micro_batch(self, step: int, leaf: int) -> Tensor:
        """Return the samples of leaf 0 ... num_micro_batches-1 of a step, int64, perhaps empty."""
        if not 0 <= leaf < self.num_micro_batches:
            raise IndexError(f"leaf is {leaf}, expected 0 to {self.num_micro_batches - 1}")
        start = self.step_in_epoch(step) * self.global_batch_size + leaf * self.micro_batch_size
        order = _kept_epoch_order(
            self.seed, self.epoch(step), self.num_samples, self.shard_counts, self.drawing
        )
        # A copy, so that a caller that modifies its batch does not modify the cached order.
        return order[start : start + self.micro_batch_size].clone()


def shard_counts(dataset: Dataset, config: DataConfig) -> tuple[int, ...]:
    """Return samples per shard if `data.order` is shards. Raises RecipeError without shards."""
    if config.order != SHARDS:
        return ()
    counts: tuple[int, ...] = getattr(dataset, "shard_counts", ())
    if not counts:
        raise RecipeError(
            "data.order is shards; only packed data that are read while training goes on have "
            "shards, so take samples"
        )
    return counts


NONE, CLASSES, OWN = "none", "classes", "own"
BALANCES = (NONE, CLASSES, OWN)

SUM_BITS = 52


def weighted_draws(dataset: Dataset, balance: str) -> WeightedDraws | None:
    """Return how samples are drawn; None if each is used once. Raises RecipeError, DataError."""
    if balance == NONE:
        return None
    weights_N = weights_of(dataset) if balance == OWN else _class_weights(dataset)
    if not bool((weights_N > 0).any()):
        raise DataError("sample_weights are all 0; expected some that are not")
    return WeightedDraws(whole(weights_N).cumsum(0))


def whole(weights_N: Tensor) -> Tensor:
    """Scale weights to integers. Positive weights stay positive."""
    count = len(weights_N)
    scale = float(2 ** (SUM_BITS - count.bit_length()))
    scaled_N = (weights_N / weights_N.max() * scale).floor().to(torch.int64)
    return torch.where(weights_N > 0, scaled_N.clamp(min=1), 0)


def weights_of(dataset: Dataset) -> Tensor:
    given = getattr(dataset, "sample_weights", None)
    if given is None:
        raise RecipeError(
            "data.balance is own, but the data set has no sample_weights; expected a number for "
            "each sample"
        )
    weights_N = numbers_of("sample_weights", given, len(dataset)).double()
    wrong = (~(weights_N.isfinite() & (weights_N >= 0))).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"sample_weights[{first}] is {float(weights_N[first])}; expected finite, 0 or more"
        )
    return weights_N


def _class_weights(dataset: Dataset) -> Tensor:
    classes_N = labels_of(dataset)
    if classes_N is None:
        raise RecipeError(
            "data.balance is classes, but the data set does not say them; expected targets, the "
            "class of each sample, or data.balance own with sample_weights"
        )
    least = int(classes_N.min())
    if least < 0:
        raise DataError(f"targets has the class {least}; expected numbers from 0")
    return 1.0 / torch.bincount(classes_N).double()[classes_N]


def labels_of(dataset: Dataset) -> Tensor | None:
    """Return each sample's class, int64 of (N,), or None. Raises DataError if they are invalid."""
    targets = getattr(dataset, "targets", None)
    is_said = isinstance(targets, Tensor) or not isinstance(dataset, TensorDataset)
    if targets is None or not is_said:
        return None
    classes_N = numbers_of("targets", targets, len(dataset))
    if classes_N.is_floating_point() or classes_N.dtype == torch.bool:
        raise DataError(
            f"targets are {classes_N.dtype}; data.balance classes expects whole numbers"
        )
    return classes_N.long()
