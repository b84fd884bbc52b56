"""A recipe's network in stages: any layout comes to the bits of one worker without stages."""

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import firecaffe
from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    TrainConfig,
)
from firecaffe.errors import NotFiniteError
from firecaffe.models.model import HeadedLogits
from tests.ranks.networks import small_data
from tests.world import Ranks

# 8 micro-batches of 4 over 70 samples: steps 3 and 6 end an epoch with one micro-batch of 4, one of
# 2, and six that are empty.
RECIPE = Recipe(
    model=ModelConfig(freeze=["norm.*", "last.bias"]),
    train=TrainConfig(
        32, 4, steps=4, seed=5, device="cpu", ema_decay=0.8, eval_batch_size=8, eval_every=3
    ),
    solver=SolverConfig(
        base_lr=0.02,
        momentum=0.9,
        weight_decay=1e-3,
        decay_mult={"@vector": 0.0, "last.*": 2.0},
        clip_gradients=0.5,
        momentum_form="caffe",
        momentum_correction=True,
        lr_policy="poly",
    ),
    checkpoint=CheckpointConfig(every=2),
)

LAYOUTS = {
    "2 stages": ParallelConfig(stages=["middle"]),
    "2 x 2": ParallelConfig(2, stages=["middle.3"], pipeline="gpipe"),
    "4 stages": ParallelConfig(stages=["middle", "middle.3", "middle.6"]),
    "data 2": ParallelConfig(),
}
"""Of 4 stages the third one has no weights."""

WORKERS = {"2 stages": 2, "data 2": 2}
"""Of the layouts that are not for 4."""


class Net(nn.Module):
    """With parameters and buffers of its own, a head that is called in training alone, and what is
    never called.
    """

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.unused = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.scale = nn.Parameter(torch.full((6, 1, 1), 1.5))
        self.register_buffer("shift", torch.full((6, 1, 1), 0.25))
        self.last = nn.Linear(12, 4)
        self.middle = nn.Sequential(
            *(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 12), nn.ReLU()),
        )
        self.head = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(54, 4))

    def forward(self, x: Tensor) -> Tensor | HeadedLogits:
        y = self.norm(self.first(x)) * self.scale + self.shift
        side = self.head(y) if self.training else None
        z: Tensor = self.last(self.middle(y))
        return HeadedLogits(z, side, side) if side is not None else z


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class Mixed(Net):
    """With weights of two types, in turns."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(self.middle.double())
        for each in layers[4:]:
            each.float()
        layers[4:4] = [Cast(torch.float32)]
        self.middle = nn.Sequential(Cast(torch.float64), *layers, Cast(torch.float64))
        self.last.double()


class Late(Net):
    """With batch normalization behind the dropouts of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.extend([nn.Dropout(0.5), nn.BatchNorm1d(12)])


def fit(
    recipe: Recipe, folder: str, resume: str | None = None, network: type[Net] = Net
) -> firecaffe.Result:
    run = RunConfig(folder=folder, tensorboard=False)
    recipe = dataclasses.replace(recipe, run=run)
    data = small_data(70), small_data(30, 1)
    return firecaffe.train(recipe, network, *data, resume=resume, validation_set=small_data(20, 2))


def trained(
    ranks: Ranks,
    name: str,
    folder: Path,
    resume: str | None = None,
    recipe: Recipe = RECIPE,
) -> firecaffe.Result:
    workers, parallel = WORKERS.get(name, 4), LAYOUTS[name]
    recipe = dataclasses.replace(recipe, parallel=parallel)
    results = ranks.shared(workers, fit, recipe, str(folder), resume)
    told = {(each.state_sha256, each.weights_sha256, each.test_loss, each.loss) for each in results}
    assert len(told) == 1
    result: firecaffe.Result = results[0]
    return result


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> firecaffe.Result:
    [result] = ranks.shared(1, fit, RECIPE, str(tmp_path_factory.mktemp("alone") / "run"))
    assert isinstance(result, firecaffe.Result)
    return result


Run = Callable[[str], tuple[firecaffe.Result, Path]]


