"""Replicas that are each held by a row of ranks: any layout comes to the bits of one worker."""

import dataclasses
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

import firecaffe
from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.errors import NotFiniteError, RecipeError
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.rank_times import explain
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.checks import preflight
from tests.ranks import test_layouts, test_stage_layouts
from tests.ranks.networks import small_data
from tests.world import Ranks

SYNCHRONY = SynchronyConfig("local", replicas=2, local_steps=3, outer="nesterov")
"""Steps 3 and 6 end an epoch, in which replica 1 has no samples."""

SOLVERS: dict[str, dict[str, Any]] = {
    "split": {"type": "lars", "base_lr": 2.0, "clip_gradients": 0.5},
    "stages": {},
}
"""With norms of whole gradients, and of layers; in stages caffe's momentum keeps numbers."""

RECIPES = {
    name: dataclasses.replace(
        recipe,
        train=dataclasses.replace(recipe.train, ema_decay=0.0, steps=8),
        solver=dataclasses.replace(recipe.solver, **SOLVERS[name]),
        synchrony=SYNCHRONY,
        checkpoint=CheckpointConfig(),
    )
    for name, recipe in (("split", test_layouts.RECIPE), ("stages", test_stage_layouts.RECIPE))
}

NETWORKS = {"split": test_layouts.Net, "stages": test_stage_layouts.Net}

HEAD = test_layouts.HEAD
LAYOUTS = {
    "split": {
        "data 2": ParallelConfig(2, 1, HEAD, 4),
        "model 2": ParallelConfig(1, 2, HEAD, 4),
        "2 x 2": ParallelConfig(2, 2, HEAD, 4),
    },
    "stages": {
        "data 2": ParallelConfig(2),
        "2 stages": ParallelConfig(stages=["middle.3"]),
        "4 stages": ParallelConfig(stages=["middle", "middle.3", "middle.6"]),
        "2 x 2": ParallelConfig(2, stages=["middle"]),
    },
}
ALONE = {"split": ParallelConfig(split=HEAD, parts=4), "stages": ParallelConfig()}
CASES = [("split", "2 x 2"), ("split", "model 2"), ("stages", "2 x 2"), ("stages", "4 stages")]

WORDS: dict[str, dict[str, Any]] = {
    "slowmo": {"outer": "slowmo", "inner_momentum": "zero"},
    "synchronous first": {"warm_steps": 2, "inner_momentum": "average"},
    "overlap": {"overlap_steps": 1, "replicas": 4},
    "fragments": {"fragments": 3, "inner_momentum": "average"},
    "fragments beside": {"fragments": 3, "local_steps": 7, "overlap_steps": 1},
}


def fit(
    kind: str,
    parallel: ParallelConfig,
    words: dict[str, Any],
    folder: str,
    every: int = 0,
    resume: str | None = None,
    every_s: float = 0.0,
    codec: str = "none",
) -> firecaffe.Result:
    recipe = RECIPES[kind]
    recipe = dataclasses.replace(
        recipe,
        exchange=ExchangeConfig(compressor=codec),
        parallel=parallel,
        synchrony=dataclasses.replace(recipe.synchrony, **words),
        checkpoint=CheckpointConfig(every, every_s, keep_last=0),
        run=RunConfig(folder=folder, tensorboard=False),
    )
    sets = small_data(68), small_data(30, 1)
    more: Any = {"validation_set": small_data(20, 2)} if kind == "stages" else {}
    return firecaffe.train(recipe, NETWORKS[kind], *sets, resume=resume, **more)


def workers(parallel: ParallelConfig) -> int:
    return max(1, parallel.data) * parallel.row_size


def trained(
    ranks: Ranks,
    kind: str,
    parallel: ParallelConfig,
    words: dict[str, Any],
    folder: Path,
    *more: Any,
) -> firecaffe.Result:
    results = ranks.shared(workers(parallel), fit, kind, parallel, words, str(folder), *more)
    assert len({(each.state_sha256, each.weights_sha256, each.test_loss) for each in results}) == 1
    assert not any(each.drifted_ranks or each.identity_doubts for each in results)
    result: firecaffe.Result = results[0]
    return result


