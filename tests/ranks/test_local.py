"""Replicas that train by themselves: workers change no bit, and the rules are those of others."""

import dataclasses
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import firecaffe
from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
)
from firecaffe.schema import read_rows
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.local.replica_steps import Average, LocalStepper
from firecaffe.training.local.sums import LocalOutcome
from tests.ranks.networks import Everything, small_data
from tests.ranks.test_invariance import RECIPE as INVARIANT
from tests.ranks.test_stage_layouts import loud
from tests.world import Ranks

# 12 micro-batches of 4 over 100 samples, with BatchNorm, dropout and clipping. Steps 3, 6 and 9 end
# an epoch with 4 samples, all of replica 0; and the last round is cut short.
RECIPE = dataclasses.replace(
    INVARIANT,
    train=dataclasses.replace(INVARIANT.train, global_batch_size=48, steps=10),
    synchrony=SynchronyConfig("local", replicas=4, local_steps=4),
)

WORDS: dict[str, dict[str, Any]] = {
    "average": {},
    "six replicas": {"replicas": 6},
    "slowmo": {"outer": "slowmo", "inner_momentum": "zero"},
    "nesterov": {"outer": "nesterov", "local_steps": 2},
    "overlap": {"outer": "nesterov", "overlap_steps": 2, "local_steps": 3, "replicas": 12},
    "synchronous first": {"warm_steps": 3, "local_steps": 2},
    "averaged moments": {"inner_momentum": "average"},
    "fragments": {"fragments": 3, "inner_momentum": "average", "local_steps": 5, "warm_steps": 1},
    "fragments beside": {"fragments": 2, "overlap_steps": 1, "outer": "nesterov"},
}


def with_words(recipe: Recipe, words: dict[str, Any]) -> Recipe:
    return dataclasses.replace(recipe, synchrony=dataclasses.replace(recipe.synchrony, **words))


def fit(recipe: Recipe, folder: str, resume: str | None = None) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    return firecaffe.train(recipe, Everything, small_data(100), small_data(30, 1), resume=resume)


def state(ranks: Ranks, world_size: int, recipe: Recipe, folder: Path) -> str:
    results = ranks.shared(world_size, fit, recipe, str(folder))
    assert len({(each.state_sha256, tuple(each.drifted_ranks)) for each in results}) == 1
    return str(results[0].state_sha256)


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The states that one worker ends with, by the names of WORDS."""
    folder = tmp_path_factory.mktemp("alone")
    return {
        name: state(ranks, 1, with_words(RECIPE, words), folder / name)
        for name, words in WORDS.items()
    }


FIRST, SECOND = 4, 3
"""Workers before a resume and after it."""


@pytest.fixture(scope="module")
def on_four(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the run by FIRST workers with those of WORDS, trained once, with all its
    checkpoints.
    """
    folder = tmp_path_factory.mktemp("four")

    @cache
    def of(name: str) -> Path:
        recipe = with_words(RECIPE, WORDS[name])
        often = dataclasses.replace(recipe, checkpoint=CheckpointConfig(every=1, keep_last=0))
        (folder / f"{name}.txt").write_text(state(ranks, FIRST, often, folder / name))
        return folder / name

    return of


@pytest.mark.parametrize("name", WORDS)
def test_any_number_of_workers(
    ranks: Ranks,
    alone: dict[str, str],
    on_four: Callable[[str], Path],
    name: str,
    tmp_path: Path,
) -> None:
    """Also if they host unequal numbers of replicas: of four on three workers, of six on four."""
    recipe = with_words(RECIPE, WORDS[name])
    assert on_four(name).with_suffix(".txt").read_text() == alone[name]
    sizes = {"average": (2, 3), "fragments": (3,)}.get(name, ())
    found = [state(ranks, size, recipe, tmp_path / str(size)) for size in sizes]
    assert found == [alone[name]] * len(sizes)


def test_words_decide_bits(alone: dict[str, str]) -> None:
    assert len(set(alone.values())) == len(WORDS)