@pytest.fixture(scope="module")
def run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A layout's run, from its first step to its last, trained once; and its folder."""
    folder = tmp_path_factory.mktemp("layouts")

    @cache
    def of(name: str) -> tuple[firecaffe.Result, Path]:
        return trained(ranks, name, folder / name), folder / name

    return of


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "data 2"])
def test_any_layout(run: Run, alone: firecaffe.Result, name: str) -> None:
    found, _ = run(name)
    assert [row["loss"] for row in found.history] == [row["loss"] for row in alone.history]
    assert not found.identity_doubts
    assert found.weights_sha256 == alone.weights_sha256
    assert found.state_sha256 == alone.state_sha256
    assert (found.test_loss, found.metrics) == (alone.test_loss, alone.metrics)
    assert found.validation == alone.validation


def test_an_update_in_shards_of_stages(
    ranks: Ranks, alone: firecaffe.Result, tmp_path: Path
) -> None:
    """Owners within a column agree on norms over all; one of the stages has no weights."""
    recipe = dataclasses.replace(RECIPE, exchange=ExchangeConfig(update_at="shards"))
    found = trained(ranks, "4 stages", tmp_path / "run", recipe=recipe)
    assert found.state_sha256 == alone.state_sha256
    assert (found.test_loss, found.metrics) == (alone.test_loss, alone.metrics)
    assert found.validation == alone.validation
    checkpoint = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert trained(ranks, "data 2", tmp_path / "on", checkpoint).state_sha256 == alone.state_sha256


def test_a_run_in_stages_is_read_as_any_other(run: Run, alone: firecaffe.Result) -> None:
    """Its checkpoint has all tensors by their names, those too that no stage calls."""
    _, folder = run("4 stages")
    network = firecaffe.load(folder, Net)
    averages = load_file(folder / "checkpoints/step-00000004/ema.safetensors")
    trained_ones = {name for name, each in network.named_parameters() if name in averages}
    assert len(trained_ones) == len(averages) == 16
    for name in trained_ones:
        assert network.get_parameter(name).equal(averages[name]), name
    expected = firecaffe.load(alone.folder, Net).state_dict()
    found = network.state_dict()
    assert found.keys() == expected.keys()
    assert all(map(torch.equal, found.values(), expected.values()))
    record = json.loads((folder / "result.json").read_text())
    assert record["parallel"] == {
        "data": 1,
        "stages": ["middle", "middle.3", "middle.6"],
        "pipeline": "1f1b",
        "idle_if_equal": 3 / 11,
    }
    idle = record["idle_by_stage"]
    assert len(idle) == 4
    assert all(0 < each < 1 for each in idle)
    assert record["frozen_parameters"] == 3


def test_the_norm_of_gradients_of_several_types(ranks: Ranks, tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, train=dataclasses.replace(RECIPE.train, steps=3))
    [expected] = ranks.shared(1, fit, recipe, str(tmp_path / "alone"), None, Mixed)
    recipe = dataclasses.replace(recipe, parallel=LAYOUTS["2 stages"])
    found = ranks.shared(2, fit, recipe, str(tmp_path / "run"), None, Mixed)
    assert {each.state_sha256 for each in found} == {expected.state_sha256}


def test_statistics_estimated_again(ranks: Ranks, tmp_path: Path) -> None:
    train = dataclasses.replace(RECIPE.train, batch_norm_samples=54, steps=3)
    recipe = dataclasses.replace(RECIPE, train=train)
    [expected] = ranks.shared(1, fit, recipe, str(tmp_path / "alone"), None, Late)
    staged = dataclasses.replace(recipe, parallel=LAYOUTS["4 stages"])
    [found, *_] = ranks.shared(4, fit, staged, str(tmp_path / "run"), None, Late)
    assert found.state_sha256 == expected.state_sha256
    assert (found.test_loss, found.validation) == (expected.test_loss, expected.validation)
    of_both = [firecaffe.load(tmp_path / each, Late).state_dict() for each in ("alone", "run")]
    for tensor, each in of_both[0].items():
        assert each.equal(of_both[1][tensor]), tensor


def loud(outputs: Tensor | HeadedLogits, labels: Tensor) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return 20 * F.cross_entropy(logits, labels)


def fit_loud(recipe: Recipe, folder: str) -> str:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    return firecaffe.train(recipe, Net, small_data(70), small_data(30, 1), loss=loud).state_sha256


