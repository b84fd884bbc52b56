"""Replicas that train by themselves: workers change no bit, and the rules are those of others.

The outer optimizer nesterov, fragments, averages under way, momentums, codecs and exchanges are in
the matrix too (`test_matrix.py`).
"""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from firecaffe import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    Recipe,
    SolverConfig,
    SynchronyConfig,
)
from firecaffe.schema import read_rows
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.modes.local.replica_steps import Average, LocalOutcome, LocalStepper
from tests.kit.worlds import EVERYTHING, Trained, Training, changed, checkpoint_of, end
from tests.ranks.networks import Everything
from tests.ranks.test_invariance import RECIPE as INVARIANT
from tests.ranks.test_stage_layouts import loud
from tests.world import Ranks

# 12 micro-batches of 4 over 100 samples, with BatchNorm, dropout and clipping. Steps 3, 6 and 9 end
# an epoch with 4 samples, all of replica 0; and the last round is cut short.
RECIPE = changed(
    INVARIANT,
    train={"global_batch_size": 48, "steps": 10},
    synchrony=SynchronyConfig("local", replicas=4, local_steps=4),
    checkpoint=CheckpointConfig(every=1, keep_last=0),
)

WORDS: dict[str, dict[str, Any]] = {
    "average": {},
    "six replicas": {"replicas": 6},
    "slowmo": {"outer": "slowmo", "inner_momentum": "zero"},
    "overlap": {"outer": "nesterov", "overlap_steps": 2, "local_steps": 3, "replicas": 12},
    "fragments beside": {"fragments": 2, "overlap_steps": 1, "outer": "nesterov"},
}
RECIPES = {name: changed(RECIPE, synchrony=words) for name, words in WORDS.items()}


@pytest.mark.parametrize("name", WORDS)
def test_workers_before_and_after_a_resume_change_no_bit(trained: Trained, name: str) -> None:
    """Also if they host unequal numbers of replicas: of four on three workers, of six on four. From
    every third checkpoint: after averages, and between them if they are under way. So the replicas
    of a worker that is lost go to others.
    """
    recipe = RECIPES[name]
    alone, four = trained(1, recipe), trained(4, recipe)
    assert end(four) == end(alone)
    saved = sorted((four.folder / "checkpoints").glob("step-*"))
    assert len(saved) > 2
    for checkpoint in saved[:-1:3]:
        assert end(trained(3, recipe, resume=checkpoint)) == end(alone), checkpoint.name


def test_words_decide_bits(trained: Trained) -> None:
    assert len({trained(1, each).state_sha256 for each in RECIPES.values()}) == len(WORDS)


def test_numbers_of_optimizers_go_along(trained: Trained) -> None:
    """Caffe's momentum is scaled by the rate of the update before, which is no tensor."""
    recipe = changed(
        RECIPE,
        solver=SolverConfig(
            momentum_form="caffe", momentum_correction=True, lr_policy="exp", gamma=0.7
        ),
    )
    alone = trained(1, recipe)
    assert end(trained(2, recipe, resume=checkpoint_of(alone, 4))) == end(alone)


def test_replicas_count_their_own_batches(trained: Trained) -> None:
    """Replica 0 alone has samples in the third step; what is evaluated counts as it does."""
    result = trained(2, changed(RECIPE, synchrony={"overlap_steps": 1}))
    saved = load_newest(checkpoint_of(result, 5))[0]
    of_replicas = load_file(saved.piece_files["replica"])
    name = "buffer/norm.num_batches_tracked"
    assert [int(of_replicas[f"{number}/{name}"]) for number in range(4)] == [5, 4, 4, 4]
    assert saved.tensors[name] == 4  # the average was taken a step before


def test_a_codec_encodes_replicas_and_not_workers(trained: Trained) -> None:
    """What it keeps back is of replicas' differences, and goes along with a resume."""
    recipe = changed(
        RECIPES["fragments beside"],
        synchrony={"replicas": 6},
        exchange={"compressor": "top_k"},
        checkpoint=CheckpointConfig(every=4, keep_last=0),
    )
    alone, four = trained(1, recipe), trained(4, recipe)
    first = min((four.folder / "checkpoints").glob("step-*"))
    assert end(trained(3, recipe, resume=first)) == end(four) == end(alone)


def test_a_moving_average_is_that_of_all_replicas(trained: Trained) -> None:
    """By the weights after each average."""
    recipe = changed(RECIPE, train={"ema_decay": 0.8})
    alone = trained(1, recipe)
    assert end(trained(3, recipe)) == end(alone)
    found = []
    for step in (4, 8, 10):
        tensors = load_newest(checkpoint_of(alone, step))[0].tensors
        names = [key.removeprefix("ema/") for key in tensors if key.startswith("ema/")]
        kinds = ("ema", "parameter")
        found.append([{key: tensors[f"{kind}/{key}"] for key in names} for kind in kinds])
    (expected, first), *others = found
    assert all(each.equal(first[key]) for key, each in expected.items())
    for (average, weights), steps in zip(others, (4, 2), strict=True):
        for key, each in average.items():
            torch.testing.assert_close(each, expected[key].lerp(weights[key], 1 - 0.8**steps))
        expected = average


