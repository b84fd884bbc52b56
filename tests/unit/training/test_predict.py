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
from firecaffe.training.about import About
from firecaffe.training.image_files import as_inputs, read_image

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
    own: Path, kind: str, model: ModelConfig, task: TaskConfig | None = None
) -> firecaffe.Result:
    recipe = Recipe(
        model=model,
        data=DataConfig(f"{own}:data", args={"kind": kind}),
        train=TrainConfig(12, 4, steps=2, eval_batch_size=5),
        task=task or TaskConfig(kind),
        run=RunConfig(str(own.parent / kind), tensorboard=False),
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
        config,
        torch.device("cpu"),
    )
    assert torch.equal(inputs[0], inputs[1])
    expected = (torch.from_numpy(np.array(image.convert("L"))).float() / 255 - 0.5) / 0.25
    assert torch.equal(inputs[0, 0], expected)
