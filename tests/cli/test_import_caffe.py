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
from firecaffe.cli import main
from firecaffe.recipe.recorded_recipe import recipe_of
from tests import typed
from tests.cli.commands import Capture, refused, shown
from tests.kit.training import record_of
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
    samples = []
    for number in range(count):
        image_CHW = draw.integers(0, 100, (1, 10, 10), dtype=np.uint8)
        image_CHW[:, :, 2 + 2 * (number % 3)] += 120
        samples.append(raw(image_CHW, number % 3))
    return samples


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
def solver(home: Path) -> Path:
    return home / "models" / "solver.prototxt"


@pytest.fixture(scope="module")
def imported(home: Path, solver: Path) -> Path:
    assert main(["import", str(solver), "--out", str(home / "small")]) == 0
    return home / "small"


def train(recipe: Path, folder: Path, *words: object) -> Path:
    run = ("--run.folder", folder, "--run.tensorboard", "false")
    done = typed.firecaffe("train", recipe, *run, *words)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_solver_becomes_a_recipe_beside_the_users_files(
    home: Path, solver: Path, imported: Path
) -> None:
    recipe = recipe_of(imported)
    name = f"caffe:{imported}/net.prototxt"
    assert (recipe.model.name, recipe.data.name, recipe.task.name) == (name, name, name)
    assert recipe.model.args == {"input_CHW": [1, 8, 8]}
    assert recipe.data.path == str(home)
    sizes = recipe.train.global_batch_size, recipe.train.micro_batch_size, recipe.train.steps
    assert sizes == (16, 2, 6)
    assert recipe.solver.clip_gradients == 1.0  # of the mean over 2 passes
    assert recipe.solver.lr_mult == {"*.bias": 2.0}
    assert recipe.solver.decay_mult == {"*.bias": 0.0}
    for file in (solver, home / "models" / "net.prototxt"):
        assert (imported / file.name).read_bytes() == file.read_bytes()
    assert f"`{solver}:14`: train.steps 6" in (imported / "report.md").read_text()
    assert {each.name for each in imported.iterdir()} == {
        *("recipe.toml", "net.prototxt", "solver.prototxt", "report.md", "about.json")
    }


def test_the_recipe_trains_to_the_same_bits_on_two_workers(
    imported: Path, tmp_path: Path, capsys: Capture
) -> None:
    runs = [
        train(imported / "recipe.toml", tmp_path / str(n), "--nproc-per-node", n) for n in (1, 2)
    ]
    one, two = map(record_of, runs)
    assert one["weights_sha256"] == two["weights_sha256"]
    assert two["metrics"] == ["accuracy"]
    evaluated = json.loads(shown(capsys, "evaluate", runs[1], "--json"))
    assert evaluated["loss"] == two["test_loss"]


def blobs(*shapes: tuple[int, ...]) -> list[NDArray[np.float32]]:
    draw = np.random.default_rng(5)
    return [draw.standard_normal(shape).astype(np.float32) for shape in shapes]


def write_caffemodel(path: Path, **layers: list[NDArray[np.float32]]) -> Path:
    rows = [caffemodel.TrainedLayer(name, "", each) for name, each in layers.items()]
    caffemodel.write(path, rows)
    return path


def test_layers_are_filled_by_name_and_a_renamed_one_starts_afresh(
    solver: Path, tmp_path: Path, capsys: Capture
) -> None:
    conv = blobs((4, 1, 3, 3), (4,))
    layers = {"conv/1": conv, "fc8": blobs((1000, 36), (1000,))}
    file = write_caffemodel(tmp_path / "x.caffemodel", **layers)
    folder = tmp_path / "tuned"
    said = shown(capsys, "import", solver, "--weights", file, "--out", folder)
    assert "start as their fillers say: fc" in said
    assert "in the file alone: fc8" in said
    held = load_file(folder / "weights.safetensors")
    assert held.keys() == {"conv_1.weight", "conv_1.bias"}
    assert np.array_equal(held["conv_1.weight"], conv[0])
    still = ("--solver.base_lr", 0, "--train.steps", 1)
    run = train(folder / "recipe.toml", tmp_path / "run", *still)
    trained = firecaffe.load(run).state_dict()
    assert np.array_equal(trained["conv_1.weight"].numpy(), conv[0])
    assert trained["fc.weight"].abs().max() > 0
    # One of that name with another shape is an error.
    write_caffemodel(file, **{"conv/1": blobs((4, 3, 3, 3), (4,))})
    line = refused(capsys, 2, "import", solver, "--weights", file, "--out", tmp_path / "no")
    assert "net.prototxt:13: the weights of Convolution 'conv/1' are" in line
    assert not (tmp_path / "no").exists()


