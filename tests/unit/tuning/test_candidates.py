"""A larger batch, the rates that rules give it, and the search among them over a planted landscape:
trainings that cost nothing, whose best rate is known.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.data import SampleOrder
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe, TrainConfig
from firecaffe.runs.measure import TOP1, Measure
from firecaffe.solvers.config import SolverConfig
from firecaffe.solvers.rate_policy import learning_rate
from firecaffe.training.trial import Trial, TrialScore
from firecaffe.tuning.candidates import (
    MAX_AT_ONCE,
    TESTS_OF_A_TRIAL,
    Candidate,
    CandidateResult,
    Search,
    apply,
    is_hopeless,
    ranked,
    rules,
    with_batch,
)
from tests.kit.training import recipe_with

POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "step": {"gamma": 0.5, "stepsize": 90},
    "multistep": {"gamma": 0.5, "stepvalue": [320, 640, 960]},
    "exp": {"gamma": 0.999},
    "inv": {"gamma": 0.001, "power": 0.75},
    "sigmoid": {"gamma": -0.01, "stepsize": 640},
    "poly": {"power": 0.5},
    "cosine": {},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_the_rate_is_the_same_at_the_same_samples(policy: str) -> None:
    solver = SolverConfig(base_lr=0.1, lr_policy=policy, warmup_steps=160, **POLICIES[policy])
    small = Recipe(train=TrainConfig(64, 16, steps=1600, eval_every=160), solver=solver)
    large = with_batch(small, 512, 64 * 100)
    assert (large.train.steps, large.train.eval_every) == (208, 21)  # 16 epochs of 13 steps
    assert large.solver.warmup_steps == 21
    bare = replace(small.solver, warmup_steps=0)
    stretched = replace(large.solver, warmup_steps=0)
    for epoch in range(16):
        rates = (learning_rate(bare, 100 * epoch, 1600), learning_rate(stretched, 13 * epoch, 208))
        assert rates[1] == pytest.approx(rates[0], rel=0.02)


@settings(max_examples=100)
@given(st.integers(1, 3000), st.integers(1, 64), st.integers(64, 5000))
def test_the_samples_are_the_same(steps: int, factor: int, samples: int) -> None:
    small = Recipe(train=TrainConfig(16, 16, steps=steps))
    large = with_batch(small, 16 * factor, samples)
    seen = [
        SampleOrder(0, samples, each.train.global_batch_size, 16).samples_before(each.train.steps)
        for each in (small, large)
    ]
    assert abs(seen[1] - seen[0]) <= 16 * factor


def test_the_rate_is_that_of_its_own_batch() -> None:
    """What a scale made of it; the words that made it are gone."""
    solver = SolverConfig(base_lr=0.1, scale="sqrt", reference_batch_size=16)
    large = with_batch(Recipe(train=TrainConfig(64, 16), solver=solver), 256, 1000)
    assert large.solver.base_lr == pytest.approx(0.2)
    assert (large.solver.scale, large.solver.reference_batch_size) == ("none", 0)
    assert (large.train.epochs, large.train.steps, large.train.micro_batch_size) == (0, 0, 16)


def test_many_even_drops_do_not_move() -> None:
    """A stepsize of 100 would be 12.5 steps: the last of 15 drops would come six steps too late."""
    solver = SolverConfig(lr_policy="step", gamma=0.5, stepsize=100)
    large = with_batch(Recipe(train=TrainConfig(64, 16, steps=1600), solver=solver), 512, 64 * 800)
    assert large.train.steps == 200
    assert large.solver.stepvalue == [round(12.5 * number) for number in range(1, 16)]
    with pytest.raises(RecipeError, match=r"would come after 0, 1, 2, .* take a smaller batch"):
        with_batch(Recipe(train=TrainConfig(64, 16, steps=1600), solver=solver), 16384, 64 * 800)


def test_what_cannot_be_is_refused() -> None:
    drops = SolverConfig(lr_policy="multistep", gamma=0.1, stepvalue=[100, 104])
    recipe = Recipe(train=TrainConfig(64, 16, steps=200), solver=drops)
    with pytest.raises(RecipeError, match="drops after steps 100, 104 would come after 7, 7"):
        with_batch(recipe, 1024, 6400)
    with pytest.raises(RecipeError, match="expected a multiple of micro_batch_size, 16"):
        with_batch(recipe, 100, 6400)


def at_batch(batch: int, base_lr: float = 0.01, warmup_steps: int = 0) -> Recipe:
    """With the rate that it had at another batch."""
    solver = SolverConfig(base_lr=base_lr, warmup_steps=warmup_steps)
    return Recipe(train=TrainConfig(batch, 16), solver=solver)


def test_firecaffes_sweep_and_the_square_root() -> None:
    """GoogLeNet from 32 to 1024: 0.32 by the linear rule, and the paper's other four below it."""
    candidates = rules(at_batch(1024), 32, ["sgd"])
    warm = {each.rule: each.base_lr for each in candidates if each.warmup_share}
    assert {each.warmup_share for each in candidates} == {0.15, 0.0}
    assert len(candidates) == 2 * len(warm)
    parts = {f"linear / {2**n}": 0.32 / 2**n for n in range(1, 5)}
    expected = {"linear": 0.32, "square root": 0.01 * sqrt(32), "linear x 2": 0.64, **parts}
    assert warm == pytest.approx(expected)


