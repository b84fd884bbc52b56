"""The table of refusals: an example of each row is refused with its words, and one that misses a
condition is not.
"""

from typing import Any

import pytest

from firecaffe import Recipe
from firecaffe.errors import RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.identity import flatten
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
from tests.kit.training import recipe_with, words_of
from tests.unit.recipe.other import OTHER

VALUES = [
    words_of(text)
    for text in """
comm_hook=True model=True workers=2 hosts=2 gpus=True system=darwin data.name=caffe:net.prototxt
data.name=own:images data.order=shards task.name=caffe:net.prototxt task.args={'k':2} train.steps=9
train.epochs=2 solver.type=adagrad solver.type=lamb solver.type=torch.optim:NAdam
solver.decay_form=l1 exchange.algorithm=ring exchange.compressor=int8 exchange.compressor=power_sgd
synchrony.mode=stale parallel.split={'classifier.*':'neurons'} parallel.stages=['features.6']
parallel.scheme=one_weird_trick parallel.data=2 parallel.model=2 parallel.parts=4
prune.threshold={'*':0.5} share.bits={'*':4}
""".split()
]
"""Values beside the default and that of `other.py`, of which examples are made."""

OTHERS = flatten(OTHER)


def value_for(term: Term, holds: bool) -> Any:
    """A value with which a condition holds, or does not."""
    own = term.values if isinstance(term.values, tuple) else ()
    other = [OTHERS[term.word]] if term.word in OTHERS else []
    for value in (
        DEFAULTS[term.word],
        *(v[term.word] for v in VALUES if term.word in v),
        *other,
        *own,
    ):
        if term.holds({term.word: value}) == holds:
            return value
    raise AssertionError(f"VALUES lacks one of {term.word}")


def example(words: dict[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """A recipe of these words, and what is given beside it."""
    recipe = recipe_with({word: value for word, value in words.items() if "." in word})
    return recipe, {word: value for word, value in words.items() if word in GIVEN}


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: " with ".join(t.text for t in row.when))
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
    (row,) = refusals(facts_of(recipe, {}))
    with pytest.raises(RecipeError) as told:
        check_recipe(recipe)
    words = "exchange.update_at = shards with synchrony.mode = stale"
    assert str(told.value) == f"{words}: {row.because}; {row.instead}"


def test_a_row_is_there_once() -> None:
    every = [terms for row in REFUSALS for terms in combinations(row.when)]
    assert len(set(every)) == len(every)


COMBINATIONS, UNWRITTEN = 93, 3
"""Of words that are refused; of rows that nothing but missing code forbids. They only shrink."""


def test_what_is_refused_gets_less() -> None:
    assert num_combinations() <= COMBINATIONS
    assert sum(row.kind == "unwritten" for row in REFUSALS) <= UNWRITTEN