def test_a_loss_scale_of_float16(ranks: Ranks, tmp_path: Path) -> None:
    """Gradients of the last stage overflow, the first one's do not; the third has no weights."""
    train = dataclasses.replace(RECIPE.train, autocast="float16", steps=6, eval_every=0)
    model = ModelConfig(freeze=["norm.*", "middle.*", "head.*"])
    recipe = dataclasses.replace(RECIPE, train=train, model=model)
    [expected] = ranks.shared(1, fit_loud, recipe, str(tmp_path / "alone"))
    meta = json.loads((tmp_path / "alone/checkpoints/step-00000006/meta.json").read_text())
    assert meta["scaler"]["scale"] < 65_536 / 4
    for name in ("2 stages", "4 stages"):
        workers = WORKERS.get(name, 4)
        staged = dataclasses.replace(recipe, parallel=LAYOUTS[name])
        found = ranks.shared(workers, fit_loud, staged, str(tmp_path / name))
        assert set(found) == {expected}, name


def test_a_step_that_overflows_leaves_no_trace_in_a_codec(ranks: Ranks, tmp_path: Path) -> None:
    """What one_bit kept back before it is kept back again, and in the gradient's own units."""
    train = dataclasses.replace(RECIPE.train, autocast="float16", steps=6, eval_every=0)
    exchange = ExchangeConfig(compressor="one_bit")
    often = CheckpointConfig(1, keep_last=0)
    model = ModelConfig(freeze=["norm.*", "middle.*", "head.*"])
    recipe = dataclasses.replace(
        RECIPE, train=train, model=model, exchange=exchange, checkpoint=often
    )
    [expected] = ranks.shared(1, fit_loud, recipe, str(tmp_path / "alone"))
    saved = [tmp_path / f"alone/checkpoints/step-{step:08}" for step in range(1, 7)]
    scales = [json.loads((each / "meta.json").read_text())["scaler"]["scale"] for each in saved]
    kept = [load_file(each / "compressor.safetensors") for each in saved]
    skipped = [now < before for before, now in pairwise([65_536, *scales])]
    assert skipped[0]
    assert not all(skipped)
    for is_skipped, before, now in zip(skipped, [{}, *kept], kept, strict=False):
        is_same = all(each.equal(before.get(name, 0 * each)) for name, each in now.items())
        assert is_same == is_skipped
    staged = dataclasses.replace(recipe, parallel=LAYOUTS["2 stages"])
    assert set(ranks.shared(2, fit_loud, staged, str(tmp_path / "2"))) == {expected}


class NoWeights(nn.Sequential):
    """Its last stage has none."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(36, 4), nn.ReLU())


def fit_by_auto(parallel: ParallelConfig, folder: str) -> str:
    recipe = Recipe(
        train=TrainConfig(48, 4, steps=3, device="cpu"),
        exchange=ExchangeConfig(algorithm="auto", shared_memory=False),
        parallel=parallel,
        run=RunConfig(folder=folder, tensorboard=False),
    )
    return firecaffe.train(recipe, NoWeights, small_data(70), small_data(30, 1)).state_sha256


def test_a_stage_without_weights_has_an_exchange_to_choose(ranks: Ranks, tmp_path: Path) -> None:
    """Its column sums the loss alone, beside one that sums gradients."""
    [expected] = ranks.shared(1, fit_by_auto, ParallelConfig(), str(tmp_path / "alone"))
    in_stages = ParallelConfig(2, stages=["2"])
    assert ranks.shared(4, fit_by_auto, in_stages, str(tmp_path / "run")) == [expected] * 4


def diverge(parallel: ParallelConfig, folder: str) -> str:
    solver = dataclasses.replace(RECIPE.solver, base_lr=1e30, clip_gradients=0.0)
    recipe = dataclasses.replace(RECIPE, parallel=parallel, solver=solver)
    try:
        fit(recipe, folder)
    except NotFiniteError as error:
        return str(error)
    return "it went on"


def test_a_number_that_is_not_finite_is_told_by_all_as_by_one(ranks: Ranks, tmp_path: Path) -> None:
    [expected] = ranks.shared(1, diverge, ParallelConfig(), str(tmp_path / "alone"))
    assert "first gradient in network order" in expected
    for name in ("2 stages", "2 x 2"):
        workers, parallel = WORKERS.get(name, 4), LAYOUTS[name]
        said = ranks.shared(workers, diverge, parallel, str(tmp_path / name))
        assert said == [expected] * workers
