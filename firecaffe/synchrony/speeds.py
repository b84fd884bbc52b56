"""How long a simulated learner takes for a micro-batch: a function of (seed, learner, count).

Nothing is drawn from a generator with a state, so a resumed run needs none.
"""

import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Annotated, TypedDict

from msgspec import Meta

from firecaffe.errors import RecipeError
from firecaffe.schema import read_rows
from firecaffe.synchrony.config import SynchronyConfig

Seconds = Callable[[int, int], float]
"""(learner, the number of leaves that it had before) to the time of its next one."""

SLOW = 0
"""The slow learner of one_slow."""

MOST_MEASURED = 1_000_000
"""Times of a file that are read at most."""

LONGEST_S = 1e6
"""What a micro-batch may have taken at most; a clock adds these up."""


class _Row(TypedDict):
    """A line of that file."""

    compute_s: Annotated[float, Meta(gt=0, le=LONGEST_S)]


def seconds_of(config: SynchronyConfig, seed: int) -> Seconds:
    """The speeds of a recipe. Their mean is 1, but for measured ones, which are seconds.

    gamma: a shape of 1 / spread². Source: Ali et al. 2000, "Representing task and machine
    heterogeneities for heterogeneous computing systems" (the coefficient of variation method).

    Raises: RecipeError if the file of measured steps cannot be read.
    """
    if config.speeds == "gamma":
        scale = config.spread**2
        return lambda *key: _drawn(seed, *key).gammavariate(1 / scale, scale)
    if config.speeds == "one_slow":
        return lambda learner, _: config.slow_factor if learner == SLOW else 1.0
    if config.speeds == "measured":
        times = measured(Path(config.speeds_from))
        return lambda *key: times[int(_drawn(seed, *key).random() * len(times))]
    return lambda *_: 1.0


def _drawn(seed: int, learner: int, count: int) -> random.Random:
    return random.Random(f"speeds {seed} {learner} {count}")


def measured(path: Path) -> list[float]:
    """The times of a run's timings, `compute_s` of each line. Raises: RecipeError."""
    rows = read_rows(path, _Row, RecipeError)
    try:
        times = [row["compute_s"] for row in islice(rows, MOST_MEASURED)]
    except RecipeError as error:
        raise RecipeError(
            f"synchrony.speeds_from {error}; it must be the timings of a run, which have compute_s "
            "on each line"
        ) from error
    if not times:
        found = "no line of it is whole" if path.exists() else "No such file"
        raise RecipeError(f"synchrony.speeds_from {path}: {found}")
    return times