Run = Callable[[str, str], tuple[firecaffe.Result, Path]]


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A layout's run, from its first step to its last, trained once; and its folder, with a
    checkpoint after each average.
    """
    folder = tmp_path_factory.mktemp("layouts")

    @cache
    def of(kind: str, name: str) -> tuple[firecaffe.Result, Path]:
        parallel, own = layouts_of(kind)[name], folder / f"{kind} {name}"
        return trained(ranks, kind, parallel, {}, own, 1), own

    return of


def layouts_of(kind: str) -> dict[str, ParallelConfig]:
    return {"alone": ALONE[kind], **LAYOUTS[kind]}


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_any_layout(run: Run, kind: str, name: str) -> None:
    """One row that hosts both replicas, or two of one each."""
    (expected, _), (found, folder) = run(kind, "alone"), run(kind, name)
    assert [row["loss"] for row in found.history] == [row["loss"] for row in expected.history]
    assert found.weights_sha256 == expected.weights_sha256
    assert found.state_sha256 == expected.state_sha256
    assert (found.test_loss, found.metrics) == (expected.test_loss, expected.metrics)
    record = read_run_file(folder, "result.json")
    assert record["synchrony"] == {"replicas": 2, "synchronous_steps": 0, "averages": 3}
    waits = [rank.waits_s for rank in explain(folder, in_rounds=True).ranks]
    assert all(("activations" in each) == (kind == "split") for each in waits)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("split", "slowmo"),
        ("stages", "fragments beside"),
        pytest.param("stages", "synchronous first", marks=SLOW),
        pytest.param("split", "overlap", marks=SLOW),
        pytest.param("stages", "fragments", marks=SLOW),
        pytest.param("stages", "slowmo", marks=SLOW),
        pytest.param("split", "synchronous first", marks=SLOW),
        pytest.param("stages", "overlap", marks=SLOW),
        pytest.param("split", "fragments", marks=SLOW),
        pytest.param("split", "fragments beside", marks=SLOW),
    ],
)
def test_any_words(ranks: Ranks, kind: str, name: str, tmp_path: Path) -> None:
    words = WORDS[name]
    expected = trained(ranks, kind, ALONE[kind], words, tmp_path / "alone")
    found = trained(ranks, kind, LAYOUTS[kind]["2 x 2"], words, tmp_path / "2 x 2")
    assert found.state_sha256 == expected.state_sha256
    assert found.loss == expected.loss


CHAINS = {
    "split": [("2 x 2", "model 2"), ("data 2", "alone")],
    "stages": [("2 x 2", "2 stages"), ("4 stages", "data 2")],
}
"""A layout that goes on from one worker's step 3, and one that goes on from its step 5."""


@pytest.mark.parametrize("kind", ["split", pytest.param("stages", marks=SLOW)])
def test_a_layout_goes_on_with_an_average_under_way(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    """The checkpoint has the weights of each replica."""
    words, layouts = WORDS["fragments beside"], layouts_of(kind)
    alone = tmp_path / "whole"
    expected = trained(ranks, kind, ALONE[kind], words, alone, 1).state_sha256
    for names in CHAINS[kind]:
        before = alone
        for step, name in zip((3, 5), names, strict=True):
            saved = str(before / f"checkpoints/step-{step:08}")
            before = tmp_path / name
            found = trained(ranks, kind, layouts[name], words, before, 1, saved)
            assert found.state_sha256 == expected, name


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("split", "one_bit"),
        pytest.param("stages", "int8", marks=SLOW),
        pytest.param("split", "int8", marks=SLOW),
        pytest.param("stages", "one_bit", marks=SLOW),
    ],
)
def test_encoded_averages(ranks: Ranks, kind: str, codec: str, tmp_path: Path) -> None:
    """Of three fragments; what was kept back goes on in another layout."""
    words = WORDS["fragments"]
    alone = trained(ranks, kind, ALONE[kind], words, tmp_path / "alone", 0, None, 0.0, codec)
    plain = trained(ranks, kind, ALONE[kind], words, tmp_path / "plain")
    assert alone.state_sha256 != plain.state_sha256
    layout, other = LAYOUTS[kind]["2 x 2"], LAYOUTS[kind]["data 2"]
    found = trained(ranks, kind, layout, words, tmp_path / "run", 3, None, 0.0, codec)
    assert found.state_sha256 == alone.state_sha256
    before = str(min((tmp_path / "run/checkpoints").glob("step-*")))
    on = trained(ranks, kind, other, words, tmp_path / "on", 0, before, 0.0, codec)
    assert on.state_sha256 == alone.state_sha256


