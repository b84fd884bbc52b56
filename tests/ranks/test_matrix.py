"""Every pair of holdings, updates, modes and words that touch sums ends in the bits of one worker.

Each case is killed on the way and goes on in another composition. `make soak` tries each
composition under all words.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import firecaffe
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.training.verification import replay
from tests.kit.training import ALONE
from tests.ranks.matrix import (
    FIRST,
    PAIRWISE,
    REPEATED,
    THEN,
    UNREPEATED,
    all_words,
    alone,
    chain,
    fit,
    full,
    given,
    is_possible,
    possible_with,
    recipe_of,
    saved_cases,
)
from tests.ranks.pairwise import Case
from tests.world import Ranks

OneWorker = Callable[[Case], firecaffe.Result]


def name_of(case: Case) -> str:
    usual = full({})
    return " ".join(f"{name}={case[name]}" for name in case if case[name] != usual[name]) or "usual"


@pytest.fixture(scope="module")
def one_worker(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> OneWorker:
    """The run of one worker from its first step to its last, trained once."""
    folder, kept = tmp_path_factory.mktemp("alone"), dict[Any, firecaffe.Result]()

    def of(case: Case) -> firecaffe.Result:
        recipe, key = alone(case)
        if key not in kept:
            [kept[key]] = ranks.shared(1, fit, recipe, folder / str(len(kept)))
        return kept[key]

    return of


@pytest.mark.parametrize("case", saved_cases(), ids=lambda case: case["mode"])
def test_killed_and_gone_on_elsewhere(
    ranks: Ranks, one_worker: OneWorker, case: Case, tmp_path: Path
) -> None:
    check(ranks, one_worker, case, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("words", all_words(), ids=name_of)
@pytest.mark.parametrize("cut", [False, True], ids=["whole layers", "cut layers"])
def test_each_composition_goes_on_in_another(
    ranks: Ranks, one_worker: OneWorker, words: Case, cut: bool, tmp_path: Path
) -> None:
    if not (cases := chain(words, cut)):
        pytest.skip("refused")
    for number, case in enumerate(cases):
        check(ranks, one_worker, case, tmp_path / str(number))


def check(ranks: Ranks, one_worker: OneWorker, case: Case, folder: Path) -> None:
    """A case is killed on the way, and comes to the bits of one worker."""
    print(name_of(case))
    first, then = folder / "first", folder / "then"
    last = case["ranks"] - 1
    ranks.shared(case["ranks"], fit, recipe_of(case, FIRST), first, 1, None, last, lost={last})
    saved = sorted((first / "checkpoints").glob("step-0000000[1-5]"))
    assert saved, "it has left no checkpoint"
    again = recipe_of(case, THEN), then, 2, str(saved[-1])
    results = ranks.shared(case["then ranks"], fit, *again)
    # As text: with many late gradients a running variance may become negative, and a loss NaN.
    ends = {f"{result.weights_sha256} {result.test_loss} {result.loss}" for result in results}
    assert len(ends) == 1
    found = results[0]
    if case["mode"] in REPEATED:
        expected = one_worker(case)
        assert found.weights_sha256 == expected.weights_sha256
        assert found.state_sha256 == expected.state_sha256
        assert (found.test_loss, found.metrics) == (expected.test_loss, expected.metrics)
        assert found.validation == expected.validation
        assert not found.identity_doubts
    elif case["mode"] != UNREPEATED:
        assert replay(then, recipe_of_run(then), ALONE, None, given()).is_same


def test_each_pair_stands_in_a_case_or_is_refused() -> None:
    """By `python -m tests.ranks.matrix`, which makes the file of the cases."""
    cases = saved_cases()
    assert all(map(is_possible, cases))
    left = set(PAIRWISE.all_pairs()).difference(*map(PAIRWISE.pairs_of, cases))
    assert {pair for pair in left if possible_with(dict(pair)) is not None} == set()
    assert len(left) < 0.05 * len(PAIRWISE.all_pairs())
