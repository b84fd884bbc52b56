"""Few cases in which each pair of values of any two axes stands, of those that can stand together.

Greedy, as AETG is (Cohen and others, The AETG System, 1997), and then thinned: some cases are taken
out and their pairs covered anew, which takes fewer, for as long as it may go on.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

Case = Mapping[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Left = dict[Pair, None]
"""Pairs that stand in no case yet, in an order."""

TRIED = 8
"""Cases that are grown for each that is taken."""

SEED, THINNINGS = 1, 60
"""Of `cover`: the chance, and how often cases are taken out and tried anew."""


@dataclass(frozen=True)
class Pairwise:
    """The axes of cases, and which values can stand together."""

    axes: Mapping[str, Sequence[Any]]
    is_possible: Callable[[Case], bool]
    """Of a case, what is not named taken as it is by default."""
    start: Callable[[Case], Case | None]
    """The case that a pair grows from, with what else it takes; None if it cannot stand."""
    full: Callable[[Case], Case]
    """A case with a value for each axis."""

    def all_pairs(self) -> list[Pair]:
        return [
            ((one, a), (other, b))
            for one, other in combinations(self.axes, 2)
            for a, b in product(self.axes[one], self.axes[other])
        ]

    def pairs_of(self, case: Case) -> Iterator[Pair]:
        return combinations([(name, case[name]) for name in self.axes if name in case], 2)

    def cover(self) -> list[Case]:
        """Cases in which each pair stands that any case can have."""
        chance = random.Random(SEED)
        pairs = self.all_pairs()
        starts = {pair: start for pair in pairs if (start := self.start(dict(pair))) is not None}
        cases = self._covering(starts, chance)
        for _ in range(THINNINGS):
            cases = self._thinned(cases, starts, chance)
        return cases

    def _covering(self, starts: Mapping[Pair, Case], chance: random.Random) -> list[Case]:
        """starts: the pairs, and what each may grow from."""
        left, cases = dict.fromkeys(starts), list[Case]()
        while left:
            start = starts[next(iter(left))]
            grown = (self._grown(start, left, chance) for _ in range(TRIED))
            best = max(grown, key=lambda case: self._gain(case, left))
            cases.append(best)
            for pair in self.pairs_of(best):
                left.pop(pair, None)
        return cases

    def _thinned(
        self, cases: list[Case], starts: Mapping[Pair, Case], chance: random.Random
    ) -> list[Case]:
        """No more of them: those that the fewest pairs need are tried anew."""
        counts = self._counts(cases)
        needed = [sum(counts[pair] == 1 for pair in self.pairs_of(case)) for case in cases]
        places = sorted(range(len(cases)), key=lambda i: needed[i] + chance.uniform(0, 2.5))
        few = set(places[: chance.randint(1, 6)])
        kept = [case for place, case in enumerate(cases) if place not in few]
        stands = self._counts(kept)
        lost = {p: cases[i] for i in few for p in self.pairs_of(cases[i]) if p not in stands}
        pairs = list(lost)
        chance.shuffle(pairs)
        # From the pair alone, for a case is full. What no pair begins stands in its case.
        again = self._covering({pair: starts.get(pair, lost[pair]) for pair in pairs}, chance)
        return [*kept, *again] if len(again) <= len(few) else cases

    def _counts(self, cases: Iterable[Case]) -> Counter[Pair]:
        return Counter(pair for case in cases for pair in self.pairs_of(case))

    def _gain(self, case: Case, left: Left) -> int:
        return sum(pair in left for pair in self.pairs_of(case))

    def _grown(self, start: Case, left: Left, chance: random.Random) -> Case:
        """A value for each axis, in any order: of the possible ones the one that pairs most."""
        case = start
        names = [name for name in self.axes if name not in case]
        chance.shuffle(names)
        for name in names:
            values = [v for v in self.axes[name] if self.is_possible({**case, name: v})]
            if not values:  # the default is not possible beside those that were chosen
                continue
            chance.shuffle(values)
            gains = {v: self._gain_of((name, v), case, left) for v in values}
            case = {**case, name: max(values, key=lambda v: gains[v])}
        return self.full(case)

    def _gain_of(self, value: tuple[str, Any], case: Case, left: Left) -> int:
        return sum((other, value) in left or (value, other) in left for other in case.items())
