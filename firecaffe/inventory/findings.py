"""The findings about a network, for people and as a record, and what its loss is a mean of.

A step adds its micro-batches' losses, each weighted by its samples. So each loss must be the mean
over its samples; otherwise the micro-batch size changes the gradient. A few samples show that.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from firecaffe.errors import RecipeError
from firecaffe.generators import generators_kept, seed_generators
from firecaffe.inventory.network_state import Changes, Kinds
from firecaffe.inventory.world_queries import doubts_of_world
from firecaffe.value_checks import some_of

Loss = Callable[[Any, Any], Tensor]

MEAN = "the mean of the samples"
WHOLE = "of each micro-batch as a whole"
UNKNOWN = "not known what it is a mean of, for outputs or targets have no row for each sample"
RAISED = "not known what it is a mean of, for of some samples it raises"

TOLERANCE = 1e-3
"""The largest relative difference between two losses that counts as rounding."""
COARSE = 3e-2

MAX_SAMPLES = 16

EXACT, MIN_APART = 2e-5, 0.1
"""Relative error of a weighted mean, and least relative difference of two losses to detect it."""

REMEDY = "expected the mean over the micro-batch's samples, each with the same weight"


def check_reduction(word: str, loss: Any) -> None:
    """Check the reduction of a torch loss. Raises: RecipeError if it is not a plain mean."""
    if not isinstance(loss, nn.modules.loss._Loss):
        return
    if loss.reduction not in ("mean", "batchmean"):
        raise RecipeError(
            f"{word} is {type(loss).__name__}(reduction={loss.reduction!r}); {REMEDY}: "
            'reduction="mean"'
        )
    is_weighted = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
    if is_weighted:
        raise RecipeError(
            f"{word} is {type(loss).__name__}(weight=…), a mean over the weights of the labels "
            f"that a micro-batch happens to have; {REMEDY}: task.class_weights of a recipe, or "
            'F.cross_entropy(outputs, labels, weight, reduction="none").mean()'
        )


def mean_of(word: str, loss: Loss, outputs: Any, targets: Any) -> str:
    """Say what a loss is a mean of: MEAN, WHOLE, UNKNOWN, or RAISED with the error's type.

    outputs, targets: tensors or trees of them, with a row for each sample. Raises: RecipeError if
    it is a sum, a weighted mean, or a mean over fewer than the samples.
    """
    leaves = [leaf for leaf in tree_leaves((outputs, targets)) if isinstance(leaf, Tensor)]
    count = next((len(leaf) for leaf in leaves if leaf.ndim), 0)
    if not count or any(leaf.ndim == 0 or len(leaf) != count for leaf in leaves):
        return UNKNOWN
    count = min(count, MAX_SAMPLES)

    def of(*places: int) -> float:
        index = torch.tensor(places, device=leaves[0].device)
        seed_generators(0)  # a loss may draw random numbers
        with torch.no_grad():
            return float(loss(_taken(outputs, index), _taken(targets, index)))

    try:
        with generators_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some losses warn about a single sample
            losses = [of(place) for place in range(count)]
            pairs = [of(place, place + 1) for place in range(count - 1)]
            twice, whole = of(0, 0), of(*range(count))
    except RecipeError:
        raise
    except Exception as error:  # some losses need several samples
        return f"{RAISED} {type(error).__name__}"
    is_coarse = any(leaf.is_floating_point() and leaf.dtype.itemsize == 2 for leaf in leaves)
    close = partial(math.isclose, rel_tol=COARSE if is_coarse else TOLERANCE, abs_tol=1e-6)
    if not close(losses[0], 0) and close(twice, 2 * losses[0]):
        raise RecipeError(
            f"{word} gives {losses[0]:.4g} for the first sample, and {twice:.4g} for that sample "
            f"twice: it is a sum; {REMEDY}"
        )
    apart = list[int]()
    for place, pair in enumerate(pairs):
        one, other = losses[place : place + 2]
        alone, left = (one, other) if _is_none(one) else (other, one)
        counts = not _is_none(left) and not close(left, 0)
        if _is_none(alone) and counts and close(pair, left):
            raise RecipeError(
                f"{word} gives {alone:g} for one sample, {left:.4g} for another, and {pair:.4g} "
                "for both: it is a mean over fewer than the samples, as without those of "
                f"ignore_index; {REMEDY}, where one without a label adds 0"
            )
        if not close(pair, (one + other) / 2):
            apart.append(place)
    # The pair that differs most best distinguishes a weighted mean from a root of a mean.
    place = max(apart, key=lambda at: abs(losses[at] - losses[at + 1]), default=0)
    if apart and not is_coarse and _is_weighted(losses, pairs[place], of, place):
        raise RecipeError(
            f"{word} gives {losses[place]:.4g} and {losses[place + 1]:.4g} for two samples, and "
            f"{pairs[place]:.4g} for both: it is a weighted mean; {REMEDY}"
        )
    is_mean = not apart and close(twice, losses[0]) and close(whole, sum(losses) / count)
    return MEAN if is_mean else WHOLE


def _is_none(value: float) -> bool:
    return math.isnan(value) or value == 0


def _is_weighted(
    losses: Sequence[float], pair: float, of: Callable[..., float], place: int
) -> bool:
    """Whether repeated samples give the loss that follows from the pair's weight."""
    one, other = losses[place], losses[place + 1]
    apart = abs(one - other) > MIN_APART * max(abs(one), abs(other))
    if not apart or not min(one, other) < pair < max(one, other):
        return False
    # From pair = (one + weight * other) / (1 + weight).
    weight = (one - pair) / (pair - other)
    with generators_kept():
        return all(
            math.isclose(
                of(*[place] * first, *[place + 1] * second),
                (first * one + weight * second * other) / (first + weight * second),
                rel_tol=EXACT,
            )
            for first, second in ((2, 1), (5, 1), (1, 5))
        )


