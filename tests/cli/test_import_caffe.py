"""`firecaffe import` as a user types it, and what its recipe then trains."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

import firecaffe
from firecaffe.caffe import caffemodel
from firecaffe.recipe.checked_recipe import recipe_of_run
from firecaffe.runs.run_folder import read_run_file
from tests import typed
from tools.caffe_goldens.data_cases import raw, write_lmdb

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


DEPLOY = """
name: "Small"
input: "data" input_shape { dim: 1 dim: 1 dim: 8 dim: 8 }
layer {
  name: "conv/1" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 }
}
layer { name: "other" type: "InnerProduct" bottom: "conv" top: "other"
  inner_product_param { num_output: 3 } }
"""


def test_a_solver_becomes_a_recipe(home: Path, imported: Path) -> None:
    recipe = recipe_of_run(imported)
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
        *("recipe.toml", "net.prototxt", "solver.prototxt", "report.md", "about.json")
    }


def train(recipe: Path, folder: Path, *words: object) -> None:
    """In a process whose ranks need not load torch first."""
    done = typed.firecaffe(
        *("train", recipe, "--run.folder", folder, "--run.tensorboard", "false", *words)
    )
    assert done.returncode == 0, done.stderr


def digest(recipe: Path, folder: Path, workers: int) -> str:
    train(recipe, folder, "--nproc-per-node", workers)
    found: str = read_run_file(folder, "result.json")["weights_sha256"]
    return found


def test_the_recipe_trains_to_the_same_bits_on_two_workers(imported: Path, tmp_path: Path) -> None:
    recipe = imported / "recipe.toml"
    one = digest(recipe, tmp_path / "one", 1)
    assert digest(recipe, tmp_path / "two", 2) == one
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert result["metrics"] == ["accuracy"]
    evaluated = json.loads(typed.said_by("evaluate", tmp_path / "two", "--json"))
    assert evaluated["loss"] == result["test_loss"]


def blobs(*shapes: tuple[int, ...]) -> list[NDArray[np.float32]]:
    draw = np.random.default_rng(5)
    return [draw.standard_normal(shape).astype(np.float32) for shape in shapes]


def write_caffemodel(path: Path, **layers: list[NDArray[np.float32]]) -> Path:
    caffemodel.write(
        path, [caffemodel.TrainedLayer(name, "", each) for name, each in layers.items()]
    )
    return path


def test_layers_are_filled_by_name_and_a_renamed_one_starts_afresh(
    home: Path, tmp_path: Path
) -> None:
    conv = blobs((4, 1, 3, 3), (4,))
    file = write_caffemodel(
        tmp_path / "x.caffemodel", **{"conv/1": conv, "fc8": blobs((1000, 36), (1000,))}
    )
    folder = tmp_path / "tuned"
    solver = home / "models" / "solver.prototxt"
    said = typed.said_by("import", solver, "--weights", file, "--out", folder)
    assert "start as their fillers say: fc" in said
    assert "in the file alone: fc8" in said
    held = load_file(folder / "weights.safetensors")
    assert held.keys() == {"conv_1.weight", "conv_1.bias"}
    assert np.array_equal(held["conv_1.weight"], conv[0])
    words = ("--solver.base_lr", 0, "--train.steps", 1)
    train(folder / "recipe.toml", tmp_path / "run", *words)
    trained = firecaffe.load(tmp_path / "run").state_dict()
    assert np.array_equal(trained["conv_1.weight"].numpy(), conv[0])
    assert trained["fc.weight"].abs().max() > 0


def test_a_layer_of_that_name_with_another_shape_is_an_error(home: Path, tmp_path: Path) -> None:
    file = write_caffemodel(tmp_path / "x.caffemodel", **{"conv/1": blobs((4, 3, 3, 3), (4,))})
    words = [home / "models" / "solver.prototxt", "--weights", file, "--out", tmp_path / "no"]
    assert "net.prototxt:13: the weights of Convolution 'conv/1' are" in typed.refused(
        2, "import", *words
    )
    assert not (tmp_path / "no").exists()


def test_a_net_with_all_its_weights_is_used_as_it_is(tmp_path: Path) -> None:
    net = tmp_path / "deploy.prototxt"
    net.write_text(DEPLOY)
    conv, other = blobs((4, 1, 3, 3), (4,)), blobs((3, 144), (3,))
    file = write_caffemodel(tmp_path / "x.caffemodel", **{"conv/1": conv, "other": other})
    folder = tmp_path / "deploy"
    typed.said_by("import", net, "--weights", file, "--out", folder)
    network = firecaffe.load(folder)
    assert np.array_equal(network.state_dict()["other.weight"].numpy(), other[0])
    export = ("export", str(folder), "--to", "safetensors")
    typed.said_by(*export)
    assert load_file(folder / "model.safetensors").keys() == network.state_dict().keys()
    assert "--data.name" in typed.refused(2, "evaluate", folder)
    # A run that began there and has saved nothing is no trained network.
    (folder / "environment.json").write_text("{}")
    assert "checkpoint" in typed.refused(4, *export, "--overwrite")


def test_a_deployed_net_gives_the_probabilities_that_it_gave_before(
    imported: Path, tmp_path: Path
) -> None:
    """Its file ends in a Softmax, as Caffe's deploy.prototxt does, and it is not applied twice."""
    run, model, folder = tmp_path / "run", tmp_path / "d.caffemodel", tmp_path / "d"
    train(imported / "recipe.toml", run)
    typed.said_by("export", run, "--to", "caffemodel", "--out", model)
    assert 'type: "Softmax"' in (tmp_path / "d.prototxt").read_text()
    said = typed.said_by("import", tmp_path / "d.prototxt", "--weights", model, "--out", folder)
    assert "Softmax 'prob'" in said
    sample = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before, after = firecaffe.load(run, trust_code=True), firecaffe.load(folder)
    with torch.no_grad():
        assert torch.equal(before(sample), after(sample))
    typed.said_by("export", folder, "--to", "caffemodel", "--out", tmp_path / "again.caffemodel")
    assert (tmp_path / "again.prototxt").read_text() == (tmp_path / "d.prototxt").read_text()


