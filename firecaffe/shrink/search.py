"""What size to try next: a pure function of what finished attempts came to.

So it needs no state of its own: begun again, it asks for the same sizes, and finds their trainings.
An attempt is judged on held-out training samples alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from firecaffe.compression.transfer import BYTES_PER_WEIGHT
from firecaffe.shrink.target import Target

MOST_ATTEMPTS_OF_SIZE = 3
MOST_ATTEMPTS_OF_LOSS = 6

CLOSE = 0.95
"""A file of so much of the size that it may have is large enough."""

MARGIN = 0.99
"""What is aimed at of a size that was missed, so that the next is not missed by a byte."""

FIRST_RATIO, STEP = 20.0, 2.0
"""The ratio that is tried first for a loss, and by what it grows as long as that is kept."""

FINE = 1.12
"""Ratios that are nearer to each other than this are not told apart further."""

ROUNDING = 1e-9


@dataclass(frozen=True)
class Attempt:
    """What one compression came to."""

    aim_bytes: float
    """The size that its layers were chosen for."""
    bytes: int
    """The file's size."""
    lost: float
    """What it lost on the held-out samples against the float network, in the unit of the target:
    points of a share. Below 0 it has gained.
    """


def next_aim(target: Target, attempts: Sequence[Attempt], weights: int) -> float | None:
    """The size in bytes to aim at next; None if there is nothing more to try."""
    by_kind = _aim_of_size if target.is_of_size else _aim_of_loss
    return by_kind(target, attempts, weights)


def _aim_of_size(target: Target, attempts: Sequence[Attempt], weights: int) -> float | None:
    wanted = target.most_bytes(weights)
    if not attempts:
        return wanted
    last = attempts[-1]
    is_met = CLOSE * wanted <= last.bytes <= wanted
    if is_met or len(attempts) == MOST_ATTEMPTS_OF_SIZE:
        return None
    return last.aim_bytes * wanted / last.bytes * MARGIN


def _aim_of_loss(target: Target, attempts: Sequence[Attempt], weights: int) -> float | None:
    whole = float(weights * BYTES_PER_WEIGHT)
    if not attempts:
        return whole / FIRST_RATIO
    if len(attempts) == MOST_ATTEMPTS_OF_LOSS:
        return None
    lost = [each.aim_bytes for each in attempts if not is_kept(target, each, weights)]
    largest_lost = max(lost, default=0.0)
    kept = [each.aim_bytes for each in attempts if is_kept(target, each, weights)]
    if not lost:
        return min(kept) / STEP
    if not kept:
        return None if largest_lost * STEP >= whole else largest_lost * STEP
    if min(kept) / largest_lost < FINE:
        return None
    return sqrt(min(kept) * largest_lost)


def is_kept(target: Target, attempt: Attempt, weights: int) -> bool:
    """Whether an attempt reaches the target."""
    if target.is_of_size:
        return attempt.bytes <= target.most_bytes(weights)
    return attempt.lost <= target.value + ROUNDING


def best_of(target: Target, attempts: Sequence[Attempt], weights: int) -> tuple[int, bool]:
    """The place of the attempt that is taken, and whether it reaches the target. Of a size: the one
    that lost least; of a loss: the smallest. If none reaches it, the nearest.
    """
    places = range(len(attempts))
    reaching = [place for place in places if is_kept(target, attempts[place], weights)]
    if target.is_of_size:
        if reaching:
            return min(reaching, key=lambda place: attempts[place].lost), True
        return min(places, key=lambda place: attempts[place].bytes), False
    if reaching:
        return min(reaching, key=lambda place: attempts[place].bytes), True
    return min(places, key=lambda place: attempts[place].lost), False
