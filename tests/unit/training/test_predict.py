"""Predictions of tasks of other kinds: masks, values, several labels; and gray images."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import firecaffe
from firecaffe import DataConfig, Recipe
from firecaffe.cli import main
from firecaffe.cluster.world import World
from firecaffe.data import open_data
from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.tasks.known_tasks import task_of
from firecaffe.training.evaluation import evaluate
from firecaffe.training.given_parts import NOTHING, About
from firecaffe.training.prediction import as_inputs, predictions, read_image, reader_of
from tests.kit.data_photos import make_folder
from tests.kit.training import recipe_in
from tests.kit.training_fixtures import Capture

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
    names = ("sample", "a", "a") if kind == "multilabel" else ()
    classes = 3 if kind != "regression" else None
    whole = firecaffe.TensorDataset(images, targets, classes, class_names=names)
    return {"train": whole, "test": whole}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predict") / "predicted_parts.py"
    path.write_text(OWN)
    return path


IMAGES = torch.arange(12 * 3 * 16).view(12, 3, 4, 4) / 576


def fit(
    own: Path, folder: Path, kind: str, outputs: int = 0, task: str = ""
) -> tuple[firecaffe.Result, torch.Tensor]:
    """The result, and what its network says of the images. outputs: 0: one for each pixel."""
    net = {"name": f"{own}:net", "args": {"outputs": outputs, "size": 4}}
    recipe = recipe_in(
        folder,
        model=net if outputs else {"name": f"{own}:pixels"},
        data={"name": f"{own}:data", "args": {"kind": kind}},
        train={"global_batch_size": 12, "micro_batch_size": 4, "steps": 2, "eval_batch_size": 5},
        task={"name": task or kind},
    )
    result = firecaffe.train(recipe)
    with torch.no_grad():
        return result, result.model(IMAGES)


def table(capsys: Capture, *words: object) -> list[dict[str, str]]:
    capsys.readouterr()
    assert main(["predict", *map(str, words), "--csv", "-", "--trust-code"]) == 0
    return list(csv.DictReader(capsys.readouterr().out.splitlines()))


def refused(capsys: Capture, code: int, said: str, *words: object) -> None:
    assert main(["predict", *map(str, words), "--trust-code"]) == code
    assert said in capsys.readouterr().err


NET_OF_CAFFE = """
layer { name: "d" type: "HDF5Data" top: "data" top: "label" hdf5_data_param { batch_size: 4 } }
layer { name: "out" type: "InnerProduct" bottom: "data" top: "out"
        inner_product_param { num_output: 2 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "out" bottom: "label" top: "loss" }
"""


@pytest.mark.parametrize(
    ("kind", "outputs"), [("segmentation", 0), ("regression", 1), ("multilabel", 3), ("classes", 2)]
)
def test_each_kind_of_task(
    own: Path, tmp_path: Path, kind: str, outputs: int, capsys: Capture
) -> None:
    """Masks, values, probabilities of labels, and the class by a net of Caffe."""
    net = tmp_path / "net.prototxt"
    net.write_text(NET_OF_CAFFE)
    task = f"caffe:{net}" if kind == "classes" else ""
    result, values = fit(own, tmp_path / "run", kind, outputs, task)
    masks = ["--out", tmp_path / "masks"] if kind == "segmentation" else []
    rows = table(capsys, result.folder, *masks)
    assert [row["sample"] for row in rows] == [str(number) for number in range(12)]
    if kind == "segmentation":
        for row, mask in zip(rows, values.argmax(1), strict=True):
            assert np.array_equal(np.asarray(Image.open(row["mask"])), mask.numpy())
    elif kind == "classes":
        assert [int(row["class_1"]) for row in rows] == values.argmax(1).tolist()
        shown = torch.tensor([float(row["probability_1"]) for row in rows])
        assert torch.allclose(shown, values.softmax(1).amax(1))
    else:
        assert kind != "multilabel" or list(rows[0]) == ["sample", "sample_0", "a", "a_2"]
        expected = values.sigmoid() if kind == "multilabel" else values
        shown = torch.tensor([[float(row[name]) for name in list(row)[1:]] for row in rows])
        assert torch.allclose(shown, expected, atol=1e-6)


def test_a_gray_image_is_what_pillow_makes_of_it(tmp_path: Path) -> None:
    colors = np.random.default_rng(0).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    image = Image.fromarray(colors)
    image.save(tmp_path / "color.png")
    image.convert("L").save(tmp_path / "gray.png")
    about = About(10, 1, (), (1, 28, 28), False, (1, 28, 28), "float32", ())
    config = DataConfig(mean=[0.5], std=[0.25])
    read = [read_image(tmp_path / name, about, config) for name in ("color.png", "gray.png")]
    inputs = as_inputs(read, about, config, torch.device("cpu"))
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


def test_images_of_a_caffe_net_by_its_own_transform(tmp_path: Path, capsys: Capture) -> None:
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
    parts: dict[str, Any] = {
        section: {"name": f"caffe:{net}"} for section in ("model", "data", "task")
    }
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "steps": 2, "eval_batch_size": 4}
    result = firecaffe.train(recipe_in(tmp_path / "run", **parts, train=sizes))
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
    said = "wide.npy: comes to 3 x 4 x 5; the network takes 3 x 4 x 4"
    refused(capsys, 3, said, result.folder, tmp_path / "wide.npy")


def test_arrays_are_as_the_data_set_gives_them(own: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = fit(own, tmp_path / "run", "regression", 1)[0].folder
    samples = IMAGES[:7].numpy()
    np.save(tmp_path / "rows.npy", samples)
    np.save(tmp_path / "one.npy", samples[2].astype(np.float64))
    np.save(tmp_path / "big-endian.npy", samples[2].astype(">f4"))
    files = [tmp_path / f"{name}.npy" for name in ("rows", "one", "big-endian")]
    rows = table(capsys, folder, *files)
    names = [f"{files[0]}[6]", str(files[1]), str(files[2])]
    assert [row["sample"] for row in rows[-3:]] == names
    expected = table(capsys, folder)
    values = [float(row["value_1"]) for row in rows]
    assert values == pytest.approx([float(expected[n]["value_1"]) for n in (*range(7), 2, 2)])

    np.save(tmp_path / "bytes.npy", np.zeros((3, 4, 4), np.uint8))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "several.npz", samples)
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    shapes = {"long": "(99999999999999999999,)", "true": "(True,)", "open": "(1L,(", "text": ""}
    for name, shape in shapes.items():
        claim = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n"
        start = b"\x93NUMPY\1\0" + len(claim).to_bytes(2, "little")
        (tmp_path / f"{name}.npy").write_bytes(start + claim.encode())
    with (tmp_path / "huge.npy").open("wb") as file:  # of which nothing follows
        header = {"descr": "<f4", "fortran_order": False, "shape": (2**50, 3, 4, 4)}
        np.lib.format.write_array_header_1_0(file, header)
    refused(capsys, 3, "bytes.npy: is of uint8; expected", folder, tmp_path / "bytes.npy")
    for name in ("objects", "several", "huge", *shapes):
        said = f"{name}.npy: is no array that is read"
        refused(capsys, 3, said, folder, tmp_path / f"{name}.npy")
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    said = "an input of the run (3x4x4)"
    refused(capsys, RecipeError.exit_code, said, folder, tmp_path / "image.png")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DataConfig(std=[0.0]), "data.std"),
        (DataConfig(mean=[0.1, 0.2]), "data.mean"),
        (DataConfig(resize=10, crop=11), "data.crop"),
        (DataConfig(resize=10**8), "data.resize"),
    ],
)
def test_settings_are_checked_before_images_are_read(config: DataConfig, said: str) -> None:
    about = replace(NOTHING, sample_CHW=(3, 12, 12), is_decoded=True, input_shape=(3, 12, 12))
    with pytest.raises(RecipeError, match=said):
        reader_of([Path("image.png")], about, config)


def test_samples_that_the_network_does_not_take_are_named() -> None:
    batches = [(["some.npy", "other.npy"], torch.tensor([[1, 2], [3, 7]]))]
    with pytest.raises(OwnCodeError, match=r"some\.npy to other\.npy: it raised IndexError"):
        list(predictions(nn.Embedding(5, 3), Recipe(), iter(batches), torch.device("cpu")))


def test_a_test_batch_that_the_network_does_not_take_is_named() -> None:
    recipe = Recipe(data=DataConfig("generated"))
    test, alone = open_data(recipe.data).test, World(0, 1, torch.device("cpu"))
    task = task_of(recipe.task, 10)
    with pytest.raises(OwnCodeError, match="test batch 0: it raised"):
        evaluate(nn.Linear(3, 10), task, test, recipe.data, recipe.train, alone)


def test_an_array_of_a_data_set_of_ours_is_an_image(tmp_path: Path, capsys: Capture) -> None:
    data = {"name": "generated", "mean": [0.4], "std": [0.3]}
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "steps": 1, "eval_batch_size": 500}
    recipe = recipe_in(tmp_path / "run", model={"name": "lenet"}, data=data, train=sizes)
    folder = firecaffe.train(recipe).folder
    images, _ = open_data(recipe.data).test.batch(torch.arange(3))
    np.save(tmp_path / "some.npy", images.numpy())
    rows, expected = table(capsys, folder, tmp_path / "some.npy"), table(capsys, folder)[:3]
    assert [row["class_1"] for row in rows] == [row["class_1"] for row in expected]


def test_each_row_of_an_array_has_a_mask_that_stays(
    own: Path, tmp_path: Path, capsys: Capture
) -> None:
    result, values = fit(own, tmp_path / "run", "segmentation")
    np.save(tmp_path / "rows.npy", IMAGES.numpy())
    words = (result.folder, tmp_path / "rows.npy", "--out", tmp_path / "masks")
    masks = [Path(row["mask"]) for row in table(capsys, *words)]
    assert masks == [tmp_path / "masks" / f"rows[{number}].png" for number in range(12)]
    for path, mask in zip(masks, values.argmax(1), strict=True):
        assert np.array_equal(np.asarray(Image.open(path)), mask.numpy())
    masks[0].write_bytes(b"of somebody else")
    refused(capsys, 8, "--overwrite", *words)
    assert masks[0].read_bytes() == b"of somebody else"
    table(capsys, *words, "--overwrite")
    assert np.array_equal(np.asarray(Image.open(masks[0])), values[0].argmax(0).numpy())


def test_a_damaged_test_image_is_named_and_has_no_row(
    own: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Another image stands in for it, whose prediction is not its own."""
    photos = make_folder(tmp_path / "photos", train=8, test=4)
    result = firecaffe.train(
        recipe_in(
            tmp_path / "run",
            model={"name": f"{own}:net", "args": {"outputs": 2, "size": 4}},
            data={"name": "folder", "path": str(photos), "resize": 4, "on_error": "skip"},
            train={"global_batch_size": 4, "micro_batch_size": 2, "steps": 1, "eval_batch_size": 3},
        )
    )
    broken = photos / "test" / "cat" / "002.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    trusted: dict[str, Any] = {"trust_code": True}
    answer = firecaffe.predict(result.folder, **trusted)
    assert [row["sample"] for row in answer.rows] == ["0", "2", "3"]
    assert ["002.jpg" in line for line in answer.broken] == [True]
    assert main(["predict", str(result.folder), "--trust-code"]) == 3
    assert "002.jpg" in capsys.readouterr().err
    for ranks in (1, 2):
        evaluated = firecaffe.evaluate(result.folder, nproc_per_node=ranks, **trusted)
        assert ["002.jpg" in note for note in evaluated.notes] == [True], ranks


NAMED = """
from torch import eye, nn
from torch.utils.data import Dataset

class Vectors(Dataset):
    def __init__(self, classes):
        self.classes = list(classes)

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, index):
        return eye(3)["abc".index(self.classes[index])], index

def data(classes):
    return Vectors(classes), Vectors(classes)

def net():
    return nn.Linear(3, 3)
"""


def test_classes_of_samples_that_are_no_images_are_matched_by_name(tmp_path: Path) -> None:
    own = tmp_path / "named_vectors.py"
    own.write_text(NAMED)
    recipe = recipe_in(
        tmp_path / "run",
        model={"name": f"{own}:net"},
        data={"name": f"{own}:data", "args": {"classes": "abc"}},
        train={"global_batch_size": 2, "micro_batch_size": 2, "steps": 2},
    )
    run = firecaffe.train(recipe).folder
    losses = [
        firecaffe.evaluate(
            run, replace={"data.args": {"classes": classes}}, trust_code=True
        ).evaluation.loss
        for classes in ("abc", "bca", "a", "b", "c")
    ]
    assert losses[1] == pytest.approx(losses[0])
    assert sum(losses[2:]) / 3 == pytest.approx(losses[0])
