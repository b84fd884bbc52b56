"""The search: the rules' candidates first, then what optuna suggests, the hopeless given up early.

Candidates are asked for in rounds of as many as are trained side by side, and judged against
finished rounds alone. So the search is a pure function of the recipe, the budget and the width:
begun again after a fault, it asks for the same candidates and finds the runs that are there.

Each candidate trains on what is left of the training set without a held-out part, and is judged on
that part: no test image takes part in the choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import optuna
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from firecaffe.errors import RecipeError
from firecaffe.recipe import Recipe
from firecaffe.tuning.candidates import Candidate, apply, rules
from firecaffe.tuning.trial import Score, Trial

HELD_OUT = 0.1
"""Share of the training images that candidates are judged on."""

TESTS = 8
"""In the course of a candidate's training: where it may be given up."""

PATIENCE = 3
"""Tests before which, and finished candidates with fewer than which, none is given up: a small rate
is ahead at first.
"""

FINALISTS, SEEDS_OF_FINALISTS = 3, 1
"""How many of the best are trained again, under how many seeds more: one seed may flatter."""

LATE = 3 / 4
"""From where in a training its tests count: their mean, for a rate that is still large leaves the
last step's accuracy half a point of noise.
"""

TIE = 0.0025
"""Top-1 that two seeds do not tell apart, where a rate that diverges under a third costs it all."""

MOST_AT_ONCE = 4
"""Candidates of a round, however many could be trained side by side: what is asked for together
learns nothing from each other.
"""

Run = Callable[[Sequence[Trial]], None]
"""Trains some trials side by side; each is told to its `end` meanwhile."""


@dataclass(frozen=True)
class Searched:
    """A candidate, and what became of it."""

    candidate: Candidate
    folder: Path
    state: str
    """finished, given up or diverged."""
    steps: int
    """That it was judged after."""
    top1: float
    """On the held-out images, then; of finished ones the mean over the training's last quarter."""
    again: tuple[float, ...] = ()
    """Likewise, under other seeds: of finalists."""

    @property
    def mean_top1(self) -> float:
        return fmean((self.top1, *self.again))


