"""Predictions of tasks of other kinds: masks, values, several labels; and gray images."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import firecaffe
from firecaffe import DataConfig, ModelConfig, Recipe, RunConfig, TaskConfig, TrainConfig
from firecaffe.cli import main
from firecaffe.data import open_data
from firecaffe.errors import RecipeError
from firecaffe.training.prediction import as_inputs, read_image
from firecaffe.training.run_facts import About

OWN = """
import torch
from torch import nn
import firecaffe

def net(outputs, size):
    layers = [nn.Conv2d(3, outputs, 1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(outputs * size * size, outputs))

def pixels():
    return nn.Conv2d(3, 3, 1)

def data(kind):
    images = torch.arange(12 * 3 * 16).view(12, 3, 4, 4) / 576
    targets = {
        "segmentation": (images[:, 0] > 0.5).long(),
        "regression": images.mean((1, 2, 3)).view(12, 1),
        "multilabel": (images.mean((2, 3)) > 0.5).float(),
        "classes": (images.mean((1, 2, 3)) > 0.5).long(),
    }[kind]
    whole = firecaffe.TensorDataset(images, targets, 3 if kind != "regression" else None)
    return {"train": whole, "test": whole}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predict") / "predicted_parts.py"
    path.write_text(OWN)
    return path


def fit(
    own: Path, kind: str, model: ModelConfig, task: TaskConfig | None = None, name: str = ""
) -> firecaffe.Result:
    recipe = Recipe(
        model=model,
        data=DataConfig(f"{own}:data", args={"kind": kind}),
        train=TrainConfig(12, 4, steps=2, eval_batch_size=5),
        task=task or TaskConfig(kind),
        run=RunConfig(str(own.parent / (name or kind)), tensorboard=False),
    )
    return firecaffe.train(recipe)


def table(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, str]]:
    capsys.readouterr()
    assert main(["predict", *map(str, words), "--csv", "-", "--trust-code"]) == 0
    return list(csv.DictReader(capsys.readouterr().out.splitlines()))


