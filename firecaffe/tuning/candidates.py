"""Searches for the learning rate at another batch size, among the candidates of published rules.

Rules: linear (Goyal et al. 2017), square root (Krizhevsky 2014, arXiv 1404.5997), and FireCaffe's
sweep from the linear rate to its 16th (Iandola et al. 2016, section 5.2). Layer-wise solvers start
from fixed rates.

Candidates come in the order of the rules, and hopeless ones end early, judged only against finished
rounds. So the search depends only on the recipe, the budget and the width, and reuses runs after a
fault. Each is judged on a held-out part of the training set: no test image takes part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

from firecaffe.data import SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe.refusals import check_together, is_refused
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option
from firecaffe.runs.measure import TOP1, Measure
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.optimizer import SOLVERS
from firecaffe.solvers.rate_policy import batch_scale
from firecaffe.training.trial import Trial, TrialScore

SWEEP = {
    "linear": 1.0,
    "linear / 2": 1 / 2,
    "linear / 4": 1 / 4,
    "linear / 8": 1 / 8,
    "linear / 16": 1 / 16,
}
ABOVE_SWEEP = {"linear x 2": 2.0}
"""A rate above the linear one, as an untuned base rate may be low; divergence costs little."""

OWN_SWEEP = {"its own": 1.0, "x 2": 2.0, "/ 2": 1 / 2, "x 4": 4.0, "/ 4": 1 / 4}

LAYER_WISE: dict[str, tuple[Callable[[int], float], dict[str, float]]] = {
    # Our choice: with a trust of 0.001 a step moves a layer by 1.6 % before momentum.
    "lars": (lambda _: 16.0, {rule.replace("linear", "lars"): by for rule, by in SWEEP.items()}),
    # ResNet-50's rate and batch, for the square-root rule (You et al. 2020, arXiv 1904.00962).
    "lamb": (
        lambda batch: 0.04 * sqrt(batch / 32_768),
        {"lamb": 1.0, "lamb x 4": 4.0, "lamb / 4": 1 / 4},
    ),
}
"""Rates of layer-wise solvers by the batch size, and the sweeps around them."""

WARMUP_SHARES = (0.15, 0.0)
"""Goyal's 5 of 90 epochs is too steep for few epochs."""


@dataclass(frozen=True)
class Candidate:
    solver: str
    base_lr: float
    warmup_share: float
    rule: str


def rules(recipe: Recipe, previous_batch: int, solvers: Sequence[str]) -> list[Candidate]:
    """List the candidates, best guesses first.

    recipe: at the new batch size, with the rate of the previous one. Raises: RecipeError if a
    solver does not exist, or the rest of the recipe excludes it.
    """
    candidates = [
        Candidate(solver, base * factor, share, rule)
        for solver in solvers
        for share in _shares(recipe)
        for base, sweep in [_sweep(recipe, previous_batch, solver)]
        for rule, factor in sweep.items()
    ]
    for candidate in candidates:
        check_together(apply(recipe, candidate, steps=1))
    unlike = {
        (candidate.solver, f"{candidate.base_lr:.6g}", candidate.warmup_share): candidate
        for candidate in candidates
    }
    return list(unlike.values())


def _shares(recipe: Recipe) -> Sequence[float]:
    warmed = recipe.replace("solver.warmup_steps", 1)
    return (0.0,) if recipe.solver.warmup_steps or is_refused(warmed) else WARMUP_SHARES


def _sweep(recipe: Recipe, previous_batch: int, solver: str) -> tuple[float, dict[str, float]]:
    batch, base_lr = recipe.train.global_batch_size, recipe.solver.base_lr
    if base_lr == 0:
        raise RecipeError("solver.base_lr is 0; no rule finds a rate from that")
    if solver not in SOLVERS:
        raise RecipeError(f"{option('solvers')} has {solver!r}; they are {', '.join(SOLVERS)}")
    if solver != recipe.solver.type:
        if solver not in LAYER_WISE:
            raise RecipeError(
                f"{option('solvers')} has {solver!r}, for which no rule says a rate from that of "
                f"{recipe.solver.type!r}; tune a recipe with that solver instead"
            )
        rate_at, sweep = LAYER_WISE[solver]
        return rate_at(batch), sweep
    if batch == previous_batch:
        return base_lr, OWN_SWEEP
    ratio = batch / previous_batch
    return base_lr * ratio, {"linear": 1.0, "square root": sqrt(1 / ratio), **ABOVE_SWEEP, **SWEEP}