def _taken(tree: Any, index: Tensor) -> Any:
    return tree_map(lambda leaf: leaf[index] if isinstance(leaf, Tensor) else leaf, tree)


OTHER_GRADIENTS = (
    "backward came to other gradients for the same micro-batch, asked twice: a hook or a function "
    "of the network keeps state that no checkpoint and no other worker has"
)


@dataclass(frozen=True)
class InEvaluation:
    carried: list[str]
    """Attributes of modules that an evaluation carries over to what follows."""
    repeats: bool
    """Whether the same sample gave the same outputs a second time."""


@dataclass(frozen=True)
class Inventory:
    kinds: Kinds
    changes: Changes
    carried: list[str]
    """Attributes of modules that forward carries over to the next micro-batch."""
    repeats: bool
    """Whether the same micro-batch gave the same loss a second time."""
    loss: str
    evaluated: InEvaluation
    asked: list[str]
    """Variables and functions by which forward asks for the number of ranks."""
    leaves_out: bool
    """Whether the loss leaves out labels of the first micro-batch and still counts them."""

    @property
    def doubts(self) -> list[str]:
        reasons = doubts_of_world("forward", self.asked)
        carried = list(dict.fromkeys([*self.carried, *self.evaluated.carried]))
        if carried:
            reasons.append(
                f"forward carries over {some_of(carried)}, which are neither parameters nor "
                "buffers: no checkpoint and no other worker has them; register_buffer, or "
                "get_extra_state and set_extra_state"
                + (
                    ", in the network, which gives the loss what it needs"
                    if any(path.startswith("loss.") for path in carried)
                    else ""
                )
            )
        if not self.evaluated.repeats:
            reasons.append(
                "the network came to other outputs for the same sample in evaluation, asked twice: "
                "other workers may get other metrics"
            )
        if not self.repeats:
            reasons.append(
                "the network came to another loss for the same micro-batch, asked twice: it draws "
                "from its own generator, or keeps state that is not seen"
            )
        return reasons

    @property
    def notes(self) -> list[str]:
        """Lines about state that is handled in a way people may not expect."""
        kinds, changes, notes = self.kinds, self.changes, list[str]()
        if kinds.in_evaluation:
            notes.append(
                "warning: the network is in evaluation mode, and is trained so: no dropout, and "
                "BatchNorm keeps its statistics; if that is not meant, call train() where it is "
                "made"
            )
        if kinds.extra:
            notes.append(
                f"extra state of {some_of(kinds.extra)}: kept as the first micro-batch of a step "
                "leaves it"
            )
        if changes.frozen:
            notes.append(
                f"forward changes {some_of(changes.frozen)}, not trained: averaged over a step's "
                "micro-batches, as buffers are"
            )
        for name, rows in changes.in_places.items():
            notes.append(
                f"warning: forward writes {rows} of the buffer {name}, and a step averages what "
                "its micro-batches write: a memory of samples is not filled as by one process, "
                "unless micro_batch_size is global_batch_size"
            )
        for name, step in changes.steps.items():
            notes.append(
                f"warning: forward moves the buffer {name} by {step}, once a step, as the first "
                "micro-batch does"
            )
        if self.leaves_out:
            notes.append(
                "warning: labels of ignore_index count in the mean of the loss, each as 0; torch "
                "divides by the other labels of a batch alone (docs/reference/promise.md)"
            )
        if self.loss not in (MEAN, WHOLE):
            notes.append(f"the loss: {self.loss}; expected the mean of the samples")
        if self.loss == WHOLE:
            notes.append(
                "the loss is one of each micro-batch as a whole: train.micro_batch_size decides "
                "it, as it decides BatchNorm"
            )
        return notes

    @property
    def lines(self) -> list[str]:
        kinds = self.kinds
        lines = [
            f"parameters: {len(kinds.trained)} trained, {len(kinds.frozen)} not"
            + (f", {len(kinds.shared)} of several names" if kinds.shared else ""),
            f"buffers: {len(kinds.averaged)} averaged over a step's micro-batches, "
            f"{len(kinds.counted)} of whole numbers, as the first micro-batch leaves them",
            f"random numbers: {', '.join(self.changes.draws) or 'none'}"
            + (", seeded for each micro-batch" if self.changes.draws else ""),
            f"loss: {self.loss}",
        ]
        return [*lines, *self.notes, *(f"warning: {doubt}" for doubt in self.doubts)]

    @property
    def row(self) -> dict[str, Any]:
        kinds = self.kinds
        return {
            "trained": len(kinds.trained),
            "frozen": len(kinds.frozen),
            "shared": kinds.shared,
            "buffers_averaged": len(kinds.averaged),
            "buffers_counted": len(kinds.counted),
            "extra_state": kinds.extra,
            "carried_over": self.carried,
            "evaluation_carries_over": self.evaluated.carried,
            "evaluation_repeats": self.evaluated.repeats,
            "asks_for_ranks": self.asked,
            "repeats": self.repeats,
            "loss": self.loss,
            **{f"forward_{name}": value for name, value in asdict(self.changes).items()},
        }


def doubts_of_network(
    inventory: Inventory | None, carried: Sequence[str], repeats: bool
) -> list[str]:
    """Return why another number of workers may not give the same bits.

    Args:
        inventory: What forward showed; None of a network in parts, whose attributes do not count.
        carried: The attributes that forward and backward together carry over.
        repeats: Whether backward gave the same gradients a second time.
    """
    doubts = [] if inventory is None else list(inventory.doubts)
    by_backward = [] if inventory is None else [p for p in carried if p not in inventory.carried]
    if by_backward:
        doubts.append(
            f"backward carries over {some_of(by_backward)}, in a hook or a function of the "
            "network: no checkpoint and no other worker has it"
        )
    elif not repeats and (inventory is None or inventory.repeats):
        doubts.append(OTHER_GRADIENTS)
    return doubts
