"""Masks and shared weights on real ranks: the bits of one worker, and of a run without a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    PruneConfig,
    Recipe,
    ShareConfig,
    SolverConfig,
    TrainConfig,
)
from firecaffe.training.checkpoint import load_newest
from tests.kit.worlds import Trained, Training, changed, checkpoint_of, end

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
    "threshold": {"prune": PruneConfig({"again": 0.5}, {"head": 0.5})},
    "both": {"prune": PruneConfig(KEEP), "share": ShareConfig({"*": 2}, start="random")},
}
"""Other ways to prune and to share are in the matrix (`test_matrix.py`)."""


EVERYTHING = Training(validation=20, samples=70)


def saved(folder: Path, piece: str) -> dict[str, Tensor]:
    stored = load_newest(folder)[0].tensors
    names = [name for name in stored if name.startswith(f"{piece}/")]
    return {name.removeprefix(f"{piece}/"): stored[name] for name in names}


@pytest.mark.parametrize("name", WORDS)
def test_the_bits_of_one_worker_and_of_a_run_without_a_stop(trained: Trained, name: str) -> None:
    recipe = changed(RECIPE, **WORDS[name])
    alone, two = (trained(workers, recipe, EVERYTHING) for workers in (1, 2))
    resumed = trained(4, recipe, EVERYTHING, checkpoint_of(two, 3))
    assert end(resumed) == end(two) == end(alone)
    check_constrained(resumed.folder)


MODES: dict[str, tuple[int, Recipe]] = {
    "replicas, whose averages an encoder changes": (
        2,
        changed(
            RECIPE,
            exchange={"compressor": "top_k"},
            synchrony={"mode": "local", "replicas": 2, "local_steps": 2, "outer": "slowmo"},
        ),
    ),
    "a server": (1, changed(RECIPE, synchrony={"mode": "stale", "clock": "simulated"})),
    "a server in parts": (
        2,
        changed(RECIPE, synchrony={"mode": "asynchronous", "server": "sharded"}),
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_in_other_modes(trained: Trained, mode: str) -> None:
    workers, recipe = MODES[mode]
    check_constrained(trained(workers, changed(recipe, **WORDS["both"]), EVERYTHING).folder)


def check_constrained(folder: Path) -> None:
    """Weights, and their average, are zero where they are pruned, and have few values."""
    weights, averages = (saved(folder, piece) for piece in ("parameter", "ema"))
    masks, codes = (saved(folder, piece) for piece in ("mask", "code"))
    assert not all(mask.all() for mask in masks.values())
    for weight, mask in masks.items():
        assert torch.equal(weights[weight] != 0, mask)
        assert torch.equal(averages[weight] != 0, mask)
    for weight, code in codes.items():
        for values in (weights[weight], averages[weight]):
            pairs = {*zip(code.flatten().tolist(), values.flatten().tolist(), strict=True)}
            assert len(pairs) == len(torch.unique(code)) <= 2**2 + 1
            assert all((value == 0) == (number == 0) for number, value in pairs)


def test_a_training_begins_with_the_zeros_and_values_of_another(trained: Trained) -> None:
    """Rounds: pruned, then shared without a word about pruning, then as it is."""
    pruned = trained(1, changed(RECIPE, prune=PruneConfig(KEEP)), EVERYTHING).folder
    share = changed(RECIPE, model={"weights": str(pruned)}, share=ShareConfig({"*": 2}))
    shared = trained(2, share, EVERYTHING).folder
    before, after = saved(pruned, "ema"), saved(shared, "ema")
    for name in saved(shared, "code"):
        assert torch.equal(before[name] != 0, after[name] != 0)
    held = changed(RECIPE, model={"weights": str(shared)}, share=ShareConfig({"*": 2}, train=False))
    again = trained(1, held, EVERYTHING).folder
    for name in saved(again, "code"):
        assert torch.equal(saved(again, "parameter")[name], after[name])
