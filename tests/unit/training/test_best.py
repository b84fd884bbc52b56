"""What is evaluated: the best checkpoint, an early stop, and what stands in for the weights."""

import copy
import dataclasses
import json
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import firecaffe
from firecaffe import Recipe, Result, SynchronyConfig
from firecaffe.cli import main
from firecaffe.data import Batches, DataConfig, SampleOrder
from firecaffe.data.sources import open_image_folder
from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.runs.curves import curves_of, time_to
from firecaffe.runs.measure import LOSS, TOP1
from firecaffe.runs.run_table import read_run
from firecaffe.training.best import Best
from firecaffe.training.checkpoint import best_step, load_newest
from firecaffe.training.evaluation import Evaluation
from firecaffe.training.evaluation_weights import Ema
from firecaffe.training.modes.mode import TrainingRanks
from tests.kit.data_photos import BLUE, GREEN, RED, draw
from tests.kit.training import (
    data,
    fit_points,
    images,
    network,
    recipe_in,
    recipe_of_points,
    record_of,
    rows_of,
)
from tests.kit.training_fixtures import Capture, Patch

# --- the best, by validation samples alone --------------------------------------------------------


def evaluation(value: float, loss: float = 1.0) -> Evaluation:
    return Evaluation(10, loss, {"top1": value}, ["top1"], None)


def test_it_counts_the_evaluations_without_a_better_one() -> None:
    best = Best(TOP1)
    assert (best.state_dict(), best.row) == ({}, None)
    values = [0.2, 0.5, 0.5, 0.4, float("nan"), 0.6]
    better = [best.add(step, evaluation(value)) for step, value in enumerate(values, 1)]
    assert better == [True, True, False, False, False, True]
    assert (best.value, best.step, best.without, best.evaluated) == (0.6, 6, 0, 6)
    best.add(7, evaluation(0.1))
    best.add(8, evaluation(0.1))
    assert [best.has_stalled(after) for after in (0, 2, 3)] == [False, True, False]
    again, other = Best(TOP1), Best(LOSS)
    again.load_state_dict(json.loads(json.dumps(best.state_dict())))
    assert again == best
    # By another metric nothing was found yet; and less of a loss is better.
    other.load_state_dict(best.state_dict())
    assert other == Best(LOSS)
    better = [other.add(step, evaluation(0.0, loss)) for step, loss in enumerate((0.5, 0.6, 0.2))]
    assert better == [True, False, True]


def test_of_equal_values_the_lower_loss_is_the_best_and_then_the_earlier() -> None:
    best = Best(TOP1)
    evaluations = [(0.5, 0.9), (0.5, 0.9), (0.5, 0.8), (0.4, 0.1), (0.5, 0.85), (0.5, float("nan"))]
    better = [best.add(step, evaluation(*each)) for step, each in enumerate(evaluations, 1)]
    assert better == [True, False, True, False, False, False]
    # What stops a training is the value alone.
    assert (best.step, best.loss, best.without) == (3, 0.8, 5)
    # A checkpoint from before knew no loss: the earlier one stays.
    state = best.state_dict()
    del state["loss"]
    older = Best(TOP1)
    older.load_state_dict(state)
    assert not older.add(7, evaluation(0.5, 0.0))
    assert older.add(8, evaluation(0.6, 0.7))
    assert older.loss == 0.7


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


# The weights stay as they are, so no evaluation is better than the first.
STAYS = "solver.base_lr=0.0 solver.weight_decay=0.0"
LEARNS = "solver.base_lr=0.5"
SMALL = "train.global_batch_size=8 train.micro_batch_size=4"
KEPT = "data.hold_out=0.25 checkpoint.every=1 checkpoint.keep_last=2"