def apply(recipe: Recipe, candidate: Candidate, steps: int) -> Recipe:
    solver = replace(recipe.solver, type=candidate.solver, base_lr=candidate.base_lr)
    if candidate.warmup_share:
        solver = replace(solver, warmup_steps=max(1, round(candidate.warmup_share * steps)))
    if is_refused(replace(recipe, solver=solver)):  # the solver may lack Caffe's form
        solver = replace(solver, momentum_form="torch", momentum_correction=False)
    return replace(recipe, solver=solver)


HELD_OUT = 0.1
"""The share of training samples that candidates are judged on, if the recipe holds out none."""

TESTS_OF_A_TRIAL = 8

MIN_TESTS = 3
"""Tests, and finished candidates, needed to give one up: at first, small rates are ahead."""

FINALISTS, SEEDS_OF_FINALISTS = 3, 1
"""Best candidates that are trained again, and their further seeds; one seed may be lucky."""

LATE_SHARE = 3 / 4
"""Tests count after this share of a training; their mean is less noisy than the last one."""

SAME = 0.0025
"""Differences up to this are noise between seeds: absolute for shares, else relative."""

MAX_AT_ONCE = 4
"""Most candidates of a round, because candidates of one round are not judged by each other."""

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
        results = self._candidates(train)
        gain = self.measure.gain
        finished = [place for place, result in enumerate(results) if result.state == "finished"]
        if not finished:
            raise RecipeError(
                f"none of {len(results)} candidates came to its end; take a smaller batch, a "
                "longer training, or a recipe that learns at its own batch size"
            )
        finalists = sorted(finished, key=lambda place: -gain(results[place].value))[:FINALISTS]
        trials = {
            place: over_seeds(self._trial(place, results[place].candidate), 1, SEEDS_OF_FINALISTS)
            for place in finalists
        }
        train([trial for several in trials.values() for trial in several])
        for place, several in trials.items():
            again = tuple(late_value(trial.scores) for trial in several)
            results[place] = replace(results[place], again=again)
        return results

    def _candidates(self, train: Run) -> list[CandidateResult]:
        left = self.rules()
        results: list[CandidateResult] = []
        finished: list[Sequence[TrialScore]] = []
        while left and sum(result.steps for result in results) < self.budget * self.steps:
            asked, left = left[: self.width], left[self.width :]
            hopeless = partial(is_hopeless, finished=tuple(finished), measure=self.measure)
            trials = [
                replace(self._trial(place, candidate), end=hopeless)
                for place, candidate in enumerate(asked, start=len(results))
            ]
            train(trials)
            results += [_searched(*pair) for pair in zip(asked, trials, strict=True)]
            finished += [trial.scores for trial in trials if _state(trial) == "finished"]
        return results

    def _trial(self, place: int, candidate: Candidate) -> Trial:
        name = f"candidate-{place + 1:02d}"
        return Trial(name, self.trial_recipe(candidate), self.parent, self.measure)

    @property
    def width(self) -> int:
        return min(self.at_once, MAX_AT_ONCE)

    @property
    def most_candidates(self) -> int:
        """The most whole trainings that candidates cost; the budget may end within a round."""
        return min(len(self.rules()), ceil(self.budget) + self.width - 1)

    def rules(self) -> list[Candidate]:
        return rules(self.recipe, self.previous_batch, self.solvers)


def over_seeds(trial: Trial, first: int, count: int) -> list[Trial]:
    """Return trials like one, under the seeds that follow its own from the `first` on."""
    recipe = trial.recipe
    first += recipe.train.seed
    return [
        replace(trial, name=f"{trial.name}-seed-{seed}", recipe=recipe.replace("train.seed", seed))
        for seed in range(first, first + count)
    ]