def test_a_segmentation_gives_masks(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(own, "segmentation", ModelConfig(f"{own}:pixels"))
    rows = table(capsys, result.folder, "--out", own.parent / "masks")
    assert [row["sample"] for row in rows] == [str(number) for number in range(12)]
    images = torch.arange(12 * 3 * 16).view(12, 3, 4, 4) / 576
    with torch.no_grad():
        expected = result.model(images).argmax(1)
    for row, mask in zip(rows, expected, strict=True):
        assert np.array_equal(np.asarray(Image.open(row["mask"])), mask.numpy())


@pytest.mark.parametrize(("kind", "outputs"), [("regression", 1), ("multilabel", 3)])
def test_values_and_labels(
    own: Path, kind: str, outputs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelConfig(f"{own}:net", args={"outputs": outputs, "size": 4})
    result = fit(own, kind, model)
    rows = table(capsys, result.folder)
    with torch.no_grad():
        values = result.model(torch.arange(12 * 3 * 16).view(12, 3, 4, 4) / 576)
    expected = values.sigmoid() if kind == "multilabel" else values
    found = torch.tensor([[float(row[name]) for name in list(row)[1:]] for row in rows])
    assert torch.allclose(found, expected, atol=1e-6)
    # How an image becomes an input is known to the data set alone.
    assert main(["predict", str(result.folder), str(own.parent), "--trust-code"]) == 2
    assert "data set of one's own" in capsys.readouterr().err


NET_OF_CAFFE = """
layer { name: "d" type: "HDF5Data" top: "data" top: "label" hdf5_data_param { batch_size: 4 } }
layer { name: "out" type: "InnerProduct" bottom: "data" top: "out"
        inner_product_param { num_output: 2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "out" bottom: "label" top: "loss" }
"""


def test_a_net_of_caffe_gives_classes(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = own.parent / "net.prototxt"
    net.write_text(NET_OF_CAFFE)
    model = ModelConfig(f"{own}:net", args={"outputs": 2, "size": 4})
    result = fit(own, "classes", model, TaskConfig(f"caffe:{net}"))
    with torch.no_grad():
        logits = result.model(torch.arange(12 * 3 * 16).view(12, 3, 4, 4) / 576)
    rows = table(capsys, result.folder)
    assert [int(row["class_1"]) for row in rows] == logits.argmax(1).tolist()
    found = torch.tensor([float(row["probability_1"]) for row in rows])
    assert torch.allclose(found, logits.softmax(1).amax(1))


def test_a_gray_image_is_what_pillow_makes_of_it(tmp_path: Path) -> None:
    colors = np.random.default_rng(0).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    image = Image.fromarray(colors)
    image.save(tmp_path / "color.png")
    image.convert("L").save(tmp_path / "gray.png")
    about = About(10, 1, (), (1, 28, 28), False, (1, 28, 28), "float32", ())
    config = DataConfig(mean=[0.5], std=[0.25])
    inputs = as_inputs(
        [read_image(tmp_path / name, about, config) for name in ("color.png", "gray.png")],
        about,
        config,
        torch.device("cpu"),
    )
    assert torch.equal(inputs[0], inputs[1])
    expected = (torch.from_numpy(np.array(image.convert("L"))).float() / 255 - 0.5) / 0.25
    assert torch.equal(inputs[0, 0], expected)


LISTED = """
layer {{ name: "data" type: "ImageData" top: "data" top: "label"
  image_data_param {{ source: "{source}" batch_size: 4 new_height: 6 new_width: 6 }}
  transform_param {{ crop_size: 4 mean_value: 100 scale: 0.02 mirror: {mirror} }}
  include {{ phase: {phase} }} }}
"""

NET = """
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def test_images_of_a_caffe_net_by_its_own_transform(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a list of the same files, as the net's test data, comes to; and its class names."""
    draw = np.random.default_rng(0)
    files = [f"{'cat dog elk'.split()[number % 3]}/{number}.png" for number in range(6)]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (9, 7, 3), dtype=np.uint8)).save(tmp_path / file)
    listed = "".join(f"{file} {number % 3}\n" for number, file in enumerate(files))
    (tmp_path / "list.txt").write_text(listed)
    data = "".join(
        LISTED.format(source="list.txt", phase=phase, mirror=str(phase == "TRAIN").lower())
        for phase in ("TRAIN", "TEST")
    )
    net = tmp_path / "net.prototxt"
    net.write_text(data + NET)
    recipe = Recipe(
        model=ModelConfig(f"caffe:{net}"),
        data=DataConfig(f"caffe:{net}"),
        train=TrainConfig(4, 2, steps=2, eval_batch_size=4),
        task=TaskConfig(f"caffe:{net}"),
        run=RunConfig(str(tmp_path / "run"), tensorboard=False),
    )
    result = firecaffe.train(recipe)
    expected = table(capsys, result.folder)
    rows = table(capsys, result.folder, *(tmp_path / file for file in files))
    assert [row["sample"] for row in rows] == [str(tmp_path / file) for file in files]
    for row in (*rows, *expected):
        del row["sample"]
    assert rows == expected
    assert {row["class_1"] for row in rows} <= {"cat", "dog", "elk"}

    # The data need not be there, and arrays are taken as the network is given them.
    (tmp_path / "list.txt").unlink()
    again = table(capsys, result.folder, tmp_path / files[0])
    assert again[0]["class_1"] == rows[0]["class_1"]
    assert float(again[0]["probability_1"]) == pytest.approx(float(rows[0]["probability_1"]))
    np.save(tmp_path / "wide.npy", np.zeros((3, 4, 5), np.float32))
    Image.new("RGB", (2, 2)).save(tmp_path / "tall.png")
    assert main(["predict", str(result.folder), str(tmp_path / "wide.npy")]) == 3
    assert "wide.npy: comes to 3 x 4 x 5; the network takes 3 x 4 x 4" in capsys.readouterr().err


def test_arrays_are_samples_as_the_data_set_gives_them(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ModelConfig(f"{own}:net", args={"outputs": 1, "size": 4})
    result = fit(own, "regression", model, name="arrays")
    samples = (np.arange(12 * 3 * 16, dtype=np.float32).reshape(12, 3, 4, 4) / 576)[:7]
    np.save(tmp_path / "rows.npy", samples)
    np.save(tmp_path / "one.npy", samples[2].astype(np.float64))
    rows = table(capsys, result.folder, tmp_path / "rows.npy", tmp_path / "one.npy")
    assert [row["sample"] for row in rows[-2:]] == [
        f"{tmp_path / 'rows.npy'}[6]",
        str(tmp_path / "one.npy"),
    ]
    expected = table(capsys, result.folder)
    found = [float(row["value_1"]) for row in rows]
    assert found == pytest.approx([float(expected[n]["value_1"]) for n in (*range(7), 2)])

    np.save(tmp_path / "bytes.npy", np.zeros((3, 4, 4), np.uint8))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("no array")
    with (tmp_path / "huge.npy").open("wb") as file:  # of which nothing follows
        header = {"descr": "<f4", "fortran_order": False, "shape": (2**50, 3, 4, 4)}
        np.lib.format.write_array_header_1_0(file, header)
    for name, said in (
        ("bytes", "is of uint8; expected float32"),
        ("objects", "is no array that is read"),
        ("text", "is no array that is read"),
        ("huge", "is no array that is read"),
    ):
        words = ["predict", str(result.folder), str(tmp_path / f"{name}.npy"), "--trust-code"]
        assert main(words) == 3
        assert f"{name}.npy: {said}" in capsys.readouterr().err
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    words = ["predict", str(result.folder), str(tmp_path / "image.png"), "--trust-code"]
    assert main(words) == RecipeError.exit_code
    assert "(3x4x4) are made by a data set of one's own" in capsys.readouterr().err


def test_an_array_of_a_data_set_of_ours_is_an_image_of_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe(
        model=ModelConfig("lenet"),
        data=DataConfig("generated", mean=[0.4], std=[0.3]),
        train=TrainConfig(4, 2, steps=1, eval_batch_size=500),
        run=RunConfig(str(tmp_path / "run"), tensorboard=False),
    )
    folder = firecaffe.train(recipe).folder
    images, _ = open_data(recipe.data).test.batch(torch.arange(3))
    np.save(tmp_path / "some.npy", images.numpy())
    rows, expected = table(capsys, folder, tmp_path / "some.npy"), table(capsys, folder)[:3]
    assert [row["class_1"] for row in rows] == [row["class_1"] for row in expected]
