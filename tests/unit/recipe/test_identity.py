"""Which words decide the bits of a training, and which are free."""

import dataclasses
from typing import Any

import pytest

from firecaffe import (
    ParallelConfig,
    PruneConfig,
    Recipe,
    ShareConfig,
    SolverConfig,
    SynchronyConfig,
)
from firecaffe.compression import prune_notes
from firecaffe.exchange.route import FOLD, SCHEDULE, find_route
from firecaffe.recipe.sections import flatten, identity, search_id
from firecaffe.solvers.config import needs_norms
from tests.unit.recipe.other import APART, OTHER
from tests.unit.recipe.test_ranks import HEAD, TRICK

FREE = set(
    """
    data.path data.decode_threads data.cache data.cache_bytes train.device train.eval_every
    train.stop_after train.eval_batch_size train.steps train.epochs exchange.algorithm
    exchange.bucket_bytes exchange.update_at exchange.shared_memory exchange.timeout_s
    exchange.silent_s checkpoint.every checkpoint.every_s checkpoint.keep_last checkpoint.best
    run.folder run.tensorboard run.loggers run.digests run.cluster run.tuned task.metrics
    task.metric synchrony.mode synchrony.shares synchrony.shares_every synchrony.in_flight
    synchrony.server
    """.split()
)
"""What changes no bit of a training up to a given step."""

OF_A_SERVER = {f"synchrony.{word.name}" for word in dataclasses.fields(SynchronyConfig)} - FREE
"""What decides bits in a mode with a server, or with replicas, alone."""


def test_every_word_is_free_or_decides() -> None:
    found = identity(OTHER, 70).keys() - {*APART}
    assert found == flatten(OTHER).keys() - FREE - OF_A_SERVER - {*APART}
    served = identity(OTHER.replace("synchrony.mode", "stale"), 70)
    # Who waits at the end depends on where that is.
    more = {"synchrony.mode", "train.steps", *OF_A_SERVER}
    assert served.keys() - identity(OTHER, 70).keys() == more


@pytest.mark.parametrize("name", [name for name in flatten(OTHER) if name not in APART])
def test_identity(name: str) -> None:
    """Each word changed alone, from the default to the other value."""
    start = Recipe()
    if name == "exchange.compressor_level":  # without a compressor it means nothing
        start = start.replace("exchange.compressor", "int8")
    if name in OF_A_SERVER:
        start = start.replace("synchrony.mode", "asynchronous")
    if name.startswith("prune."):  # without layers the others mean nothing
        start = start.replace("prune.keep", {"*": 0.5})
    other = {**flatten(OTHER), "data.order": "shards"}
    found, default = identity(start.replace(name, other[name]), 100), identity(start, 100)
    words = [*default, *(found.keys() - default.keys())]
    differs = [word for word in words if found.get(word) != default.get(word)]
    if name == "exchange.compressor":
        assert found.keys() - default.keys() == {"exchange.compressor_level"}
        differs.remove("exchange.compressor_level")
    assert differs == ([] if name in FREE else [name])


def test_the_number_of_steps_decides_only_with_poly() -> None:
    assert "train.steps" not in identity(Recipe(), 100)
    poly = Recipe().replace("solver.lr_policy", "poly")
    assert identity(poly, 100)["train.steps"] == 100
    # However it was said: 100 steps, or epochs that come to 100.
    in_epochs = poly.replace("train.epochs", 4)
    assert identity(in_epochs, 100) == identity(poly.replace("train.steps", 100), 100)
    assert identity(poly, 100) != identity(poly, 101)


PRUNE, SHARE = PruneConfig({"*": 0.1}), ShareConfig({"*": 4})
SHARED: list[dict[str, Any]] = [
    *({"bits": {"*": 4}}, {"bits": {"*": 5}}, {"bits": {"*": 4}, "start": "density"}),
    *({"bits": {"*": 4}, "train": False}, {"bits": {"*": 4}, "gradient": "mean"}),
]


def test_masks_and_shared_values_decide_bits_if_they_are_there() -> None:
    without = identity(Recipe(), 10)
    pruned, shared = identity(Recipe(prune=PRUNE), 10), identity(Recipe(share=SHARE), 10)
    assert {*pruned} - {*without} == {f"prune.{field.name}" for field in dataclasses.fields(PRUNE)}
    assert {*shared} - {*without} == {f"share.{field.name}" for field in dataclasses.fields(SHARE)}
    others = [
        *(Recipe(), Recipe(prune=PRUNE), Recipe(prune=PruneConfig({}, {"*": 0.1}))),
        *(Recipe(share=ShareConfig(**words)) for words in SHARED),
    ]
    assert len({search_id(recipe) for recipe in others}) == len(others)
    assert len({str(identity(recipe, 10)) for recipe in others}) == len(others)


def test_a_training_that_ends_before_its_masks_are_final() -> None:
    gradual = PruneConfig({"*": 0.1}, how="gradual", steps=10)
    assert prune_notes(gradual, 10) == prune_notes(PRUNE, 1) == []
    [note] = prune_notes(gradual, 9)
    assert "prune.steps is 10" in note


def test_shards_go_by_fold_to_their_owners_and_decide_no_bit() -> None:
    shards = Recipe().replace("exchange.update_at", "shards")
    assert identity(shards, 10) == identity(Recipe(), 10)
    route = find_route("tree", 8, 4, 4, shared_memory=True, to_owners=True)
    assert (route.way, route.to_owners, route.is_invariant) == (FOLD, True, True)
    assert not route.shares_memory
    assert route.description == "fold to the owners of shards"
    alone = find_route("tree", 8, 1, to_owners=True)
    assert (alone.way, alone.to_owners) == (SCHEDULE, False)


def test_which_updates_need_norms() -> None:
    needs = {kind: needs_norms(SolverConfig(type=kind)) for kind in ("lamb", "lars", "adamw")}
    assert needs == {"lamb": True, "lars": True, "adamw": False}
    assert needs_norms(SolverConfig(clip_gradients=1.0))


def of(*words: Any) -> dict[str, Any]:
    """What decides bits, of these words of [parallel]."""
    decides = identity(Recipe(parallel=ParallelConfig(*words)), 10)
    return {name: value for name, value in decides.items() if name.startswith("parallel.")}


def test_parts_decide_bits_and_workers_do_not() -> None:
    assert of() == of(2, 1) == {}
    split = {"parallel.split": HEAD, "parallel.parts": 4}
    assert of(0, 4, HEAD) == of(2, 2, HEAD, 4) == of(1, 1, HEAD, 4, TRICK) == split
    assert of(0, 2, HEAD) == {**split, "parallel.parts": 2}
    # It chooses the layers if nobody else does.
    assert of(1, 2, {}, 2, TRICK)["parallel.scheme"] == TRICK
    # Nor do stages.
    stages: Any = {"stages": ["a", "b", "c"]}
    in_stages = Recipe(parallel=ParallelConfig(2, **stages, pipeline="gpipe"))
    assert identity(in_stages, 10) == identity(Recipe(), 10)
    both = Recipe(parallel=ParallelConfig(0, 2, HEAD, 4, **stages))
    assert identity(both, 10) == identity(Recipe(parallel=ParallelConfig(1, 1, HEAD, 4)), 10)
