"""What a recipe cannot be: a word alone, numbers that do not fit, and each row of the refusals.

An example of each row is refused with its words, and one that misses a condition is not.
"""

from typing import Any

import pytest

from firecaffe import Recipe
from firecaffe.errors import RecipeError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.fits import FITS
from firecaffe.recipe.idle_settings import EFFECTIVE_IF, with_effect
from firecaffe.recipe.refusals import REFUSALS, num_combinations, refusals
from firecaffe.recipe.sections import flatten
from firecaffe.recipe.terms import (
    DEFAULTS,
    GIVEN,
    SAID,
    AllOf,
    Refusal,
    Term,
    combinations,
    facts_of,
)
from firecaffe.recipe.worker_numbers import WORKERS_FIT
from firecaffe.synchrony.config import EVERY_STEP, MODES
from tests.kit.models_refused import refused
from tests.kit.training import recipe_with, words_of
from tests.unit.recipe.other import OTHER

ALONE = """
train.global_batch_size=0 train.global_batch_size=8 train.micro_batch_size=0
train.micro_batch_size=-1 train.threads=0 train.eval_batch_size=0 train.steps=-1 train.epochs=-1
train.eval_every=-5 train.batch_norm_samples=15 data.augment=inception data.cutmix=-1.0
data.erasing=1.5 solver.type=adamax solver.lr_policy=cyclic solver.momentum_form=inside
solver.trust=-1.0 solver.lr_mult={'*':-2.0} solver.scale=linear exchange.algorithm=star
exchange.algorithm=hierarchical(ring,tree) exchange.compressor=gzip exchange.compressor_level=-1
exchange.update_at=nobody exchange.bucket_bytes=0 exchange.timeout_s=0.0 exchange.timeout_s=nan
exchange.silent_s=0.0 checkpoint.every=-1 checkpoint.keep_last=-1 checkpoint.every_s=nan
synchrony.mode=sometimes synchrony.shares=even synchrony.shares_every=0 synchrony.learners=0
synchrony.learners=1000000000000 synchrony.backup_workers=-1 synchrony.backup_workers=4096
synchrony.max_staleness=-1 synchrony.gradients_per_update=0 synchrony.warm_steps=-1
synchrony.spread=0.0 synchrony.spread=1e-200 synchrony.spread=1e+20 synchrony.slow_factor=0.5
synchrony.slow_factor=1e+30 synchrony.compensate=gaps synchrony.replicas=0 parallel.data=-1
parallel.model=0 parallel.stages=['a','b','a'] prune.keep={'a':0.0} prune.keep={'a':1.5}
prune.threshold={'a':0.0} share.bits={'a':0} share.bits={'a':17}
"""


@pytest.mark.parametrize("text", ALONE.split())
def test_a_word_that_cannot_be_is_named(text: str) -> None:
    with refused(RecipeError, [text.partition("=")[0]]):
        check_recipe(recipe_with(text))


BATCH = "train.global_batch_size=32 train.micro_batch_size=4"
LOCAL = f"{BATCH} train.steps=100 synchrony.mode=local synchrony.replicas=4 synchrony.local_steps=8"
CLOCK = f"{BATCH} train.steps=40 synchrony.clock=simulated synchrony.learners=5"
SERVED, BACKUP = f"{CLOCK} synchrony.mode=asynchronous", f"{CLOCK} synchrony.mode=backup"
CYCLE = "solver.lr_policy=one_cycle solver.momentum=0.8"
INT8, PRUNED = "exchange.compressor=int8", "prune.keep={'a':0.1}"
SPLIT = "parallel.split={'classifier.*':'neurons'}"