def test_a_net_with_all_its_weights_is_used_as_it_is(tmp_path: Path, capsys: Capture) -> None:
    net = tmp_path / "deploy.prototxt"
    net.write_text(DEPLOY)
    conv, other = blobs((4, 1, 3, 3), (4,)), blobs((3, 144), (3,))
    file = write_caffemodel(tmp_path / "x.caffemodel", **{"conv/1": conv, "other": other})
    folder = tmp_path / "deploy"
    shown(capsys, "import", net, "--weights", file, "--out", folder)
    network = firecaffe.load(folder)
    assert np.array_equal(network.state_dict()["other.weight"].numpy(), other[0])
    export = ("export", folder, "--to", "safetensors")
    shown(capsys, *export)
    assert load_file(folder / "model.safetensors").keys() == network.state_dict().keys()
    assert "--data.name" in refused(capsys, 2, "evaluate", folder)
    # A run that began there and has saved nothing is no trained network.
    (folder / "environment.json").write_text("{}")
    assert "checkpoint" in refused(capsys, 4, *export, "--overwrite")


def test_a_deployed_net_gives_the_probabilities_that_it_gave_before(
    imported: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Its file ends in a Softmax, as Caffe's deploy.prototxt does, and it is not applied twice."""
    run = train(imported / "recipe.toml", tmp_path / "run")
    shown(capsys, "export", run, "--to", "caffemodel", "--out", tmp_path / "d.caffemodel")
    deploy = tmp_path / "d.prototxt"
    assert 'type: "Softmax"' in deploy.read_text()
    whole = ("--weights", tmp_path / "d.caffemodel", "--out", tmp_path / "d")
    assert "Softmax 'prob'" in shown(capsys, "import", deploy, *whole)
    sample = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before, after = firecaffe.load(run, trust_code=True), firecaffe.load(tmp_path / "d")
    with torch.no_grad():
        assert torch.equal(before(sample), after(sample))
    again = tmp_path / "again.caffemodel"
    shown(capsys, "export", tmp_path / "d", "--to", "caffemodel", "--out", again)
    assert again.with_suffix(".prototxt").read_text() == deploy.read_text()


def test_plan_profile_and_verify_take_it(imported: Path, capsys: Capture) -> None:
    recipe = imported / "recipe.toml"
    shown(capsys, "plan", recipe, "--workers", "1,2", "--json")
    net = f"caffe:{imported}/net.prototxt"
    assert "conv_1" in shown(capsys, "profile", net, "--input", "1x8x8")
    done = typed.firecaffe("verify", recipe, "--steps", 2, "--nproc-per-node", "1,2", cwd=imported)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        ("max_iter: 6", "max_iter: 6 snapshot_diff: true", 20, "solver.prototxt:14: gradients"),
        ("max_iter: 6", "max_iter: 6\nmin_lr: 1", 20, "solver.prototxt:15: min_lr is not under"),
        ('lr_policy: "step"', 'lr_policy: "plateau"', 2, 'solver.prototxt:10: lr_policy is "plat'),
        ("stepsize: 4", "stepsize: 0", 2, "solver.prototxt:12: solver.stepsize is 0"),
        ("models/net.", "models/no.", 2, 'solver.prototxt:2: net "models/no.prototxt" is not'),
        ('bottom: "pool"', 'bottom: "pol"', 2, "net.prototxt:24: InnerProduct 'fc' takes 'pol'"),
        ('type: "ReLU"', 'type: "Relu6"', 2, '"Relu6" at line 18'),
        ("kernel_size: 3 weight", "kernel_size: 30 weight", 2, "net.prototxt:13: "),
        (
            "pool: MAX",
            "pool: MAX magic: 3",
            20,
            "net.prototxt:21: pool: pooling_param.magic is not",
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(
    home: Path, tmp_path: Path, before: str, after: str, code: int, said: str, capsys: Capture
) -> None:
    name, text = ("solver", SOLVER) if before in SOLVER else ("net", NET)
    file = home / "models" / tmp_path.name / f"{name}.prototxt"
    file.parent.mkdir(parents=True)
    assert before in text
    file.write_text(text.replace(before, after))
    root = ["--root", home] if name == "net" else []
    assert said in refused(capsys, code, "import", file, *root, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "recipe.toml").exists() == (code == 20)


def test_files_that_are_there_are_not_written_over(
    solver: Path, imported: Path, capsys: Capture
) -> None:
    before = (imported / "recipe.toml").read_bytes()
    words = ("import", solver, "--out", imported)
    assert "--overwrite" in refused(capsys, 8, *words)
    shown(capsys, *words, "--overwrite")
    assert (imported / "recipe.toml").read_bytes() == before


def test_without_the_data_the_shape_is_typed(tmp_path: Path, capsys: Capture) -> None:
    net = tmp_path / "net.prototxt"
    net.write_text(NET.replace("crop_size: 8", ""))
    words = ("import", net, "--out", tmp_path / "out")
    line = refused(capsys, 2, *words)
    assert "net.prototxt:3: the shape of the samples is not known" in line
    assert "needed" in shown(capsys, *words, "--input-shape", "1x9x9")
    assert recipe_of(tmp_path / "out").model.args == {"input_CHW": [1, 9, 9]}


@pytest.mark.slow
def test_the_digests_of_any_number_of_workers(imported: Path, tmp_path: Path) -> None:
    recipe = imported / "recipe.toml"
    runs = (train(recipe, tmp_path / str(n), "--nproc-per-node", n) for n in (1, 2, 3, 4))
    assert len({record_of(run)["weights_sha256"] for run in runs}) == 1