@pytest.mark.parametrize("words", [{}, {"warm_steps": 3, "local_steps": 2}], ids=["", "warm steps"])
def test_each_replica_has_a_loss_scale_of_its_own(trained: Trained, words: dict[str, Any]) -> None:
    """By a loss whose gradients overflow in float16."""
    recipe = changed(RECIPE, train={"autocast": "float16"}, synchrony=words)
    training = Training(loss=loud)
    alone = trained(1, recipe, training)
    saved = sorted((alone.folder / "checkpoints").glob("step-*"))
    last = load_file(load_newest(saved[-1])[0].piece_files["replica"])
    kept = [json.loads(last[f"{number}/scale"].numpy().tobytes()) for number in range(4)]
    assert all(each["scale"] < 65_536 for each in kept)
    # Replica 0 alone has samples in an epoch's last step.
    assert kept[0]["_growth_tracker"] > kept[1]["_growth_tracker"]
    assert end(trained(3, recipe, training)) == end(alone)
    assert end(trained(2, recipe, training, saved[len(saved) // 2])) == end(alone)


def test_with_one_step_a_round_it_is_synchronous_to_rounding(trained: Trained) -> None:
    """Plain SGD on as many workers as replicas; BatchNorm's statistics too."""
    plain = changed(
        RECIPE,
        train={"steps": 4},
        data=DataConfig(hold_out=0.04),  # two whole steps an epoch
        solver=SolverConfig(base_lr=0.1, momentum=0.0),
        synchrony={"local_steps": 1},
    )
    found = []
    for recipe in (plain, changed(plain, synchrony=SynchronyConfig())):
        tensors = load_newest(trained(4, recipe).folder)[0].tensors
        found.append({key: each for key, each in tensors.items() if key[:2] in ("pa", "bu")})
    local, every_step = found
    assert any("running_var" in key for key in local)
    torch.testing.assert_close(local, every_step, rtol=1e-5, atol=1e-6)
    assert not torch.equal(local["parameter/conv.weight"], Everything().conv.weight)


@pytest.mark.parametrize(("overlap", "whole"), [(0, [4, 8, 10]), (1, [5, 9, 10])])
def test_what_is_due_within_a_round_is_done_at_its_end(
    trained: Trained, overlap: int, whole: list[int]
) -> None:
    """And every step has its row."""
    recipe = changed(
        RECIPE,
        train={"eval_every": 3},
        data=DataConfig(hold_out=0.1),
        checkpoint={"every": 2},
        synchrony={"overlap_steps": overlap},
    )
    folder = trained(2, recipe).folder
    rows = list(read_rows(folder / "metrics.jsonl", dict))
    of_kind = {
        kind: [row["step"] for row in rows if row["kind"] == kind]
        for kind in ("train", "validation")
    }
    assert of_kind == {"train": list(range(1, 11)), "validation": whole}
    saved = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert [int(path[5:]) for path in saved] == whole


def test_an_average_costs_what_a_gradient_does(trained: Trained) -> None:
    """So a step costs an Hth of it, but for the losses of a round. In two fragments, an average
    costs half: of ten steps, after 2, 5 and 7, and twice after 10.
    """
    rounds = changed(
        RECIPE,
        train={"global_batch_size": 64},
        exchange=ExchangeConfig("tree", shared_memory=False),
        synchrony={"local_steps": 5},
    )
    halves = changed(rounds, synchrony={"fragments": 2})
    every = changed(rounds, synchrony=SynchronyConfig())
    recipes = (rounds, halves, every)
    sent = [trained(4, each).sent_bytes_per_step_by_rank for each in recipes]
    for local, half, whole in zip(*sent, strict=True):
        assert local == pytest.approx((whole or 0) / 5, rel=0.2)
        assert half == pytest.approx((whole or 0) * 5 / 2 / 10, rel=0.2)


def fit_while_held(recipe: Recipe, folder: Path, pipe: Path) -> str:
    """Rank 1 brings its first differences once rank 0 has begun the step after."""
    begin, train = Average.begin, LocalStepper._train

    def held(average: Average, *sums: Any) -> None:
        if os.environ["RANK"] == "1" and pipe.exists():
            pipe.read_text()
            pipe.unlink()
        begin(average, *sums)

    def told(stepper: LocalStepper, step: int, rate: float) -> LocalOutcome:
        if os.environ["RANK"] == "0" and step == recipe.synchrony.local_steps:
            pipe.write_text("")
        return train(stepper, step, rate)

    with patch.object(Average, "begin", held), patch.object(LocalStepper, "_train", told):
        return EVERYTHING(recipe, folder).state_sha256


def test_replicas_go_on_while_their_average_is_under_way(
    ranks: Ranks, trained: Trained, tmp_path: Path
) -> None:
    """If they did not, rank 0 would wait for rank 1 and it for rank 0, until the time is over."""
    recipe = changed(RECIPES["overlap"], exchange={"timeout_s": 60})
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = ranks.run(2, fit_while_held, recipe, tmp_path / "run", pipe)
    assert found == [trained(1, RECIPES["overlap"]).state_sha256] * 2