def fit_images(folder: Path, resume: str | None = None, words: str = STAYS, **train: Any) -> Result:
    length = {"steps": 12, "eval_every": 2, "seed": 1, **train}
    recipe = recipe_in(folder, f"{SMALL} {KEPT} checkpoint.best=True {words}", train=length)
    return firecaffe.train(recipe, linear, images(40, 0), images(30, 1), resume=resume)


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result, best = fit_images(run, steps=7), run / "checkpoints" / "best"
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert steps == [2, 6, 7]
    assert load_newest(best)[0].step == 2
    assert load_newest(best.with_name("latest"))[0].step == 7
    assert result.best is not None
    assert result.best["step"] == 2
    assert Path(result.best["checkpoint"]) == best.with_name("step-00000002")
    row = record_of(run)
    assert (row["best"], row["test_of_best"]) == (result.best, None)
    assert (row["stopped_early"], row["evaluated"]) == (False, "weights")
    assert (best_step(run), best_step(tmp_path)) == (2, None)
    # The last evaluation may be the best.
    last = fit_images(tmp_path / "last", steps=3, eval_every=0)
    assert last.best is not None
    assert last.best["step"] == load_newest(tmp_path / "last" / "checkpoints" / "best")[0].step == 3


def test_a_metric_that_is_no_number_has_no_best(tmp_path: Path) -> None:
    words = f"{SMALL} {KEPT} checkpoint.best=True"
    recipe = recipe_in(tmp_path / "run", words, train={"steps": 2, "eval_every": 1})
    count = firecaffe.Sums(lambda outputs, labels: outputs.sum() * nan, higher_is_better=True)
    task = firecaffe.Task(torch.nn.functional.cross_entropy, {"share": count})
    result = firecaffe.train(recipe, linear, images(40, 0), images(30, 1), task=task)
    assert result.best is None
    with pytest.raises(CheckpointError, match="share"):
        firecaffe.load(result.folder, linear, best=True)


def test_it_stops_once_nothing_gets_better_and_counts_on(tmp_path: Path, capsys: Capture) -> None:
    whole = fit_images(tmp_path / "whole", stop_after=3)
    assert (whole.steps, whole.stopped_early) == (8, True)
    # Stopped in between, after two of the three.
    fit_images(tmp_path / "first", steps=6, stop_after=3)
    rest = fit_images(tmp_path / "rest", str(tmp_path / "first"), stop_after=3)
    assert (rest.steps, rest.stopped_early) == (8, True)
    assert rest.state_sha256 == whole.state_sha256
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00000002"
    assert rest.best == {**(whole.best or {}), "checkpoint": str(checkpoint)}
    with pytest.raises(CheckpointError, match=f"the best is {checkpoint}"):
        firecaffe.load(tmp_path / "rest", model=linear, best=True)
    # At its end there is nothing left to do; with more patience there is.
    over = fit_images(tmp_path / "over", str(tmp_path / "rest"), stop_after=3)
    assert (over.steps, load_newest(tmp_path / "over")[0].step) == (8, 8)
    assert fit_images(tmp_path / "more", str(tmp_path / "rest"), stop_after=4).steps == 10
    # No word, no stop.
    assert fit_images(tmp_path / "none", stop_after=0).steps == 12
    assert fit_images(tmp_path / "one", stop_after=1).steps == 4
    # A best checkpoint that is damaged costs the run nothing.
    state = checkpoint / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    damaged = fit_images(tmp_path / "damaged", str(tmp_path / "first"), stop_after=3)
    assert (damaged.steps, damaged.test_of_best) == (8, None)
    assert "the best weights, of step 2, are not tested" in capsys.readouterr().out


def the_first_is_best(best: Best, step: int, evaluation: Evaluation) -> bool:
    """In place of `Best.add`."""
    best.evaluated, is_first = step, best.value is None
    best.without = 0 if is_first else best.without + 1
    if is_first:
        best.value, best.loss, best.step = 0.5, evaluation.loss, step
    return is_first