@dataclass(frozen=True)
class Search:
    """What to search: `recipe` is at the new batch with the rate of the previous one."""

    recipe: Recipe
    previous_batch: int
    steps: int
    """Of a whole training at the new batch."""
    solvers: Sequence[str]
    budget: float
    """Whole trainings that the candidates may cost together."""
    at_once: int
    parent: Path

    def trial_recipe(self, candidate: Candidate) -> Recipe:
        """A candidate's training, with tests on held-out images on its way."""
        recipe = apply(self.recipe, candidate, self.steps)
        train = replace(recipe.train, steps=self.steps, eval_every=-(-self.steps // TESTS))
        data = replace(recipe.data, hold_out=HELD_OUT, order="samples")
        checkpoint = replace(recipe.checkpoint, every=0, every_s=0.0, keep_last=1)
        return replace(recipe, train=train, data=data, checkpoint=checkpoint)

    def run(self, train: Run) -> list[Searched]:
        """In the order in which candidates were asked for, the finalists with all their seeds.

        Raises: RecipeError where all diverged; what `train` raises.
        """
        found = self._candidates(train)
        finished = [place for place, each in enumerate(found) if each.state == "finished"]
        if not finished:
            raise RecipeError(
                f"none of {len(found)} candidates came to its end; take a smaller batch, a longer "
                "training, or a recipe that learns at its own batch size"
            )
        finalists = sorted(finished, key=lambda place: -found[place].top1)[:FINALISTS]
        trials = {place: self._again(found[place].candidate, place) for place in finalists}
        train([trial for several in trials.values() for trial in several])
        for place, several in trials.items():
            again = tuple(late_top1(trial.told) for trial in several)
            found[place] = replace(found[place], again=again)
        return found

    def _again(self, candidate: Candidate, place: int) -> list[Trial]:
        recipe = self.trial_recipe(candidate)
        found = []
        for number in range(1, SEEDS_OF_FINALISTS + 1):
            seed = recipe.train.seed + number
            other = replace(recipe, train=replace(recipe.train, seed=seed))
            found.append(Trial(f"candidate-{place + 1:02d}-seed-{seed}", other, self.parent))
        return found

    def _candidates(self, train: Run) -> list[Searched]:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        first = self.rules()
        study = optuna.create_study(
            direction="maximize",
            sampler=TPESampler(seed=self.recipe.train.seed, n_startup_trials=len(first)),
            pruner=MedianPruner(PATIENCE, -(-self.steps // TESTS) * PATIENCE),
        )
        for candidate in first:
            study.enqueue_trial(
                {
                    "solver": candidate.solver,
                    "warmup_share": candidate.warmup_share,
                    f"rate_{candidate.solver}": candidate.base_lr,
                }
            )
        found: list[Searched] = []
        spent = 0.0
        while spent < self.budget:
            asked = [
                _Asked(study, self, number, first)
                for number in range(len(found), len(found) + min(self.at_once, MOST_AT_ONCE))
            ]
            train([each.trial for each in asked])
            for each in asked:
                found.append(each.tell())
                spent += found[-1].steps / self.steps
        return found

    def rules(self) -> list[Candidate]:
        """What is tried first. Raises: RecipeError where a solver has none."""
        return rules(self.recipe, self.previous_batch, self.solvers)


def ranked(found: Sequence[Searched]) -> list[Searched]:
    """The finalists, best first: of those whose mean accuracy is within TIE of the highest the
    safest, which is one with a warm-up, then the one with the smallest rate.
    """
    left = [each for each in found if each.again]
    order = []
    while left:
        highest = max(each.mean_top1 for each in left)
        near = [each for each in left if each.mean_top1 >= highest - TIE]
        order.append(
            min(near, key=lambda each: (each.candidate.warmup_share == 0, each.candidate.base_lr))
        )
        left.remove(order[-1])
    return order


def late_top1(scores: Sequence[Score]) -> float:
    """The mean over the tests of the last quarter of a training that has come to its end."""
    return fmean(each.top1 for each in scores if each.step >= LATE * scores[-1].step)


class _Asked:
    """A candidate that optuna was asked for, on its way."""

    def __init__(
        self, study: optuna.Study, search: Search, number: int, first: Sequence[Candidate]
    ) -> None:
        self._study = study
        self._trial = study.ask()
        self._reported: set[int] = set()
        self._diverged = False
        suggested = self._suggest(search, first)
        self.candidate = first[number] if number < len(first) else suggested
        name = f"candidate-{number + 1:02d}"
        self.trial = Trial(name, search.trial_recipe(self.candidate), search.parent, self._end)

    def _suggest(self, search: Search, first: Sequence[Candidate]) -> Candidate:
        """From half a solver's smallest rule to its largest. Of a solver's rate optuna knows only
        what that solver's own trials came to.
        """
        solver = self._trial.suggest_categorical("solver", list(search.solvers))
        shares = sorted({each.warmup_share for each in first})
        share = self._trial.suggest_categorical("warmup_share", shares)
        rates = [each.base_lr for each in first if each.solver == solver]
        rate = self._trial.suggest_float(f"rate_{solver}", min(rates) / 2, max(rates), log=True)
        return Candidate(solver, float(f"{rate:.3g}"), share, "suggested")

    def _end(self, scores: Sequence[Score]) -> bool:
        last = scores[-1]
        if not last.is_finite:
            self._diverged = True
            return True
        if last.step not in self._reported:
            self._reported.add(last.step)
            self._trial.report(last.top1, last.step)
        return self._trial.should_prune()

    def tell(self) -> Searched:
        last = self.trial.told[-1]
        top1 = last.top1
        if self.trial.ended_early or not last.is_finite:
            state = "diverged" if self._diverged or not last.is_finite else "given up"
            self._study.tell(self._trial, state=TrialState.PRUNED)
        else:
            state, top1 = "finished", late_top1(self.trial.told)
            self._study.tell(self._trial, top1)
        return Searched(self.candidate, self.trial.folder, state, last.step, top1)