@pytest.mark.parametrize(
    ("words", "also", "named"),
    [
        ("", "train.global_batch_size=100", "no multiple of train.micro_batch_size, 16"),
        ("train.micro_batch_size=1", "train.global_batch_size=16777216", "16,777,216 a step"),
        ("train.micro_batch_size=1", "data.mixup=0.2", "data.mixup is 0.2 with train.micro_batch"),
        (CYCLE, "solver.base_momentum=0.85", "it must be at most solver.momentum, 0.8"),
        (INT8, "exchange.compressor_level=4", "over 8 micro-batches ends at level 3"),
        (LOCAL, f"{INT8} exchange.compressor_level=3", "over 4 replicas ends at level 2"),
        (LOCAL, "synchrony.replicas=5", "replicas is 5 of 8 micro-batches a step"),
        (LOCAL, "synchrony.local_steps=101", "it must be at most 100"),
        (LOCAL, "synchrony.warm_steps=93", "local_steps is 8 after 93 synchronous steps"),
        (LOCAL, "synchrony.overlap_steps=8", "overlap_steps is 8 with synchrony.local_steps 8"),
        (LOCAL, "synchrony.fragments=9", "fragments is 9 with synchrony.local_steps 8"),
        (LOCAL, "synchrony.overlap_steps=2 synchrony.fragments=3", "it must be less than 2"),
        (LOCAL, "synchrony.outer_lr=0.0", "synchrony.outer_lr is 0"),
        (LOCAL, "synchrony.outer_lr=nan", "synchrony.outer_lr is nan"),
        (LOCAL, "synchrony.outer_momentum=-0.5", "synchrony.outer_momentum is -0.5"),
        (LOCAL, "synchrony.outer_momentum=1.0", "synchrony.outer_momentum is 1"),
        (SERVED, "synchrony.clock=real synchrony.in_flight=5", "synchrony.in_flight is 5"),
        (BACKUP, "synchrony.backup_workers=5", "less than synchrony.learners, 5"),
        (BACKUP, "synchrony.backup_workers=8 synchrony.learners=9", "8 of 8 micro-batches"),
        (SERVED, "synchrony.gradients_per_update=6", "is 6; it must be at most"),
        (SERVED, "synchrony.gradients_per_update=9 synchrony.learners=9", "_update is 9 of 8"),
        (SERVED, "synchrony.warm_steps=40", "warm_steps is 40 of train.steps 40"),
        (f"parallel.model=2 {SPLIT}", "parallel.parts=3", "parallel.parts is 3, which 2 workers"),
        (f"parallel.model=4 {SPLIT}", "parallel.parts=3", "take 4"),
        ("parallel.model=3", "parallel.stages=['a']", "parallel.stages names 2 stages"),
        (PRUNED, "prune.every=0", "prune.every is 0"),
        (PRUNED, "prune.steps=-1", "prune.steps is -1"),
    ],
)
def test_words_that_cannot_be_together(words: str, also: str, named: str) -> None:
    with refused(RecipeError, [named]):
        check_recipe(recipe_with(f"{words} {also}"))


def test_each_row_names_words_that_there_are() -> None:
    for row in (*FITS, *WORKERS_FIT):
        assert set(row.words) <= DEFAULTS.keys()


BOTH = "share.bits={'*':4} prune.keep={'*':0.1}"
MEASURED = "synchrony.shares=measured exchange.algorithm="
CAN = [
    *("", "train.global_batch_size=1 train.micro_batch_size=1", LOCAL, SERVED, BACKUP),
    *("train.steps=5 train.epochs=0", "train.steps=0 train.epochs=1", f"{MEASURED}tree {PRUNED}"),
    f"{PRUNED} prune.how=gradual prune.steps=10 train.autocast=float16 train.compile=True",
    *(f"{BOTH} exchange.compressor={compressor}" for compressor in COMPRESSORS),
    *(f"{MEASURED}{name}" for name in ("auto", "halving_doubling", "hierarchical(tree,tree)")),
    *(
        f"exchange.update_at=shards exchange.algorithm={algorithm} solver.type={solver}"
        for algorithm in ("tree", "auto", "sharded_parameter_server")
        for solver in ("sgd", "lamb")
    ),
    *(
        f"{layout} solver.{solver}"
        for layout in (f"parallel.model=2 {SPLIT}", "parallel.stages=['features.6']")
        for solver in ("type=lars", "clip_gradients=1.0")
    ),
]


@pytest.mark.parametrize("words", CAN)
def test_accepted(words: str) -> None:
    check_recipe(recipe_with(words))


def test_exchanges_that_leave_the_tree() -> None:
    check_recipe(OTHER)
    for algorithm in ("ring", "native", "double_tree", "hierarchical(tree,ring)"):
        with refused(RecipeError, [f"exchange.algorithm = {algorithm}: "]):
            check_recipe(recipe_with(f"{MEASURED}{algorithm}"))