@pytest.mark.parametrize("name", WORDS)
def test_a_resume_on_another_number_of_workers_changes_no_bit(
    ranks: Ranks,
    alone: dict[str, str],
    on_four: Callable[[str], Path],
    name: str,
    tmp_path: Path,
) -> None:
    """From every third checkpoint on the way: after averages, between them if they are under way,
    and among the synchronous steps. So the replicas of a worker that is lost go to others.
    """
    recipe = with_words(RECIPE, WORDS[name])
    saved = sorted((on_four(name) / "checkpoints").glob("step-*"))
    assert len(saved) > 2
    for checkpoint in saved[:-1:3]:
        folder = tmp_path / checkpoint.name
        (result, *_) = ranks.shared(SECOND, fit, recipe, str(folder), str(checkpoint))
        assert result.state_sha256 == alone[name], checkpoint.name


def test_numbers_of_optimizers_go_along(ranks: Ranks, tmp_path: Path) -> None:
    """Caffe's momentum is scaled by the rate of the update before, which is no tensor."""
    solver = SolverConfig(
        momentum_form="caffe", momentum_correction=True, lr_policy="exp", gamma=0.7
    )
    recipe = dataclasses.replace(RECIPE, solver=solver, checkpoint=CheckpointConfig(every=4))
    whole = state(ranks, 1, recipe, tmp_path / "whole")
    (saved, *_) = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))
    (result, *_) = ranks.shared(2, fit, recipe, str(tmp_path / "rest"), str(saved))
    assert result.state_sha256 == whole


def test_replicas_count_their_own_batches(ranks: Ranks, tmp_path: Path) -> None:
    """Replica 0 alone has samples in the third step; what is evaluated counts as it does."""
    recipe = with_words(RECIPE, {"overlap_steps": 1})
    recipe = dataclasses.replace(recipe, checkpoint=CheckpointConfig(every=1, keep_last=0))
    ranks.shared(2, fit, recipe, str(tmp_path / "run"))
    saved = load_newest(tmp_path / "run" / "checkpoints" / "step-00000005")[0]
    of_replicas = load_file(saved.piece_files["replica"])
    name = "buffer/norm.num_batches_tracked"
    assert [int(of_replicas[f"{number}/{name}"]) for number in range(4)] == [5, 4, 4, 4]
    assert saved.tensors[name] == 4  # the average was taken a step before


@pytest.mark.parametrize(
    ("compressor", "name"), [("int8", "overlap"), ("top_k", "fragments beside")]
)
def test_codecs_encode_replicas_and_not_workers(
    ranks: Ranks, compressor: str, name: str, tmp_path: Path
) -> None:
    """What they keep back is of replicas' differences; and goes along with a resume."""
    exchange = dataclasses.replace(RECIPE.exchange, compressor=compressor)
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    recipe = with_words(recipe, {**WORDS[name], "replicas": 6})
    often = dataclasses.replace(recipe, checkpoint=CheckpointConfig(every=4))
    found = [state(ranks, size, often, tmp_path / str(size)) for size in (1, 4)]
    (saved, *_) = sorted((tmp_path / "4" / "checkpoints").glob("step-*"))
    (result, *_) = ranks.shared(3, fit, recipe, str(tmp_path / "rest"), str(saved))
    assert {*found, result.state_sha256} == {found[0]}


