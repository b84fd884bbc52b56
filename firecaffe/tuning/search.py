"""The search: the rules' candidates in their order, the hopeless given up early.

Candidates are trained in rounds of as many as run side by side, and judged against finished rounds
alone. So the search is a pure function of the recipe, the budget and the width: begun again after a
fault, it asks for the same candidates and finds the runs that are there.

Each candidate trains on what is left of the training set without a held-out part, the recipe's own
or a tenth, and is judged on that part: no test image takes part in the choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean, median

from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.runs.measure import TOP1, Measure
from firecaffe.training.trial import Trial, TrialScore
from firecaffe.tuning.candidates import Candidate, apply, rules

HELD_OUT = 0.1
"""Share of the training samples that candidates are judged on, if the recipe holds out none."""

TESTS_OF_A_TRIAL = 8
"""Tests in the course of a candidate's training, at which it may be given up."""

LEAST_TESTS = 3
"""Tests before which, and finished candidates with fewer than which, none is given up: a small rate
is ahead at first.
"""

FINALISTS, SEEDS_OF_FINALISTS = 3, 1
"""How many of the best are trained again, under how many seeds more: one seed may flatter."""

LATE_SHARE = 3 / 4
"""Share of a training after which its tests count, by their mean: a rate that is still large leaves
the last step's accuracy half a point of noise.
"""

SAME = 0.0025
"""What two seeds do not tell apart, where a rate that diverges under a third costs it all: of a
share; of another metric as a part of the best value.
"""

MOST_AT_ONCE = 4
"""Candidates of a round, however many could be trained side by side: what is asked for together
learns nothing from each other.
"""

Run = Callable[[Sequence[Trial]], None]
"""Trains some trials side by side; each is told to its `end` meanwhile."""


@dataclass(frozen=True)
class CandidateResult:
    """A candidate, and what became of it."""

    candidate: Candidate
    folder: Path
    state: str
    """finished, given up or diverged."""
    steps: int
    """Steps after which it was judged."""
    value: float
    """The task's metric on the held-out samples then; the mean over the last quarter of a finished
    training.
    """
    again: tuple[float, ...] = ()
    """The same of a finalist's trainings under other seeds."""

    @property
    def mean_value(self) -> float:
        return fmean((self.value, *self.again))


