"""`firecaffe import` as a user types it, and what its recipe then trains."""

import json
from pathlib import Path

import numpy as np
import pytest

from firecaffe.recipe.of_run import recipe_of
from firecaffe.runs.folder import read_run_file
from tests import typed
from tests.golden.caffe.data_cases import raw, write_lmdb

NET = """
name: "Small"
layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { scale: 0.00390625 crop_size: 8 mirror: true }
  data_param { source: "sets/train" batch_size: 8 backend: LMDB }
}
layer {
  name: "data" type: "Data" top: "data" top: "label" include { phase: TEST }
  transform_param { scale: 0.00390625 crop_size: 8 }
  data_param { source: "sets/test" batch_size: 4 backend: LMDB }
}
layer {
  name: "conv/1" type: "Convolution" bottom: "data" top: "conv"
  param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } }
}
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer {
  name: "pool" type: "Pooling" bottom: "conv" top: "pool"
  pooling_param { pool: MAX kernel_size: 3 stride: 2 }
}
layer {
  name: "fc" type: "InnerProduct" bottom: "pool" top: "fc"
  param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } }
}
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
layer {
  name: "accuracy" type: "Accuracy" bottom: "fc" bottom: "label" top: "accuracy"
  include { phase: TEST }
}
"""

SOLVER = """
net: "models/net.prototxt"
test_iter: 5
test_interval: 3
base_lr: 0.05
momentum: 0.9
weight_decay: 0.001
regularization_type: "L1"
clip_gradients: 2
lr_policy: "step"
gamma: 0.5
stepsize: 4
iter_size: 2
max_iter: 6
snapshot: 3
snapshot_prefix: "small"
random_seed: 3
solver_mode: CPU
"""


def images(count: int, seed: int) -> list[bytes]:
    """Of three classes, each with a column that is brighter."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        image_CHW = draw.integers(0, 100, (1, 10, 10), dtype=np.uint8)
        image_CHW[:, :, 2 + 2 * (number % 3)] += 120
        found.append(raw(image_CHW, number % 3))
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caffe's root, from which the paths in its files are; and a user's folder in it."""
    root = tmp_path_factory.mktemp("caffe")
    write_lmdb(root / "sets" / "train", images(48, 0))
    write_lmdb(root / "sets" / "test", images(20, 1))
    (root / "models").mkdir()
    (root / "models" / "net.prototxt").write_text(NET)
    (root / "models" / "solver.prototxt").write_text(SOLVER)
    return root


@pytest.fixture(scope="module")
def imported(home: Path) -> Path:
    folder = home / "small"
    done = typed.firecaffe("import", home / "models" / "solver.prototxt", "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_solver_becomes_a_recipe(home: Path, imported: Path) -> None:
    recipe = recipe_of(imported)
    name = f"caffe:{imported}/net.prototxt"
    assert (recipe.model.name, recipe.data.name, recipe.task.name) == (name, name, name)
    assert recipe.model.args == {"input_CHW": [1, 8, 8]}
    assert recipe.data.path == str(home)
    train, solver = recipe.train, recipe.solver
    assert (train.global_batch_size, train.micro_batch_size, train.steps) == (16, 2, 6)
    assert (train.eval_every, train.eval_batch_size, train.seed, train.device) == (3, 4, 3, "cpu")
    assert (solver.type, solver.momentum_form, solver.decay_form) == ("sgd", "caffe", "l1")
    assert solver.clip_gradients == 1.0  # of the mean over 2 passes
    assert solver.lr_mult == {"*.bias": 2.0}
    assert solver.decay_mult == {"*.bias": 0.0}
    assert recipe.checkpoint.every == 3


def test_the_net_is_the_users_file_and_the_report_has_lines(home: Path, imported: Path) -> None:
    for name in ("net.prototxt", "solver.prototxt"):
        assert (imported / name).read_bytes() == (home / "models" / name).read_bytes()
    report = (imported / "report.md").read_text()
    assert f"`{home / 'models' / 'solver.prototxt'}:14`: train.steps 6" in report
    assert {each.name for each in imported.iterdir()} == {
        *("recipe.toml", "net.prototxt", "solver.prototxt", "report.md")
    }


def digest(recipe: Path, folder: Path, workers: int) -> str:
    done = typed.firecaffe(
        *("train", recipe, "--nproc-per-node", workers, "--run.folder", folder),
        *("--run.tensorboard", "false"),
    )
    assert done.returncode == 0, done.stderr
    found: str = read_run_file(folder, "result.json")["weights_sha256"]
    return found


def test_the_recipe_trains_to_the_same_bits_on_two_workers(imported: Path, tmp_path: Path) -> None:
    recipe = imported / "recipe.toml"
    one = digest(recipe, tmp_path / "one", 1)
    assert digest(recipe, tmp_path / "two", 2) == one
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert result["metrics"] == ["accuracy"]
    done = typed.firecaffe("evaluate", tmp_path / "two", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == result["test_loss"]
