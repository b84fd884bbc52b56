"""Masks and shared weights on real ranks: the bits of one worker, and of a run without a stop."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import firecaffe
from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    ModelConfig,
    PruneConfig,
    Recipe,
    RunConfig,
    ShareConfig,
    SolverConfig,
    TrainConfig,
)
from firecaffe.training.checkpoint import checkpoint_name, load_newest
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

# 8 micro-batches of 4 over 70 samples: steps 3 and 6 end an epoch with one micro-batch of 4, one of
# 2, and six that are empty.
RECIPE = Recipe(
    train=TrainConfig(32, 4, steps=8, seed=5, device="cpu", ema_decay=0.8, eval_every=3),
    solver=SolverConfig(base_lr=0.02, momentum=0.9, weight_decay=1e-3, decay_mult={"@vector": 0.0}),
    exchange=ExchangeConfig(bucket_bytes=1500),
    checkpoint=CheckpointConfig(every=3),
)
KEEP = {"*": 0.3, "again": 0.5}
WORDS: dict[str, dict[str, Any]] = {
    "magnitude": {"prune": PruneConfig(KEEP)},
    "threshold": {"prune": PruneConfig({"again": 0.5}, {"head": 0.5})},
    "gradual": {"prune": PruneConfig(KEEP, how="gradual", steps=6, every=2, scope="all")},
    "surgery": {"prune": PruneConfig(KEEP, how="surgery", steps=6, every=2)},
    "share": {"share": ShareConfig({"conv": 3, "again": 2}, start="random")},
    "both": {"prune": PruneConfig(KEEP), "share": ShareConfig({"*": 2})},
    "encoded": {"share": ShareConfig({"*": 2}), "exchange": ExchangeConfig(compressor="int8")},
    "clipped": {
        "prune": PruneConfig(KEEP, how="surgery", steps=6, every=2),
        "solver": SolverConfig("adam", base_lr=0.01, clip_gradients=0.05),
    },
}


def fit(recipe: Recipe, folder: str, resume: str | None = None) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    data = small_data(70), small_data(30, 1)
    return firecaffe.train(recipe, Everything, *data, resume=resume, validation_set=small_data(20))


def trained(
    ranks: Ranks, workers: int, recipe: Recipe, folder: Path, resume: str | None = None
) -> firecaffe.Result:
    results = ranks.shared(workers, fit, recipe, str(folder), resume)
    assert len({(each.state_sha256, each.weights_sha256) for each in results}) == 1
    result: firecaffe.Result = results[0]
    return result


def saved(folder: Path, piece: str) -> dict[str, Tensor]:
    stored = load_newest(folder)[0].tensors
    names = [name for name in stored if name.startswith(f"{piece}/")]
    return {name.removeprefix(f"{piece}/"): stored[name] for name in names}


Run = Callable[[str], tuple[firecaffe.Result, Path]]


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run by one worker with some of WORDS, trained once; and its folder."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def of(name: str) -> tuple[firecaffe.Result, Path]:
        recipe = dataclasses.replace(RECIPE, **WORDS[name])
        return trained(ranks, 1, recipe, folder / name), folder / name

    return of


@pytest.mark.parametrize("name", WORDS)
def test_the_bits_of_one_worker_and_of_a_run_without_a_stop(
    ranks: Ranks, run: Run, name: str, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(RECIPE, **WORDS[name])
    alone, _ = run(name)
    found = trained(ranks, 2, recipe, tmp_path / "2")
    middle = str(tmp_path / "2" / "checkpoints" / checkpoint_name(3))
    resumed = trained(ranks, 4, recipe, tmp_path / "resumed", middle)
    for each in (found, resumed):
        assert not each.identity_doubts
        assert each.state_sha256 == alone.state_sha256
        assert each.test_loss == alone.test_loss


def test_constraints_change_bits(ranks: Ranks, run: Run, tmp_path: Path) -> None:
    """The control: a run with the same other words and none of them ends in other weights."""
    free: dict[str, str] = {}
    for name, words in WORDS.items():
        others = {word: each for word, each in words.items() if word not in ("prune", "share")}
        if (key := str(others)) not in free:
            recipe = dataclasses.replace(RECIPE, **others)
            free[key] = trained(ranks, 1, recipe, tmp_path / name).weights_sha256
        assert run(name)[0].weights_sha256 != free[key], name


@pytest.mark.parametrize("name", ["magnitude", "threshold", "gradual", "surgery"])
def test_pruned_weights_are_zero_and_so_is_their_average(run: Run, name: str) -> None:
    _, folder = run(name)
    masks, weights, averages = (saved(folder, each) for each in ("mask", "parameter", "ema"))
    assert sum(int(mask.sum()) for mask in masks.values()) < sum(m.numel() for m in masks.values())
    for weight, mask in masks.items():
        assert torch.equal(weights[weight] != 0, mask)
        assert torch.equal(averages[weight] != 0, mask)


@pytest.mark.parametrize("name", ["share", "both", "encoded"])
def test_shared_weights_have_few_values_and_so_has_their_average(run: Run, name: str) -> None:
    _, folder = run(name)
    codes, weights, averages = (saved(folder, each) for each in ("code", "parameter", "ema"))
    for weight, code in codes.items():
        for found in (weights[weight], averages[weight]):
            pairs = {*zip(code.flatten().tolist(), found.flatten().tolist(), strict=True)}
            assert len(pairs) == len(torch.unique(code)) <= 2**3 + 1
            assert all((value == 0) == (number == 0) for number, value in pairs)


def test_a_training_begins_with_the_zeros_and_values_of_another(
    ranks: Ranks, run: Run, tmp_path: Path
) -> None:
    """Rounds: pruned, then shared without a word about pruning, then as it is."""
    _, pruned = run("magnitude")
    model = ModelConfig(weights=str(pruned))
    share = dataclasses.replace(RECIPE, model=model, share=ShareConfig({"*": 2}))
    trained(ranks, 2, share, tmp_path / "shared")
    before, after = (saved(each, "ema") for each in (pruned, tmp_path / "shared"))
    for name in saved(tmp_path / "shared", "code"):
        assert torch.equal(before[name] != 0, after[name] != 0)
    model = ModelConfig(weights=str(tmp_path / "shared"))
    held = ShareConfig({"*": 2}, train=False)
    again = dataclasses.replace(RECIPE, model=model, share=held)
    trained(ranks, 1, again, tmp_path / "again")
    for name in saved(tmp_path / "again", "code"):
        assert torch.equal(saved(tmp_path / "again", "parameter")[name], after[name])