@pytest.mark.parametrize("name", ["average", "fragments beside"])
def test_a_moving_average_is_that_of_all_replicas(ranks: Ranks, name: str, tmp_path: Path) -> None:
    train = dataclasses.replace(RECIPE.train, ema_decay=0.8)
    recipe = with_words(dataclasses.replace(RECIPE, train=train), WORDS[name])
    often = dataclasses.replace(recipe, checkpoint=CheckpointConfig(every=1, keep_last=0))
    assert state(ranks, 3, recipe, tmp_path / "3") == state(ranks, 1, often, tmp_path / "1")
    if name == "average":  # by the weights after each average
        found = []
        for step in (4, 8, 10):
            saved = load_newest(tmp_path / f"1/checkpoints/step-{step:08}")[0]
            names = [key.removeprefix("ema/") for key in saved.tensors if key.startswith("ema/")]
            kinds = ("ema", "parameter")
            found.append([{key: saved.tensors[f"{kind}/{key}"] for key in names} for kind in kinds])
        (expected, first), *others = found
        assert all(each.equal(first[key]) for key, each in expected.items())
        for (average, weights), steps in zip(others, (4, 2), strict=True):
            for key, each in average.items():
                torch.testing.assert_close(each, expected[key].lerp(weights[key], 1 - 0.8**steps))
            expected = average


def fit_loud(recipe: Recipe, folder: str, resume: str | None = None) -> firecaffe.Result:
    """By a loss whose gradients overflow in float16."""
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    sets = small_data(100), small_data(30, 1)
    return firecaffe.train(recipe, Everything, *sets, loss=loud, resume=resume)