@pytest.mark.parametrize("kind", ALONE)
def test_a_vote_of_one_rank_is_heard_in_all_columns(
    ranks: Ranks, run: Run, kind: str, tmp_path: Path
) -> None:
    """Rank 0 alone looks at the time, and asks for a checkpoint after each average."""
    often = 0, None, 1e-6
    found = trained(ranks, kind, LAYOUTS[kind]["2 x 2"], {}, tmp_path / "run", *often)
    assert found.state_sha256 == run(kind, "alone")[0].state_sha256
    saved = sorted(each.name for each in (tmp_path / "run/checkpoints").glob("step-*"))
    assert saved == ["step-00000003", "step-00000006", "step-00000008"]


def diverge(kind: str, parallel: ParallelConfig, folder: str) -> str:
    solver = SolverConfig(base_lr=1e30, momentum=0.9)
    recipe = dataclasses.replace(RECIPES[kind], solver=solver, parallel=parallel)
    train = dataclasses.replace(recipe.train, eval_every=0)
    run = RunConfig(folder=folder, tensorboard=False)
    recipe = dataclasses.replace(recipe, run=run, train=train)
    try:
        firecaffe.train(recipe, NETWORKS[kind], small_data(68), small_data(30, 1))
    except NotFiniteError as error:
        return str(error)
    return "it went on"


@pytest.mark.parametrize("kind", ALONE)
def test_a_number_that_is_not_finite_is_told_by_all_as_by_one(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    [expected] = ranks.shared(1, diverge, kind, ALONE[kind], str(tmp_path / "alone"))
    assert "of 2 replicas are not finite" in expected
    parallel = LAYOUTS[kind]["2 x 2"]
    assert ranks.shared(4, diverge, kind, parallel, str(tmp_path / "run")) == [expected] * 4


def one_part_diverges(parallel: ParallelConfig, folder: str) -> str:
    """Rank 1 alone finds that its gradients are not finite."""
    finite = GradientReducer.finite

    def found(reducer: GradientReducer) -> Tensor:
        return finite(reducer) & (os.environ["RANK"] != "1")

    with patch.object(GradientReducer, "finite", found):
        try:
            fit("split", parallel, {}, folder)
        except NotFiniteError as error:
            return str(error)
    return "it went on"


def test_a_part_that_is_not_finite_is_told_by_the_whole_row(ranks: Ranks, tmp_path: Path) -> None:
    parallel = LAYOUTS["split"]["model 2"]
    said = ranks.shared(2, one_part_diverges, parallel, str(tmp_path / "run"))
    assert len(set(said)) == 1
    assert "of 2 replicas are not finite" in said[0]


@pytest.mark.parametrize("parallel", [ParallelConfig(2, 2, {"ip1": "neurons"}), ParallelConfig(4)])
def test_rows_are_what_hosts_replicas_before_ranks_start(parallel: ParallelConfig) -> None:
    train = TrainConfig(32, 4, steps=6, device="cpu")
    lenet, generated = ModelConfig("lenet"), DataConfig("generated")
    recipe = Recipe(lenet, generated, train, synchrony=SYNCHRONY, parallel=parallel)
    if parallel.model == 2:
        preflight(check_recipe(recipe), 4)
        return
    with pytest.raises(RecipeError, match="replicas is 2 on 4 workers"):
        preflight(check_recipe(recipe), 4)