def test_after_an_early_stop_the_best_weights_are_tested_too(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """And change no bit of what the run comes to."""
    monkeypatch.setattr(Best, "add", the_first_is_best)
    words = f"{LEARNS} train.ema_decay=0.5"
    result = fit_images(tmp_path / "run", None, words, stop_after=2)
    said = capsys.readouterr().out
    assert (result.steps, result.stopped_early) == (6, True)
    row = record_of(tmp_path / "run")["test_of_best"]
    assert row == result.test_of_best
    assert f"test of the best weights, of step {row['step']}: " in said
    alone = fit_images(tmp_path / "alone", None, words, steps=row["step"])
    assert (row["loss"], row["top1"]) == (alone.test_loss, alone.metrics["top1"])
    assert row["loss"] != result.test_loss
    last = fit_images(tmp_path / "without", None, f"{words} checkpoint.best=False", stop_after=2)
    assert (last.test_of_best, last.state_sha256) == (None, result.state_sha256)
    # Where learners hold weights, a line says that it is left out.
    capsys.readouterr()
    monkeypatch.setattr(TrainingRanks, "have_weights", False)
    apart = fit_images(tmp_path / "apart", None, words, stop_after=2)
    assert (apart.test_of_best, apart.state_sha256) == (None, result.state_sha256)
    said = capsys.readouterr().out
    assert f"evaluate {(apart.best or {})['checkpoint']} tests" in said


def test_evaluate_says_which_weights_it_takes(tmp_path: Path, capsys: Capture) -> None:
    sizes = "train.global_batch_size=4 train.micro_batch_size=4 train.eval_batch_size=1000"
    words = "model.name=lenet data.name=generated data.hold_out=0.01 train.steps=2"
    stays = "train.eval_every=1 solver.base_lr=0.0 checkpoint.best=True"
    run = firecaffe.train(recipe_in(tmp_path / "run", f"{sizes} {words} {stays}")).folder
    for word, step, told in (([], 2, "newest; --best takes"), (["--best"], 1, "--best")):
        capsys.readouterr()
        assert main(["evaluate", str(run), *word]) == 0
        said = capsys.readouterr().out.splitlines()
        assert (f"at step {step}: " in said[-2], told in said[-1]) == (True, True)
        assert main(["evaluate", str(run), *word, "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["best"], row["best_step"], row["step"]) == (bool(word), 1, step)


def run_of(folder: Path, eval_every: int, hold_out: float, **sets: Any) -> Result:
    words = f"train.steps=5 train.eval_every={eval_every} data.hold_out={hold_out}"
    recipe = recipe_in(folder, f"{SMALL} {words}")
    return firecaffe.train(recipe, normed, images(40, 0), images(30, 1), **sets)


def looked_at(folder: Path, kind: str) -> list[tuple[int, int]]:
    """The steps, and how many samples."""
    return [(row["step"], row["samples"]) for row in rows_of(folder, kind)]


def test_evaluations_on_the_way_see_held_out_images_and_change_no_bit(tmp_path: Path) -> None:
    often, never = run_of(tmp_path / "often", 2, 0.25), run_of(tmp_path / "never", 0, 0.25)
    assert looked_at(often.folder, "validation") == [(2, 10), (4, 10), (5, 10)]
    assert looked_at(often.folder, "test") == [(5, 30)]
    assert looked_at(never.folder, "validation") == [(5, 10)]
    assert often.weights_sha256 == never.weights_sha256
    assert often.state_sha256 == never.state_sha256
    assert often.validation is not None
    assert often.validation["top1"] == rows_of(often.folder, "validation")[-1]["top1"]
    run = read_run(often.folder)
    assert "30 training, 10 held-out and 30 test images" in run.result["data"]
    assert len(curves_of(run).metric) == 3  # a time to a target is read from these
    assert time_to(run, 1.1) is None


def test_one_s_own_validation_set(tmp_path: Path) -> None:
    run = run_of(tmp_path / "own", 3, 0.0, validation_set=images(12, 2)).folder
    assert looked_at(run, "validation") == [(3, 12), (5, 12)]
    assert run_of(tmp_path / "without", 0, 0.0).validation is None
    # Without validation images there is nothing to choose by.
    with pytest.raises(RecipeError, match=r"train\.eval_every is 2.*data\.hold_out") as caught:
        run_of(tmp_path / "none", 2, 0.0)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "none").exists()


# --- BatchNorm statistics and moving averages -----------------------------------------------------

SAMPLES, LEAF, PER_STEP = 50, 4, 8
"""12 whole micro-batches, of two steps."""

TRAIN, VALIDATION = data(300, 0), data(40, 2)

SERVED = SynchronyConfig("asynchronous", clock="simulated", speeds="gamma", spread=0.5)
REPLICAS = SynchronyConfig("local", replicas=4, local_steps=4)


def made(folder: Path, words: SynchronyConfig, samples: int, **train: Any) -> Recipe:
    length = {"steps": 12, "batch_norm_samples": samples, **train}
    recipe = recipe_of_points(folder, {}, **length)
    return dataclasses.replace(recipe, synchrony=words, data=DataConfig())


def fit(recipe: Recipe, make: Any = network) -> firecaffe.Result:
    return fit_points(recipe, model=make, validation_set=VALIDATION)


def torchs(net: nn.Module) -> dict[str, Tensor]:
    """The buffers that torch gives a copy of a network."""
    net = copy.deepcopy(net).train()
    batches = Batches(TRAIN, SampleOrder(1, 300, PER_STEP * LEAF, LEAF), DataConfig())
    leaves = [divmod(place, PER_STEP) for place in range(SAMPLES // LEAF)]
    update_bn([batches.train_batch(*leaf)[0] for leaf in leaves], net)
    return running(net)


def running(net: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in net.named_buffers() if each.is_floating_point()}


@pytest.mark.parametrize(
    ("words", "decay"), [(SynchronyConfig(), 0.0), (SERVED, 0.9), (REPLICAS, 0.0)]
)
def test_evaluations_take_torchs_statistics_the_training_its_own(
    words: SynchronyConfig, decay: float, tmp_path: Path
) -> None:
    plain = fit(made(tmp_path / "plain", words, 0, ema_decay=decay))
    run = tmp_path / "run"
    result = fit(made(run, words, SAMPLES, ema_decay=decay, eval_every=5))
    assert result.weights_sha256 == plain.weights_sha256
    assert result.state_sha256 == plain.state_sha256
    assert result.test_loss != plain.test_loss
    # Whoever loads the run, or any of its checkpoints, has the network that was evaluated.
    folders = run, *(run / "checkpoints").glob("step-*")
    loaded = [firecaffe.load(folder, network) for folder in folders]
    for net in (result.model, *loaded):
        torch.testing.assert_close(running(net), torchs(net), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(running(loaded[0]), running(result.model), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("samples", "make", "line"),
    [
        (3, network, "batch_norm_samples is 3; it must be 0, or at least .* 4: whole"),
        (301, network, "batch_norm_samples is 301; there are 300 training samples"),
        (8, lambda: nn.Linear(2, 4), "is 8, but the network has no BatchNorm"),
    ],
)
def test_refused(samples: int, make: Any, line: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=line):
        fit(made(tmp_path / "run", SynchronyConfig(), samples), make)


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each))


def test_it_is_torch_s_and_a_warm_up_forgets_the_first_weights_sooner() -> None:
    torch.manual_seed(1)
    first = nn.Linear(3, 4)
    model = nn.Sequential(first, nn.BatchNorm1d(4))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    ours, warm = (
        Ema(dict(model.named_parameters()), 0.9, warmup=is_warm) for is_warm in (False, True)
    )
    expected = first.weight.detach().double()
    for step in range(5):
        moved(model)
        theirs.update_parameters(model)
        ours.update(step)
        warm.update(step)
        for name, average in theirs.module.named_parameters():
            assert torch.equal(ours.average[name], average)
        decay = min(0.9, (1 + step) / (10 + step)) if step else 0.0
        expected = decay * expected + (1 - decay) * first.weight.detach()
        torch.testing.assert_close(warm.average["0.weight"], expected.float())


def test_in_the_weights_place_and_back() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(dict(model.named_parameters()), 0.5)
    ema.update(0)
    average = copy.deepcopy(model)
    moved(model)
    trained, inputs = copy.deepcopy(model), torch.rand(3, 2)
    memory = [each.data_ptr() for each in model.parameters()]
    ema.exchange()
    assert torch.equal(model(inputs), average(inputs))
    ema.exchange()
    assert torch.equal(model(inputs), trained(inputs))
    assert torch.equal(ema.average["weight"], average.weight)
    assert memory == [each.data_ptr() for each in model.parameters()]
    assert all(each.requires_grad for each in model.parameters())


def test_a_folder_s_own_validation_images(tmp_path: Path) -> None:
    for part, color in (("train", RED), ("test", GREEN), ("val", BLUE)):
        draw(tmp_path / part / "a" / "1.png", color, (8, 8))
    sets = open_image_folder(DataConfig("folder", str(tmp_path), resize=8))
    assert sets.validation is not None
    for dataset, color in ((sets.train, RED), (sets.test, GREEN), (sets.validation, BLUE)):
        assert tuple(dataset.batch(torch.tensor([0]))[0][0, :, 0, 0].tolist()) == color
