"""Gradient codecs inside training: workers, buckets and resumes still change no bit.

Trainings that need the same number of ranks share one start of them, for a start takes longer than
a training. The three starts are in the order in which the interrupted training needs them.
"""

import contextlib
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from firecaffe import ExchangeConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.cluster.agree import digest_each
from firecaffe.cluster.world import join
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.codec import LowRank
from firecaffe.gradients.compressors.power_sgd import matrix_columns
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.tensor_file import TensorFile
from tests.kit.worlds import Trained, Training, changed, end
from tests.world import Ranks

LEVELS = dict.fromkeys(("float16", "int8", "one_bit", "power_sgd"), (0, 1))
"""Where nodes are encoded, of a codec of each kind; of the others at level 0 alone."""
KEPT_BACK = "kept back/"
"""Before the names of what a compressor keeps."""
WITHOUT_MEMORY = ("float16", "bfloat16")
STEPS = 4
RANK = 4
"""Of power_sgd: with that of a real training, matrices of this size would not shrink."""
# 8 micro-batches of 4, over 68 samples: an epoch ends with a step of 4 samples, all of them in
# micro-batch 0, so that all nodes but the first are empty.
RECIPE = Recipe(
    train=TrainConfig(global_batch_size=32, micro_batch_size=4, steps=STEPS, seed=3),
    solver=SolverConfig(base_lr=0.05, momentum=0.9, weight_decay=0.01, clip_gradients=0.5),
    exchange=ExchangeConfig(timeout_s=300),
)
SAMPLES = 68
STAGES = {2: 1, 1: 2, 3: STEPS}
"""The interrupted training: up to which step it goes on each number of workers."""
BUCKET_BYTES = {1: 4_000_000, 2: 1, 3: 5_000}
"""By number of workers: all in one, each parameter in its own, and between."""

Bits = dict[str, str]
"""Digests of a training's end: `state`, and every tensor of its last checkpoint by name."""


class Network(nn.Module):
    """Parameters of less than a row and of several, matrices that have a low rank, one parameter
    that only some micro-batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(0.3)
        self.hidden = nn.Linear(16 * 16, 20)
        self.head = nn.Linear(20, 4)
        self.rare = nn.Parameter(torch.zeros(4))
        self.unused = nn.Parameter(torch.ones(20, 30))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv1(images)))
        x = self.dropout(torch.relu(self.conv2(x))).flatten(1)
        logits: Tensor = self.head(torch.relu(self.hidden(x)))
        return logits + self.rare if images.mean() > 0 else logits


def exchange(compressor: str, level: int) -> Recipe:
    return changed(RECIPE, exchange={"compressor": compressor, "compressor_level": level})


def recipes() -> dict[str, Recipe]:
    cases = {
        f"{name}-{level}": exchange(name, level)
        for name in COMPRESSORS
        for level in LEVELS.get(name, (0,))
    }
    # Without a compressor a level means nothing, or one node of level 3 were too few for workers.
    cases |= {f"none-{level}": exchange("none", level) for level in (0, 3)}
    channels_last = changed(exchange("power_sgd", 0), train={"channels_last": True})
    return {**cases, "power_sgd-channels_last": channels_last}


def fit(recipe: Recipe, folder: Path, resume: Path | None, bucket_bytes: int) -> Bits:
    recipe = changed(recipe, exchange={"bucket_bytes": bucket_bytes})
    result = Training(Network, SAMPLES)(recipe, folder, resume)
    assert not result.drifted_ranks
    checkpoint = load_newest(folder)[0]
    kept_back = {
        f"{KEPT_BACK}{key}": value
        for path in checkpoint.piece_files.values()
        for key, value in TensorFile(path).items()
    }
    tensors = {**checkpoint.tensors, **kept_back}
    return {"state": result.state_sha256, **digest_each(tensors.items())}


UNINTERRUPTED = [name for name in recipes() if name.endswith(("-1", "-channels_last"))]
"""On three workers too. With nodes of level 0 each codec's interrupted training ends there."""


