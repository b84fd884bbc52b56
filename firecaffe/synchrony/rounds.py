"""When replicas are averaged in mode local: a function of the recipe and its rates alone.

A *round* is the steps between two averages of the same parameters. After its last step, workers
send the replicas' differences, and the average is applied `overlap_steps` later. Until then it is
*under way*, and no other is. Right after, the state is *whole*: it is saved and evaluated then.

Parameters are averaged in F *fragments*. In a *cycle* of H steps, fragment f, from 0, is averaged
after step (f + 1) H / F, rounded down. The last step of the training averages all. By the quadratic
synchronization rule, a low rate makes cycles longer: H = max(local_steps, floor((c / rate)^2)),
with the growth coefficient c. While the rate rises, the highest rate still to come counts.

Source: Stich 2019 (local SGD); Lin et al. 2020 (synchronous steps first); Gu et al. 2024 (the
quadratic rule; section 2 on the warm-up); Douillard et al. 2025 (Streaming DiLoCo: fragments,
overlap). Titles: docs/explanation/synchrony.md.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from firecaffe.errors import RecipeError
from firecaffe.synchrony.config import SynchronyConfig


@dataclass(frozen=True, slots=True)
class Round:
    """Steps `first` to `stop` - 1, counted from 0, of a fragment."""

    fragment: int
    first: int
    stop: int
    """The number of steps that are done when replicas are compared."""
    applied: int
    """The number of steps that are done when their average is applied."""

    @property
    def steps(self) -> int:
        return self.stop - self.first


class Rounds:
    def __init__(self, synchronous: int, rounds: Sequence[Round] = (), fragments: int = 1) -> None:
        """Begin after `synchronous` steps, with rounds in the order in which they are averaged."""
        self.synchronous = synchronous
        self.fragments = fragments
        self._rounds = list(rounds)
        self._stops = [planned.stop for planned in self._rounds]
        self._applied = [planned.applied for planned in self._rounds]

    @property
    def longest_gap(self) -> int:
        """The most steps between two averages of any fragments; 0 if there is no average."""
        taken_after = [self.synchronous, *self._stops]
        return max((after - before for before, after in pairwise(taken_after)), default=0)

    @property
    def mean_cycle(self) -> int:
        # The last fragment's rounds are the cycles.
        steps = [
            planned.steps for planned in self._rounds if planned.fragment == self.fragments - 1
        ]
        return round(sum(steps) / len(steps)) if steps else 1

    def averages(self, done: int) -> int:
        return bisect_right(self._applied, done)

    def taken(self, done: int) -> Sequence[Round]:
        """Return the rounds averaged after so many steps; at the end, those of all fragments."""
        return self._rounds[bisect_left(self._stops, done) : bisect_right(self._stops, done)]

    def are_together(self, done: int) -> bool:
        """Whether replicas have the weights of one average of all fragments after so many steps."""
        taken = self.taken(done)
        is_joined = len(taken) == self.fragments and all(
            planned.applied == done for planned in taken
        )
        return done <= self.synchronous or is_joined

    def is_whole(self, done: int) -> bool:
        place = bisect_left(self._applied, done)
        return done <= self.synchronous or self._applied[place : place + 1] == [done]

    def last_whole(self, done: int) -> int:
        """Return the largest number of steps below `done` after which the state is whole."""
        if done <= self.synchronous + 1:
            return done - 1
        place = bisect_left(self._applied, done)
        return self._applied[place - 1] if place else self.synchronous


def plan_rounds(
    words: SynchronyConfig, synchronous: int, steps: int, rate: Callable[[int], float]
) -> Rounds:
    """Plan all rounds. Each fragment's last one ends with the training and is applied at once.

    `synchronous` is the number of steps before the first round; `rate` maps a step, from 0.
    """
    highest = _highest_to_come(rate, steps) if words.growth_coefficient else []
    fragments = range(words.fragments)
    stops, cycle = list[tuple[int, int]](), synchronous  # (fragment, last step)
    while cycle < steps:
        length = float(words.local_steps)
        if highest:
            length = max(length, _grown(words.growth_coefficient, highest[cycle]))
        # A cycle of this length averages no fragment before the training's end.
        length = int(min(length, steps * words.fragments))
        parts = [
            (fragment, cycle + length * (fragment + 1) // words.fragments) for fragment in fragments
        ]
        stops += [(fragment, stop) for fragment, stop in parts if stop < steps]
        cycle += length
    if synchronous < steps:
        stops += [(fragment, steps) for fragment in fragments]
    rounds, firsts = list[Round](), [synchronous] * words.fragments
    for fragment, stop in stops:
        applied = min(steps, stop + words.overlap_steps)
        rounds.append(Round(fragment, firsts[fragment], stop, applied))
        firsts[fragment] = stop
    return Rounds(synchronous, rounds, words.fragments)


def _grown(coefficient: float, rate: float) -> float:
    return (coefficient / rate) ** 2 // 1 if rate else float("inf")


def _highest_to_come(rate: Callable[[int], float], steps: int) -> list[float]:
    from_last = accumulate(map(rate, reversed(range(steps))), max)
    return list(from_last)[::-1]


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Return the places of each fragment's parameters. Raises: RecipeError if there are too few."""
    if fragments > len(sizes):
        raise RecipeError(
            f"synchrony.fragments is {fragments}, but the network has {len(sizes)} parameters that "
            "are trained; each fragment has one at least"
        )
    # The largest parameter goes first, to the fragment with the fewest elements: about equal
    # fragments with parameters of all depths. Source: Douillard et al. 2025; Graham 1969, "Bounds
    # on multiprocessing timing anomalies" (the largest first: 4/3 of the best at most).
    by_fragment = [list[int]() for _ in range(fragments)]
    held = [0] * fragments
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        # Of equal fragments, take that with the fewest parameters, so that none stays empty.
        lightest = min(
            range(fragments), key=lambda number: (held[number], len(by_fragment[number]))
        )
        by_fragment[lightest].append(place)
        held[lightest] += sizes[place]
    return [sorted(places) for places in by_fragment]
