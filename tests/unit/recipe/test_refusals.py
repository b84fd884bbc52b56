"""The table of refusals: an example of each row is refused with its words, and one that misses a
condition is not.
"""

import dataclasses
from typing import Any

import pytest

from firecaffe import Recipe
from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.refusals import REFUSALS, num_combinations, refusals
from firecaffe.recipe.terms import (
    DEFAULTS,
    GIVEN,
    SAID,
    AnyOf,
    Refusal,
    Term,
    combinations,
    facts_of,
)

VALUES: dict[str, list[Any]] = {
    "comm_hook": [True],
    "model": [True],
    "workers": [2],
    "hosts": [2],
    "gpus": [True],
    "system": ["darwin"],
    "model.args": [{"depth": 2}],
    "data.name": ["caffe:net.prototxt", "own:images"],
    "data.args": [{"side": 2}],
    "data.hold_out": [0.1],
    "data.balance": ["classes"],
    "data.augment": ["none"],
    "data.crop": [24],
    "data.pad": [2],
    "data.mirror": [True],
    "data.mean": [[0.5]],
    "data.std": [[0.5]],
    "data.order": ["shards"],
    "task.name": ["caffe:net.prototxt"],
    "task.args": [{"k": 2}],
    "train.steps": [9],
    "train.epochs": [2],
    "train.ema_decay": [0.9],
    "train.batch_norm_samples": [64],
    "solver.type": ["adagrad", "lamb", "torch.optim:NAdam"],
    "solver.momentum": [0.5],
    "solver.momentum_form": ["caffe"],
    "solver.momentum_correction": [True],
    "solver.decay_form": ["l1"],
    "solver.base_momentum": [0.85],
    "solver.clip_gradients": [1.0],
    "solver.warmup_steps": [3],
    "exchange.algorithm": ["ring"],
    "exchange.compressor": ["int8", "power_sgd"],
    "exchange.compressor_level": [1],
    "synchrony.mode": ["stale"],
    "synchrony.server": ["sharded"],
    "synchrony.in_flight": [2],
    "synchrony.gradients_per_update": [2],
    "synchrony.staleness_rate": ["inverse"],
    "synchrony.compensate": ["delay"],
    "synchrony.server_momentum": ["delayed_nesterov"],
    "synchrony.speeds_from": ["rank-0.jsonl"],
    "synchrony.overlap_steps": [1],
    "synchrony.warm_steps": [1],
    "synchrony.warm_epochs": [1],
    "synchrony.warm_until_drop": [True],
    "parallel.split": [{"classifier.*": "neurons"}],
    "parallel.stages": [["features.6"]],
    "parallel.scheme": ["one_weird_trick"],
    "parallel.data": [2],
    "parallel.model": [2],
    "parallel.parts": [4],
    "prune.keep": [{"*": 0.1}],
    "prune.threshold": [{"*": 0.5}],
    "prune.how": ["gradual"],
    "prune.steps": [9],
    "prune.scope": ["all"],
    "share.bits": [{"*": 4}],
}
"""Values of words beside their default, of which examples are made."""


def value_for(term: Term, holds: bool) -> Any:
    """A value with which a condition holds, or does not."""
    own = term.values if isinstance(term.values, tuple) else ()
    for value in (DEFAULTS[term.word], *VALUES.get(term.word, ()), *own):
        if term.holds({term.word: value}) == holds:
            return value
    raise AssertionError(f"VALUES lacks one of {term.word}")


def example(words: dict[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """A recipe of these words, and what is given beside it."""
    recipe = Recipe()
    for word, value in words.items():
        section, _, name = word.partition(".")
        if name:
            config = dataclasses.replace(getattr(recipe, section), **{name: value})
            recipe = dataclasses.replace(recipe, **{section: config})
    return recipe, {word: value for word, value in words.items() if word in GIVEN}


def named(row: Refusal) -> str:
    return " with ".join(each.told for each in row.when)


@pytest.mark.parametrize("row", REFUSALS, ids=named)
def test_a_row_refuses_what_it_says_and_nothing_else(row: Refusal) -> None:
    for terms in combinations(row.when):
        words = {term.word: value_for(term, holds=True) for term in terms}
        recipe, given = example(words)
        facts = facts_of(recipe, given)
        assert row in refusals(facts)
        line = row.line(facts)
        assert all(SAID.get(word, word).format(words[word]) in line for word in words)
        with pytest.raises(RecipeError):
            check_recipe(recipe, **given)
    for missed in row.when:
        others = [each for each in row.when if each is not missed]
        kept = {each.word: value_for(each, holds=True) for each in combinations(tuple(others))[0]}
        gone = missed.terms if isinstance(missed, AnyOf) else (missed,)
        spared = {each.word: value_for(each, holds=False) for each in gone}
        recipe, given = example(spared | kept)
        assert not row.holds(facts_of(recipe, given))


def test_an_error_says_the_words_why_and_what_to_do() -> None:
    recipe, _ = example({"exchange.update_at": "shards", "synchrony.mode": "stale"})
    with pytest.raises(RecipeError) as told:
        check_recipe(recipe)
    (row,) = refusals(facts_of(recipe, {}))
    assert str(told.value) == (
        f"exchange.update_at = shards with synchrony.mode = stale: {row.because}; {row.instead}"
    )


def test_a_row_is_there_once() -> None:
    every = [terms for row in REFUSALS for terms in combinations(row.when)]
    assert len(set(every)) == len(every)


COMBINATIONS, UNWRITTEN = 93, 5
"""Of words that are refused; of rows that nothing but missing code forbids. They only shrink."""


def test_what_is_refused_gets_less() -> None:
    assert num_combinations() <= COMBINATIONS
    assert sum(row.kind == "unwritten" for row in REFUSALS) <= UNWRITTEN
