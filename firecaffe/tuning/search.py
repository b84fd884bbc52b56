"""Searches among the rules' candidates in their order, and gives up hopeless ones early.

Candidates are judged only against finished rounds. So the search depends only on the recipe, the
budget and the width, and after a fault it reuses the runs that exist. Each candidate is judged on a
held-out part of the training set: no test image takes part in the choice.
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
"""The share of training samples that candidates are judged on, if the recipe holds out none."""

TESTS_OF_A_TRIAL = 8

LEAST_TESTS = 3
"""Tests, and finished candidates, before one is given up; small rates are ahead at first."""

FINALISTS, SEEDS_OF_FINALISTS = 3, 1
"""Number of best candidates to train again, and of their further seeds, as one seed may flatter."""

LATE_SHARE = 3 / 4
"""Tests count after this share of a training; their mean is less noisy than the last one."""

SAME = 0.0025
"""Difference that two seeds do not tell apart: of shares absolute, of other metrics relative."""

MOST_AT_ONCE = 4
"""Most candidates of a round, because candidates of one round learn nothing from each other."""

Run = Callable[[Sequence[Trial]], None]
"""Trains some trials side by side, and reports each one's scores to its `end` meanwhile."""


@dataclass(frozen=True)
class CandidateResult:
    candidate: Candidate
    folder: Path
    state: str
    """finished, given up or diverged."""
    steps: int
    value: float
    """The metric on the held-out samples; of a finished training the mean over its last quarter."""
    again: tuple[float, ...] = ()

    @property
    def mean_value(self) -> float:
        return fmean((self.value, *self.again))


@dataclass(frozen=True)
class Search:
    """A search to run; `recipe` is at the new batch size with the rate of the previous one."""

    recipe: Recipe
    previous_batch: int
    steps: int
    solvers: Sequence[str]
    budget: float
    """The cost allowed for all candidates together, in whole trainings."""
    at_once: int
    parent: Path
    measure: Measure = TOP1

    def trial_recipe(self, candidate: Candidate) -> Recipe:
        recipe = apply(self.recipe, candidate, self.steps)
        eval_every = -(-self.steps // TESTS_OF_A_TRIAL)
        train = replace(
            recipe.train, steps=self.steps, epochs=0, eval_every=eval_every, stop_after=0
        )
        data = replace(recipe.data, hold_out=recipe.data.hold_out or HELD_OUT, order="samples")
        checkpoint = replace(recipe.checkpoint, every=0, every_s=0.0, keep_last=1)
        return replace(recipe, train=train, data=data, checkpoint=checkpoint)

    def run(self, train: Run) -> list[CandidateResult]:
        """Try candidates, and the finalists with all seeds. Raises: RecipeError if all diverged."""
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
        """The most whole trainings that candidates cost; the budget may end within a round."""
        return min(len(self.rules()), ceil(self.budget) + self.width - 1)

    def rules(self) -> list[Candidate]:
        return rules(self.recipe, self.previous_batch, self.solvers)


def ranked(found: Sequence[CandidateResult], measure: Measure = TOP1) -> list[CandidateResult]:
    """Rank finalists; within SAME of the best, those with a warm-up and a low rate come first."""
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
    return fmean(each.value for each in scores if each.step >= LATE_SHARE * scores[-1].step)


def is_hopeless(
    scores: Sequence[TrialScore],
    finished: Sequence[Sequence[TrialScore]],
    measure: Measure = TOP1,
) -> bool:
    """Whether a training diverged, or its best is below the finished ones' median at this step."""
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