@dataclass(frozen=True)
class Search:
    """What to search: `recipe` is at the new batch with the rate of the previous one."""

    recipe: Recipe
    previous_batch: int
    steps: int
    """Steps of a whole training at the new batch."""
    solvers: Sequence[str]
    budget: float
    """Whole trainings that the candidates may cost together."""
    at_once: int
    parent: Path
    measure: Measure = TOP1
    """The metric that candidates are judged by."""

    def trial_recipe(self, candidate: Candidate) -> Recipe:
        """A candidate's training, with tests on held-out samples on its way, to the end: others are
        compared with it at each.
        """
        recipe = apply(self.recipe, candidate, self.steps)
        eval_every = -(-self.steps // TESTS_OF_A_TRIAL)
        train = replace(
            recipe.train, steps=self.steps, epochs=0, eval_every=eval_every, stop_after=0
        )
        data = replace(recipe.data, hold_out=recipe.data.hold_out or HELD_OUT, order="samples")
        checkpoint = replace(recipe.checkpoint, every=0, every_s=0.0, keep_last=1)
        return replace(recipe, train=train, data=data, checkpoint=checkpoint)

    def run(self, train: Run) -> list[CandidateResult]:
        """Tries candidates and returns them in the order in which they were asked for, the
        finalists with all their seeds.

        Raises: RecipeError if all diverged; what `train` raises.
        """
        found = self._candidates(train)
        gain = self.measure.gain
        finished = [place for place, each in enumerate(found) if each.state == "finished"]
        if not finished:
            raise RecipeError(
                f"none of {len(found)} candidates came to its end; take a smaller batch, a longer "
                "training, or a recipe that learns at its own batch size"
            )
        finalists = sorted(finished, key=lambda place: -gain(found[place].value))[:FINALISTS]
        trials = {place: self._again(found[place].candidate, place) for place in finalists}
        train([trial for several in trials.values() for trial in several])
        for place, several in trials.items():
            again = tuple(late_value(trial.told) for trial in several)
            found[place] = replace(found[place], again=again)
        return found

    def _again(self, candidate: Candidate, place: int) -> list[Trial]:
        recipe = self.trial_recipe(candidate)
        found = []
        for number in range(1, SEEDS_OF_FINALISTS + 1):
            seed = recipe.train.seed + number
            other = replace(recipe, train=replace(recipe.train, seed=seed))
            name = f"candidate-{place + 1:02d}-seed-{seed}"
            found.append(Trial(name, other, self.parent, self.measure))
        return found

    def _candidates(self, train: Run) -> list[CandidateResult]:
        """The rules' candidates, until the budget is spent or all are tried."""
        left = self.rules()
        found: list[CandidateResult] = []
        finished: list[Sequence[TrialScore]] = []
        while left and sum(each.steps for each in found) < self.budget * self.steps:
            asked, left = left[: self.width], left[self.width :]
            hopeless = partial(is_hopeless, finished=tuple(finished), measure=self.measure)
            trials = [
                self._trial(f"candidate-{number:02d}", each, hopeless)
                for number, each in enumerate(asked, start=len(found) + 1)
            ]
            train(trials)
            found += [_searched(*each) for each in zip(asked, trials, strict=True)]
            finished += [trial.told for trial in trials if _state(trial) == "finished"]
        return found

    def _trial(
        self, name: str, candidate: Candidate, end: Callable[[Sequence[TrialScore]], bool]
    ) -> Trial:
        return Trial(name, self.trial_recipe(candidate), self.parent, self.measure, end)

    @property
    def width(self) -> int:
        return min(self.at_once, MOST_AT_ONCE)

    @property
    def most_candidates(self) -> int:
        """Whole trainings that the candidates cost at most: the budget may run out in a round."""
        return min(len(self.rules()), ceil(self.budget) + self.width - 1)

    def rules(self) -> list[Candidate]:
        """What is tried first. Raises: RecipeError if a solver has none."""
        return rules(self.recipe, self.previous_batch, self.solvers)


def ranked(found: Sequence[CandidateResult], measure: Measure = TOP1) -> list[CandidateResult]:
    """The finalists, best first: of those whose mean value is within SAME of the best the safest,
    which is one with a warm-up, then the one with the smallest rate.
    """
    left = [each for each in found if each.again]
    order = []
    while left:
        best = max(measure.gain(each.mean_value) for each in left)
        same = SAME if measure.is_share else SAME * abs(best)
        near = [each for each in left if measure.gain(each.mean_value) >= best - same]
        order.append(
            min(near, key=lambda each: (each.candidate.warmup_share == 0, each.candidate.base_lr))
        )
        left.remove(order[-1])
    return order


def late_value(scores: Sequence[TrialScore]) -> float:
    """The mean over the tests of the last quarter of a training that has come to its end."""
    return fmean(each.value for each in scores if each.step >= LATE_SHARE * scores[-1].step)


def is_hopeless(
    scores: Sequence[TrialScore],
    finished: Sequence[Sequence[TrialScore]],
    measure: Measure = TOP1,
) -> bool:
    """Whether a training is to be given up: it has diverged; or LEAST_TESTS evaluations on, its
    best is below the median that as many finished ones had at this step.
    """
    last = scores[-1]
    if not last.is_finite:
        return True
    if len(scores) < LEAST_TESTS or len(finished) < LEAST_TESTS:
        return False
    gain = measure.gain
    then = [gain(each.value) for of_one in finished for each in of_one if each.step == last.step]
    return bool(then) and max(gain(each.value) for each in scores) < median(then)


def _state(trial: Trial) -> str:
    if not trial.told[-1].is_finite:
        return "diverged"
    return "given up" if trial.ended_early else "finished"


def _searched(candidate: Candidate, trial: Trial) -> CandidateResult:
    last, state = trial.told[-1], _state(trial)
    value = late_value(trial.told) if state == "finished" else last.value
    return CandidateResult(candidate, trial.folder, state, last.step, value)