def test_plan_and_profile_take_it(imported: Path) -> None:
    typed.said_by("plan", imported / "recipe.toml", "--workers", "1,2", "--json")
    net = f"caffe:{imported}/net.prototxt"
    assert "conv_1" in typed.said_by("profile", net, "--input", "1x8x8")


def test_verify_takes_it(imported: Path) -> None:
    done = typed.firecaffe(
        *("verify", imported / "recipe.toml", "--steps", 2, "--nproc-per-node", "1,2"),
        cwd=imported,
    )
    assert done.returncode == 0, done.stderr


# file, text in it, text instead, exit code, what is said
WRONG: list[tuple[str, str, str, int, str]] = [
    ("solver", "max_iter: 6", "max_iter: 6 snapshot_diff: true", 20, ":14: gradients"),
    ("solver", "max_iter: 6", "max_iter: 6\nmin_lr: 1", 20, ":15: min_lr is not understood"),
    ("solver", 'lr_policy: "step"', 'lr_policy: "plateau"', 2, ':10: lr_policy is "plat'),
    ("solver", "stepsize: 4", "stepsize: 0", 2, ":12: solver.stepsize is 0"),
    ("solver", "models/net.", "models/no.", 2, ':2: net "models/no.prototxt" is not'),
    ("net", 'bottom: "pool"', 'bottom: "pol"', 2, ":24: InnerProduct 'fc' takes 'pol'"),
    ("net", 'type: "ReLU"', 'type: "Relu6"', 2, '"Relu6" at line 18'),
    ("net", "kernel_size: 3 weight", "kernel_size: 30 weight", 2, ":13: "),
    ("net", "pool: MAX", "pool: MAX magic: 3", 20, ":21: pool: pooling_param.magic is not und"),
]


@pytest.mark.parametrize(("name", "before", "after", "code", "said"), WRONG)
def test_what_is_wrong_is_one_line_with_its_place(
    home: Path, tmp_path: Path, name: str, before: str, after: str, code: int, said: str
) -> None:
    whole = {"solver": SOLVER, "net": NET}[name]
    assert before in whole
    file, out = tmp_path / f"{name}.prototxt", tmp_path / "out"
    file.write_text(whole.replace(before, after))
    line = typed.refused(code, "import", file, "--root", home, "--out", out)
    assert f"{name}.prototxt:" in line
    assert said in line
    assert (out / "recipe.toml").exists() == out.exists() == (code == 20)
    assert code == 2 or said in (out / "report.md").read_text().replace("`: ", ": ")


def test_files_that_are_there_are_not_written_over(home: Path, imported: Path) -> None:
    words = ["import", str(home / "models" / "solver.prototxt"), "--out", str(imported)]
    before = (imported / "recipe.toml").read_bytes()
    assert "--overwrite" in typed.refused(8, *words)
    typed.said_by(*words, "--overwrite")
    assert (imported / "recipe.toml").read_bytes() == before


def test_without_the_data_the_shape_is_typed(tmp_path: Path) -> None:
    net = tmp_path / "net.prototxt"
    net.write_text(NET.replace("crop_size: 8", ""))
    words = ["import", str(net), "--out", str(tmp_path / "out")]
    assert "net.prototxt:3: the shape of the samples is not known" in typed.refused(2, *words)
    assert "needed" in typed.said_by(*words, "--input-shape", "1x9x9")
    assert recipe_of_run(tmp_path / "out").model.args == {"input_CHW": [1, 9, 9]}


@pytest.mark.slow
def test_the_digests_of_any_number_of_workers(imported: Path, tmp_path: Path) -> None:
    recipe = imported / "recipe.toml"
    digests = {digest(recipe, tmp_path / str(workers), workers) for workers in (1, 2, 3, 4)}
    assert len(digests) == 1