@pytest.mark.parametrize("name", ["average", "fragments beside", "synchronous first"])
def test_each_replica_has_a_loss_scale_of_its_own(ranks: Ranks, name: str, tmp_path: Path) -> None:
    train = dataclasses.replace(RECIPE.train, autocast="float16")
    recipe = with_words(dataclasses.replace(RECIPE, train=train), WORDS[name])
    often = dataclasses.replace(recipe, checkpoint=CheckpointConfig(every=1, keep_last=0))
    (alone,) = ranks.shared(1, fit_loud, often, str(tmp_path / "1"))
    saved = sorted((tmp_path / "1/checkpoints").glob("step-*"))
    last = load_file(load_newest(saved[-1])[0].piece_files["replica"])
    kept = [json.loads(last[f"{number}/scale"].numpy().tobytes()) for number in range(4)]
    assert all(each["scale"] < 65_536 for each in kept)
    # Replica 0 alone has samples in an epoch's last step.
    assert kept[0]["_growth_tracker"] > kept[1]["_growth_tracker"]
    for size, resume in ((3, None), (2, str(saved[len(saved) // 2]))):
        found = ranks.shared(size, fit_loud, recipe, str(tmp_path / str(size)), resume)
        assert {each.state_sha256 for each in found} == {alone.state_sha256}


@pytest.mark.parametrize("algorithm", ["halving_doubling", "sharded_parameter_server"])
def test_any_exchange_in_tree_order(
    ranks: Ranks, alone: dict[str, str], algorithm: str, tmp_path: Path
) -> None:
    exchange = ExchangeConfig(algorithm=algorithm, bucket_bytes=500, shared_memory=False)
    recipe = dataclasses.replace(RECIPE, exchange=exchange)
    assert state(ranks, 4, recipe, tmp_path / "run") == alone["average"]


def test_with_one_step_a_round_it_is_synchronous_to_rounding(ranks: Ranks, tmp_path: Path) -> None:
    """Plain SGD on as many workers as replicas; BatchNorm's statistics too."""
    plain = dataclasses.replace(
        RECIPE,
        train=dataclasses.replace(RECIPE.train, steps=4),
        data=DataConfig(hold_out=0.04),  # two whole steps an epoch
        solver=SolverConfig(base_lr=0.1, momentum=0.0),
    )
    modes: dict[str, dict[str, Any]]
    modes = {"local": {"local_steps": 1}, "every_step": {"mode": "every_step"}}
    found = {}
    for name, words in modes.items():
        ranks.shared(4, fit, with_words(plain, words), str(tmp_path / name))
        tensors = load_newest(tmp_path / name)[0].tensors
        found[name] = {key: each for key, each in tensors.items() if key[:2] in ("pa", "bu")}
    assert found["local"].keys() == found["every_step"].keys()
    assert any("running_var" in key for key in found["local"])
    for key, each in found["every_step"].items():
        torch.testing.assert_close(found["local"][key], each, rtol=1e-5, atol=1e-6, msg=key)
    start = Everything().conv.weight
    assert not torch.equal(found["local"]["parameter/conv.weight"], start)


def test_what_is_due_within_a_round_is_done_at_its_end(ranks: Ranks, tmp_path: Path) -> None:
    """And every step has its row."""
    recipe = dataclasses.replace(
        RECIPE,
        train=dataclasses.replace(RECIPE.train, eval_every=3),
        data=DataConfig(hold_out=0.1),
        checkpoint=CheckpointConfig(every=2, keep_last=0),
    )
    rows = {}
    for name, words in {"waits": {}, "overlap": {"overlap_steps": 1}}.items():
        folder = tmp_path / name
        ranks.shared(2, fit, with_words(recipe, words), str(folder))
        rows[name] = list(read_rows(folder / "metrics.jsonl", dict))
        whole = [4, 8, 10] if name == "waits" else [5, 9, 10]
        of_kind = {
            kind: [row["step"] for row in rows[name] if row["kind"] == kind]
            for kind in ("train", "validation")
        }
        assert of_kind == {"train": list(range(1, 11)), "validation": whole}
        saved = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        assert [int(path[5:]) for path in saved] == whole


def test_an_average_costs_what_a_gradient_does(ranks: Ranks, tmp_path: Path) -> None:
    """So a step costs an Hth of it, but for the losses of a round. In two fragments, an average
    costs half: of ten steps, after 2, 5 and 7, and twice after 10.
    """
    modes: dict[str, dict[str, Any]]
    halves = {"local_steps": 5, "fragments": 2}
    modes = {"local": {"local_steps": 5}, "halves": halves, "all": {"mode": "every_step"}}
    sent = {}
    recipe = dataclasses.replace(
        RECIPE,
        train=dataclasses.replace(RECIPE.train, global_batch_size=64),
        exchange=ExchangeConfig("tree", shared_memory=False),
    )
    for name, words in modes.items():
        results = ranks.shared(4, fit, with_words(recipe, words), str(tmp_path / name))
        sent[name] = [each or 0.0 for each in results[0].sent_bytes_per_step_by_rank]
    for local, every_step in zip(sent["local"], sent["all"], strict=True):
        assert local == pytest.approx(every_step / 5, rel=0.2)
    for half, every_step in zip(sent["halves"], sent["all"], strict=True):
        assert half == pytest.approx(5 / 2 / 10 * every_step, rel=0.2)


def fit_while_held(recipe: Recipe, folder: str, pipe: str) -> str:
    """Rank 1 brings its first differences once rank 0 has begun the step after."""
    begin, train = Average.begin, LocalStepper._train

    def held(average: Average, *sums: Any) -> None:
        if os.environ["RANK"] == "1" and Path(pipe).exists():
            Path(pipe).read_text()
            Path(pipe).unlink()
        begin(average, *sums)

    def told(stepper: LocalStepper, step: int, rate: float) -> LocalOutcome:
        if os.environ["RANK"] == "0" and step == recipe.synchrony.local_steps:
            Path(pipe).write_text("")
        return train(stepper, step, rate)

    with patch.object(Average, "begin", held), patch.object(LocalStepper, "_train", told):
        return str(fit(recipe, folder).state_sha256)


def test_replicas_go_on_while_their_average_is_under_way(
    ranks: Ranks, alone: dict[str, str], tmp_path: Path
) -> None:
    """If they did not, rank 0 would wait for rank 1 and it for rank 0, until the time is over."""
    recipe = with_words(RECIPE, WORDS["overlap"])
    exchange = dataclasses.replace(recipe.exchange, timeout_s=60)
    recipe = dataclasses.replace(recipe, exchange=exchange)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = ranks.run(2, fit_while_held, recipe, str(tmp_path / "run"), str(pipe))
    assert found == [alone["overlap"]] * 2
