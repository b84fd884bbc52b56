"""When replicas are averaged, in mode local: a function of the recipe's words and its rates alone.

A *round* is the steps between two averages. After its last step the replicas' differences leave for
the other workers; `overlap_steps` later, or at once, their average is applied. In between it is
*under way*. After steps at which nothing is under way, or has to be averaged, the state is *whole*:
what is saved and evaluated then is the average.

By the quadratic synchronization rule rounds are longer if the rate is low: H = max(local_steps,
floor((c / rate)^2)), c being the growth coefficient. As long as the rate rises, that of its highest
point counts, which is still to come.

Source: Stich 2019 (local SGD); Lin et al. 2020 (synchronous steps first); Gu et al. 2024, "A
quadratic synchronization rule for distributed deep learning", with section 2 on the warm-up.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from firecaffe.synchrony.config import SynchronyConfig


@dataclass(frozen=True, slots=True)
class Round:
    """Steps `first` to `stop` - 1, counted from 0."""

    first: int
    stop: int
    """The number of steps that are done when replicas are compared."""
    applied: int
    """The number of steps that are done when their average is applied."""

    @property
    def steps(self) -> int:
        return self.stop - self.first


class Rounds:
    """The rounds of a training, which follow its synchronous steps."""

    def __init__(self, synchronous: int, rounds: Sequence[Round] = ()) -> None:
        """synchronous: the number of steps before the first round."""
        self.synchronous = synchronous
        self._rounds = list(rounds)
        self._firsts = [each.first for each in self._rounds]
        self._applied = [each.applied for each in self._rounds]

    @property
    def longest(self) -> int:
        """The number of steps of the longest round; 0 if there is none."""
        return max((each.steps for each in self._rounds), default=0)

    @property
    def mean(self) -> int:
        """The number of steps of a round, the mean; 1 if there is none."""
        steps = sum(each.steps for each in self._rounds)
        return round(steps / len(self._rounds)) if self._rounds else 1

    def averages(self, done: int) -> int:
        """The number of averages that are applied after so many steps."""
        return bisect_right(self._applied, done)

    def of(self, step: int) -> Round:
        """The round of a step, counted from 0. Raises: ValueError if it is synchronous."""
        place = bisect_right(self._firsts, step) - 1
        if place < 0:
            raise ValueError(f"step {step} is in no round; the first is {self.synchronous}")
        return self._rounds[place]

    def is_whole(self, done: int) -> bool:
        """Whether the state is whole after so many steps."""
        place = bisect_left(self._applied, done)
        return done <= self.synchronous or self._applied[place : place + 1] == [done]

    def last_whole(self, done: int) -> int:
        """The largest number of steps below `done` after which the state is whole."""
        if done <= self.synchronous + 1:
            return done - 1
        place = bisect_left(self._applied, done)
        return self._applied[place - 1] if place else self.synchronous


def plan_rounds(
    words: SynchronyConfig, synchronous: int, steps: int, rate: Callable[[int], float]
) -> Rounds:
    """The rounds of a training of so many steps. The last one ends with it, and is applied at once.

    synchronous: the number of steps before the first round. rate: of a step, counted from 0.
    """
    highest = _highest_to_come(rate, steps) if words.growth_coefficient else []
    rounds, first = list[Round](), synchronous
    while first < steps:
        length = float(words.local_steps)
        if highest:
            length = max(length, _grown(words.growth_coefficient, highest[first]))
        stop = int(min(steps, first + length))
        rounds.append(Round(first, stop, min(steps, stop + words.overlap_steps)))
        first = stop
    return Rounds(synchronous, rounds)


def _grown(coefficient: float, rate: float) -> float:
    return (coefficient / rate) ** 2 // 1 if rate else float("inf")


def _highest_to_come(rate: Callable[[int], float], steps: int) -> list[float]:
    """The highest rate of each step and all after it."""
    from_last = accumulate(map(rate, reversed(range(steps))), max)
    return list(from_last)[::-1]