def fit_all(folder: Path, world_size: int, resume_from: Path | None) -> dict[str, Bits]:
    """All trainings on 1, some on 3 workers, and the stages of the interrupted one on any."""
    bucket_bytes = BUCKET_BYTES[world_size]
    ends = {}
    with (
        join("cpu", 300) as world,
        patch("firecaffe.training.build_training.join", lambda *_: contextlib.nullcontext(world)),
        patch.dict(COMPRESSORS, power_sgd=LowRank(RANK)),
    ):
        for name in {1: recipes(), 2: (), 3: UNINTERRUPTED}[world_size]:
            ends[name] = fit(recipes()[name], folder / name, None, bucket_bytes)
        for name in COMPRESSORS:
            recipe = changed(exchange(name, 0), train={"steps": STAGES[world_size]})
            stage = f"{name}-stage"
            resume = resume_from / stage if resume_from else None
            ends[stage] = fit(recipe, folder / stage, resume, bucket_bytes)
    return ends


@pytest.fixture(scope="module")
def ends(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Bits]]:
    """How all trainings ended, by number of workers and by name."""
    runs, before = tmp_path_factory.mktemp("compressors"), None
    by_size = {}
    for world_size in STAGES:
        folder = runs / str(world_size)
        by_size[world_size] = ranks.shared(world_size, fit_all, folder, world_size, before)[0]
        record = read_run_file(folder / "int8-stage", "result.json")
        assert record["route"] == "int8 at level 0 of the micro-batch tree"
        assert record["identity_doubts"] == []
        before = folder
    return by_size


@pytest.mark.parametrize("name", UNINTERRUPTED)
def test_workers_and_buckets_change_no_bit(ends: dict[int, dict[str, Bits]], name: str) -> None:
    """Neither of the state nor of what the compressor has kept back."""
    assert ends[3][name] == ends[1][name]


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_run_that_changes_its_workers_by_resume(
    ends: dict[int, dict[str, Bits]], compressor: str
) -> None:
    """What was kept back goes along with its nodes: 2 workers, then 1, then 3."""
    assert ends[3][f"{compressor}-stage"] == ends[1][f"{compressor}-0"]


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_checkpoint_has_the_memory_of_every_node(
    ends: dict[int, dict[str, Bits]], compressor: str
) -> None:
    parameters = {
        name: matrix_columns(parameter.shape, RANK)
        for name, parameter in Network().named_parameters()
    }
    if compressor in WITHOUT_MEMORY:
        remembered = []
    elif compressor == "power_sgd":
        remembered = [name for name, columns in parameters.items() if columns is not None]
        assert {"conv2.weight", "hidden.weight", "unused"} <= set(remembered) < set(parameters)
    else:
        remembered = list(parameters)
    for level in LEVELS.get(compressor, (0,)):
        nodes, name = 8 >> level, f"{compressor}-{level or 'stage'}"
        found = [key for key in ends[3][name] if key.startswith(KEPT_BACK)]
        expected = {f"{KEPT_BACK}{node}.{name}" for node in range(nodes) for name in remembered}
        if compressor == "power_sgd":
            expected |= {f"{KEPT_BACK}q.{name}" for name in remembered}
        assert set(found) == expected


def test_codecs_and_levels_are_part_of_the_result(ends: dict[int, dict[str, Bits]]) -> None:
    """The control: each has its own bits, so that none of the above compares a codec with none."""
    states = {name: bits["state"] for name, bits in ends[1].items() if not name.endswith("stage")}
    assert states.pop("none-3") == states["none-0"]
    assert len(set(states.values())) == len(states)


def test_an_unused_parameter_is_left_alone(ends: dict[int, dict[str, Bits]]) -> None:
    """Weight decay would change it, if it had a gradient."""
    start = digest_each([("parameter/unused", Network().unused.detach())])
    for name, bits in ends[3].items():
        assert bits["parameter/unused"] == start["parameter/unused"], name
        assert not any(key.startswith("optimizer/unused/") for key in bits)
        assert any(key.startswith("optimizer/rare/") for key in bits)


class Wide(nn.Sequential):
    """A weight of 36,000 elements, more than torch sums in one thread."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(36, 1000))


@pytest.mark.parametrize("compressor", ["one_bit", "power_sgd"])
def test_several_threads_change_no_bit(trained: Trained, compressor: str) -> None:
    recipe = changed(exchange(compressor, 0), train={"steps": 2, "threads": 2})
    wide = Training(Wide, 64)
    assert end(trained(2, recipe, wide)) == end(trained(1, recipe, wide))
