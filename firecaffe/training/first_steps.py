"""Hands the timings of a training's first steps to who wants them, once."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from firecaffe.training.times import Timings

FIRST = 20
WARM_UP = 4
"""Of the first steps, those that are left out: memory is allocated, and kernels are chosen."""

Use = Callable[[Sequence[dict[str, Any]]], str]
"""Takes rows of timings, and returns a line to say, or nothing."""


class FirstSteps:
    def __init__(self, steps: int, use: Use | None) -> None:
        # steps: those that follow. What is known after the last one is of no use.
        self._use = use if steps > FIRST else None
        self._rows: list[dict[str, Any]] = []

    def add(self, timings: Timings) -> None:
        if self._use is not None:
            self._rows.append(asdict(timings))

    def hand_over(self) -> str:
        """Hand the timings over if all are there, and return the line about them."""
        if self._use is None or len(self._rows) < FIRST:
            return ""
        use, self._use = self._use, None
        return use(self._rows[WARM_UP:FIRST])