def test_like_rates_are_tried_once() -> None:
    assert len(rules(at_batch(64), 16, ["sgd"])) == 2 * 6  # the root of 4 is a half of it


def test_a_warm_up_of_its_own_stays() -> None:
    warm = at_batch(128, warmup_steps=7)
    candidates = rules(warm, 16, ["sgd"])
    assert apply(warm, candidates[0], 100).solver.warmup_steps == 7
    cyclic = at_batch(128).replace("solver.lr_policy", "one_cycle")
    for each in (*candidates, *rules(cyclic, 16, ["sgd"])):
        assert each.warmup_share == 0.0


def test_its_own_batch_is_swept_both_ways() -> None:
    found = rules(at_batch(64), 64, ["sgd"])
    assert {each.base_lr for each in found} == {0.0025, 0.005, 0.01, 0.02, 0.04}


def test_layer_wise_solvers_have_rates_of_their_own() -> None:
    candidates = rules(at_batch(2048), 32, ["lars", "lamb"])
    lars = {each.base_lr for each in candidates if each.solver == "lars"}
    assert lars == {16.0, 8.0, 4.0, 2.0, 1.0}
    lamb = {each.rule: each.base_lr for each in candidates if each.solver == "lamb"}
    assert lamb["lamb"] == pytest.approx(0.01)  # a quarter of 0.04, at a sixteenth of 32,768