VALUES = [
    words_of(text)
    for text in """
comm_hook=True model=True validation_set=True workers=2 hosts=2 gpus=True system=darwin
data.name=caffe:net.prototxt
data.name=own:images data.order=shards task.name=caffe:net.prototxt task.args={'k':2} train.steps=9
train.epochs=2 solver.type=adagrad solver.type=lamb solver.type=torch.optim:NAdam
solver.decay_form=l1 exchange.algorithm=ring exchange.compressor=int8 exchange.compressor=power_sgd
synchrony.mode=stale parallel.split={'classifier.*':'neurons'} parallel.stages=['features.6']
parallel.scheme=one_weird_trick parallel.data=2 parallel.model=2 parallel.parts=4
prune.threshold={'*':0.5} share.bits={'*':4}
""".split()
]
"""Values besides the default and that of `other.py`, of which examples are made."""

OTHERS = flatten(OTHER)


def value_for(term: Term, holds: bool) -> Any:
    """A value with which a condition holds, or does not."""
    other = [OTHERS[term.word]] if term.word in OTHERS else []
    listed = [words[term.word] for words in VALUES if term.word in words]
    for value in (DEFAULTS[term.word], *listed, *other, *term.values):
        if term.holds({term.word: value}) == holds:
            return value
    raise AssertionError(f"VALUES lacks one of {term.word}")


def in_effect(words: dict[str, Any]) -> dict[str, Any]:
    """The words, with a mode and others beside which all of them have an effect."""
    tried = dict(words)
    for word in words:
        needed = EFFECTIVE_IF.get(word, AllOf(()))
        for condition in needed.conditions if isinstance(needed, AllOf) else (needed,):
            first = condition.every[0]
            if first.word != "synchrony.mode" and not condition.holds({**DEFAULTS, **tried}):
                tried[first.word] = value_for(first, holds=True)
    for mode in (words.get("synchrony.mode", EVERY_STEP), *MODES):
        tried["synchrony.mode"] = words.get("synchrony.mode", mode)
        facts = with_effect({**DEFAULTS, **tried})
        if all(facts[word] == value for word, value in words.items()):
            return tried
    raise AssertionError(f"no mode in which all count: {words}")


def example(words: dict[str, Any]) -> tuple[Recipe, dict[str, Any]]:
    """A recipe of these words, and what is given beside it."""
    recipe = recipe_with({word: value for word, value in words.items() if "." in word})
    return recipe, {word: value for word, value in words.items() if word in GIVEN}


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: " with ".join(t.text for t in row.when))
def test_a_row_refuses_what_it_says_and_nothing_else(row: Refusal) -> None:
    for terms in combinations(row.when):
        words = {term.word: value_for(term, holds=True) for term in terms}
        recipe, given = example(in_effect(words))
        facts = with_effect(facts_of(recipe, given))
        assert row in refusals(facts)
        line = row.line(facts)
        assert all(SAID.get(word, word).format(words[word]) in line for word in words)
        with pytest.raises(RecipeError):
            check_recipe(recipe, **given)
    for missed in row.when:
        others = tuple(term for term in row.when if term is not missed)
        kept = {term.word: value_for(term, holds=True) for term in combinations(others)[0]}
        spared = {term.word: value_for(term, holds=False) for term in missed.every}
        recipe, given = example(spared | kept)
        assert not row.holds(facts_of(recipe, given))


def test_an_error_says_the_words_why_and_what_to_do() -> None:
    recipe = recipe_with("exchange.update_at=shards synchrony.mode=stale")
    (row,) = refusals(facts_of(recipe, {}))
    words = "exchange.update_at = shards with synchrony.mode = stale"
    with refused(RecipeError, [f"{words}: {row.because}; {row.instead}"]):
        check_recipe(recipe)


def test_a_row_is_there_once() -> None:
    every = [terms for row in REFUSALS for terms in combinations(row.when)]
    assert len(set(every)) == len(every)


COMBINATIONS, UNWRITTEN = 81, 2
"""Of words that are refused; of rows that nothing but missing code forbids. They only shrink."""


def test_what_is_refused_gets_less() -> None:
    assert num_combinations() <= COMBINATIONS
    assert sum(row.kind == "unwritten" for row in REFUSALS) <= UNWRITTEN