def ranked(found: Sequence[CandidateResult], measure: Measure = TOP1) -> list[CandidateResult]:
    """Rank finalists; within SAME of the best, those with a warm-up and a low rate come first."""
    left = [result for result in found if result.again]
    order = []
    while left:
        best = max(measure.gain(result.mean_value) for result in left)
        same = SAME if measure.is_share else SAME * abs(best)
        near = [result for result in left if measure.gain(result.mean_value) >= best - same]
        order.append(
            min(
                near,
                key=lambda result: (result.candidate.warmup_share == 0, result.candidate.base_lr),
            )
        )
        left.remove(order[-1])
    return order


def late_value(scores: Sequence[TrialScore]) -> float:
    return fmean(score.value for score in scores if score.step >= LATE_SHARE * scores[-1].step)


def is_hopeless(
    scores: Sequence[TrialScore], finished: Sequence[Sequence[TrialScore]], measure: Measure = TOP1
) -> bool:
    """Whether a training diverged, or its best is below the finished ones' median at this step."""
    last = scores[-1]
    if not last.is_finite:
        return True
    if len(scores) < MIN_TESTS or len(finished) < MIN_TESTS:
        return False
    gain = measure.gain
    then = [gain(score.value) for of_one in finished for score in of_one if score.step == last.step]
    return bool(then) and max(gain(score.value) for score in scores) < median(then)


def _state(trial: Trial) -> str:
    if not trial.scores[-1].is_finite:
        return "diverged"
    return "given up" if trial.ended_early else "finished"


def _searched(candidate: Candidate, trial: Trial) -> CandidateResult:
    last, state = trial.scores[-1], _state(trial)
    value = late_value(trial.scores) if state == "finished" else last.value
    return CandidateResult(candidate, trial.folder, state, last.step, value)


def with_batch(recipe: Recipe, global_batch_size: int, num_samples: int) -> Recipe:
    """Return the recipe at that batch size, with its old rate as `base_lr` and no scale.

    Micro-batches keep their size. What the recipe counts in steps happens at the same samples, in
    whole steps. num_samples: of the training set. Raises: RecipeError if two drops of the rate
    would fall on one step, or the batch is no multiple of the micro-batch.
    """
    train = recipe.train
    before, after = (
        SampleOrder(train.seed, num_samples, size, train.micro_batch_size)
        for size in (train.global_batch_size, global_batch_size)
    )
    steps = train.steps and after.steps_for(before.samples_before(train.steps))
    rate = recipe.solver.base_lr * batch_scale(recipe.solver, train.global_batch_size)
    ratio = after.steps_per_epoch / before.steps_per_epoch
    solver = replace(
        recipe.solver,
        base_lr=rate,
        scale="none",
        reference_batch_size=0,
        **_stretched(recipe.solver, ratio, train.num_steps(before.steps_per_epoch)),
    )
    eval_every = train.eval_every and max(1, round(train.eval_every * ratio))
    changed = replace(
        train, global_batch_size=global_batch_size, steps=steps, eval_every=eval_every
    )
    return replace(recipe, train=changed, solver=solver)


def _stretched(solver: SolverConfig, ratio: float, steps: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "warmup_steps": solver.warmup_steps and max(1, round(solver.warmup_steps * ratio)),
        "stepsize": solver.stepsize and max(1, round(solver.stepsize * ratio)),
    }
    if solver.lr_policy in ("step", "multistep"):
        is_even = solver.lr_policy == "step"
        places = range(solver.stepsize, steps, solver.stepsize) if is_even else solver.stepvalue
        drops = [round(place * ratio) for place in places]
        if len({0, *drops}) <= len(drops):
            raise RecipeError(
                f"the rate's drops after steps {', '.join(map(str, places))} would come after "
                f"{', '.join(map(str, drops))} at this batch size; take a smaller batch"
            )
        policy = "multistep" if drops else "fixed"
        settings |= {"lr_policy": policy, "stepvalue": drops, "stepsize": 0}
    if solver.lr_policy == "exp":
        settings["gamma"] = solver.gamma ** (1 / ratio)
    elif solver.lr_policy in ("inv", "sigmoid"):
        settings["gamma"] = solver.gamma / ratio
    return settings