@pytest.mark.parametrize(
    ("words", "solvers", "line"),
    [
        ("", ["adamax"], "they are sgd, nesterov"),
        ("", ["adam"], "no rule says a rate"),
        ("solver.base_lr=0.0", ["sgd"], r"solver\.base_lr is 0"),
        (
            "synchrony.mode=asynchronous synchrony.lock=none",
            ["sgd", "lars"],
            r"solver\.type = lars with synchrony\.lock = none",
        ),
    ],
)
def test_a_solver_without_a_rate_is_refused(words: str, solvers: list[str], line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        rules(recipe_with(words, at_batch(64)), 16, solvers)


def test_a_candidate_is_put_into_the_recipe() -> None:
    caffe = at_batch(64).replace("solver.momentum_form", "caffe")
    found = apply(caffe, Candidate("sgd", 0.3, 0.05, "linear"), 390)
    assert (found.solver.base_lr, found.solver.warmup_steps) == (0.3, 20)
    assert found.solver.momentum_form == "caffe"
    lars = apply(caffe, Candidate("lars", 8.0, 0.0, "lars"), 390).solver
    assert (lars.type, lars.momentum_form, lars.warmup_steps) == ("lars", "torch", 0)


STEPS = 80
BEST = 0.05
DIVERGES = 0.1


class Landscape:
    """Trains at once: accuracy falls with the distance of a rate's logarithm from the best's."""

    def __init__(self, best_rate: float = BEST, measure: Measure = TOP1) -> None:
        self.best_rate, self.measure = best_rate, measure
        self.trained: list[str] = []

    def train(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if not trial.folder.exists():
                self.trained.append(trial.name)
                self._record(trial)
            trial.look()

    def _record(self, trial: Trial) -> None:
        recipe = trial.recipe
        rate = recipe.solver.base_lr
        top = 0.9 - 0.05 * abs(log(rate / self.best_rate)) + 0.001 * recipe.train.seed
        rows = []
        every = recipe.train.eval_every
        for step in [*range(every, STEPS, every), STEPS]:
            top1 = top * step / STEPS
            value = top1 if self.measure.higher_is_better else 1 - top1
            loss = None if rate > DIVERGES else 1.0
            rows.append(
                {"kind": "validation", "step": step, "loss": loss, self.measure.name: value}
            )
            if trial.ended_early:
                break
        trial.folder.mkdir(parents=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (trial.folder / "metrics.jsonl").write_text(text)


def at_rate(base_lr: float) -> Recipe:
    return at_batch(512, base_lr).replace("train.seed", 3)


def search(folder: Path, budget: float = 20.0, at_once: int = 2) -> Search:
    return Search(at_rate(0.01), 64, STEPS, ["sgd"], budget, at_once, folder)


def test_a_lower_error_is_found_as_a_higher_accuracy_is(tmp_path: Path) -> None:
    error = Measure("mae", higher_is_better=False, is_share=False)
    by_accuracy = search(tmp_path / "a")
    by_error = replace(search(tmp_path / "b"), measure=error)
    first = by_accuracy.run(Landscape().train)
    second = by_error.run(Landscape(measure=error).train)
    assert [one.state for one in first] == [other.state for other in second]
    assert [one.value for one in first] == pytest.approx([1 - other.value for other in second])
    order, same = ranked(first), ranked(second, error)
    assert [one.folder.name for one in order] == [other.folder.name for other in same]


def test_the_rules_are_tried_in_their_order_and_the_best_again(tmp_path: Path) -> None:
    landscape = Landscape()
    results = search(tmp_path).run(landscape.train)
    first = ["linear", "square root", "linear x 2", *(f"linear / {2**n}" for n in range(1, 5))]
    assert [result.candidate.rule for result in results[:7]] == first
    assert {result.candidate.warmup_share for result in results[:7]} == {0.15}
    assert {result.candidate.warmup_share for result in results[7:]} == {0.0}
    assert len(results) == 14  # no more than there are, whatever the budget
    best = ranked(results)[0]
    assert abs(log(best.candidate.base_lr / BEST)) <= log(2) / 2
    assert best.state == "finished"
    # The mean of finalists that are trained again counts.
    again = [result for result in results if result.again]
    assert len(again) == len([name for name in landscape.trained if "seed" in name]) == 3
    finished = [result for result in results if result.state == "finished"]
    top1s = sorted((result.value for result in finished), reverse=True)
    assert sorted((result.value for result in again), reverse=True) == top1s[:3]
    # The last quarter's tests count, after 60, 70 and 80 of 80 steps; it grows as the steps.
    for result in finished:
        distance = abs(log(result.candidate.base_lr / BEST))
        assert result.value == pytest.approx((0.903 - 0.05 * distance) * 7 / 8)


def evaluations(*top1s: float) -> list[TrialScore]:
    return [TrialScore(10 * number, top1, True) for number, top1 in enumerate(top1s, 1)]


def test_who_is_given_up() -> None:
    """Below the median of what the finished ones had then; never early, nor against few."""
    finished = [evaluations(0.1, 0.3, value, 0.9) for value in (0.4, 0.5, 0.6)]
    assert is_hopeless(evaluations(0.1, 0.2, 0.49), finished)
    assert not is_hopeless(evaluations(0.1, 0.2, 0.51), finished)
    assert not is_hopeless(evaluations(0.1, 0.52, 0.49), finished)  # its best counts
    assert not is_hopeless(evaluations(0.0, 0.0), finished)
    assert not is_hopeless(evaluations(0.0, 0.0, 0.0), finished[:2])
    assert is_hopeless([TrialScore(10, 0.1, False)], [])


def test_what_diverges_or_falls_behind_costs_little(tmp_path: Path) -> None:
    found = search(tmp_path).run(Landscape(best_rate=0.08).train)
    hopeless = [each for each in found if each.state == "given up"]
    assert hopeless
    assert {each.steps for each in hopeless} <= set(range(30, STEPS))  # not before its third test
    assert "linear / 16" in {each.candidate.rule for each in hopeless}
    edge = replace(search(tmp_path / "edge", budget=2.5), recipe=at_rate(0.0126 / 2))
    diverged = [each for each in edge.run(Landscape().train) if each.state == "diverged"]
    assert [each.candidate.base_lr for each in diverged[:1]] == [pytest.approx(0.1008)]
    assert {each.steps for each in diverged} == {10}


def spent(results: Sequence[CandidateResult]) -> float:
    return sum(result.steps for result in results) / STEPS


def test_the_budget_is_in_whole_trainings(tmp_path: Path) -> None:
    results = search(tmp_path / "few", budget=5.0).run(Landscape().train)
    assert 5.0 <= spent(results) < 5.0 + 2
    assert len(results) > 5
    # What is asked for together, on a wide machine, learns nothing from each other.
    wide = search(tmp_path / "wide", budget=8.0, at_once=64).run(Landscape().train)
    assert spent(wide) < 8 + MAX_AT_ONCE


def planted(top1: float, again: float, rate: float, share: float = 0.05) -> CandidateResult:
    candidate = Candidate("sgd", rate, share, "planted")
    return CandidateResult(candidate, Path("candidate-01"), "finished", STEPS, top1, (again,))


def test_ranks() -> None:
    lucky = planted(0.95, 0.70, 0.1)
    steady, bare = planted(0.90, 0.90, 0.1), planted(0.901, 0.901, 0.2, share=0.0)
    slower = planted(0.898, 0.899, 0.05)
    worse = planted(0.890, 0.890, 0.01)
    # Two seeds do not tell the middle three apart: with a warm-up, and slower, is safer.
    assert ranked([lucky, worse, bare, steady, slower]) == [slower, steady, bare, worse, lucky]
    assert ranked([replace(worse, again=())]) == []  # no finalist


def test_a_search_begun_again_asks_for_the_same(tmp_path: Path) -> None:
    """It finds what is there; a larger budget goes on behind it."""
    first = search(tmp_path, budget=6.0).run(Landscape().train)
    landscape = Landscape()
    assert search(tmp_path, budget=6.0).run(landscape.train) == first
    assert landscape.trained == []
    more = search(tmp_path, budget=9.0).run(landscape.train)
    assert _bare(more[: len(first)]) == _bare(first)
    assert len(more) > len(first)


def _bare(found: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Finalists may be others once more is known."""
    return [replace(each, again=()) for each in found]


def test_how_many_at_once_is_another_search_of_the_same_rules(tmp_path: Path) -> None:
    one, four = (
        search(tmp_path / str(at_once), at_once=at_once).run(Landscape().train)
        for at_once in (1, 4)
    )
    assert [each.candidate for each in one[:14]] == [each.candidate for each in four[:14]]


def test_each_solver_has_rates_of_its_own(tmp_path: Path) -> None:
    """LARS diverges everywhere here, and sgd is searched as if it were alone."""
    both = replace(search(tmp_path, budget=24.0), solvers=["sgd", "lars"])
    found = both.run(Landscape().train)
    assert {each.candidate.solver for each in found} == {"sgd", "lars"}
    assert {each.state for each in found if each.candidate.solver == "lars"} == {"diverged"}
    assert ranked(found)[0].candidate.solver == "sgd"


def test_candidates_see_no_test_image(tmp_path: Path) -> None:
    recipes: list[Recipe] = []

    def train(trials: Sequence[Trial]) -> None:
        recipes.extend(trial.recipe for trial in trials)
        Landscape().train(trials)

    search(tmp_path).run(train)
    assert {recipe.data.hold_out for recipe in recipes} == {0.1}
    assert {recipe.train.steps for recipe in recipes} == {STEPS}
    assert {recipe.train.eval_every for recipe in recipes} == {STEPS // TESTS_OF_A_TRIAL}


def test_candidates_are_judged_on_the_recipe_s_own_hold_out_and_to_their_end(
    tmp_path: Path,
) -> None:
    """A candidate that stopped early would be compared at another step."""
    plain = search(tmp_path)
    words = "data.hold_out=0.25 train.eval_every=4 train.stop_after=3"
    own = replace(plain, recipe=recipe_with(words, plain.recipe))
    trial = own.trial_recipe(own.rules()[0])
    assert trial.data.hold_out == 0.25
    assert (trial.train.stop_after, trial.train.eval_every) == (0, STEPS // TESTS_OF_A_TRIAL)


def test_where_nothing_learns_there_is_no_best(tmp_path: Path) -> None:
    hopeless = replace(search(tmp_path, budget=1.0), recipe=at_rate(10.0))
    with pytest.raises(RecipeError, match=r"none of \d+ candidates came to its end"):
        hopeless.run(Landscape().train)
