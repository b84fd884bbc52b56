"""Data sets by name, ours and of a user's function: each opens, each wrong request is one line."""

import gzip
import re
import struct
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import firecaffe
from firecaffe import Recipe, RunConfig, TrainConfig
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.data import (
    DataConfig,
    check_data,
    data_home,
    is_images,
    open_data,
    shard_counts,
    sources,
)
from firecaffe.data.dataset import is_repeatable
from firecaffe.data.datasets import DATASETS
from firecaffe.data.generated import generate
from firecaffe.data.pack_images import Packing, PackOptions
from firecaffe.data.pack_sources import open_source
from firecaffe.data.published_formats import TEST_FILES, TRAIN_FILES, open_cifar10
from firecaffe.errors import DataError, OwnCodeError, RecipeError
from firecaffe.measure.step_times import by_layer_type
from firecaffe.models import ModelConfig
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.training.checks import preflight
from tests.kit.models_pages import page
from tests.kit.models_refused import refused
from tests.kit.training import recipe_with, record_of


def write_idx_files(folder: Path, test_side: int = 4) -> None:
    folder.mkdir(parents=True)
    for part, side in (("train", 4), ("t10k", test_side)):
        pixels = bytes(2 * side * side)
        images = struct.pack(">4I", 0x803, 2, side, side) + pixels
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = struct.pack(">2I", 0x801, 2) + bytes([0, 9])
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def write_cifar10(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in TRAIN_FILES + TEST_FILES:
        (folder / name).write_bytes(bytes(2 * 3073))


def write_images(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / part / "cat").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / part / "cat" / "1.jpg")


def write_packed(folder: Path) -> None:
    write_images(folder.parent / "unpacked")
    Packing(open_source(folder.parent / "unpacked"), folder, PackOptions(), threads=1).run()


EXPECTED = {
    "fashion-mnist": (2, 2, 10, (1, 4, 4)),
    "mnist": (2, 2, 10, (1, 4, 4)),
    "cifar10": (10, 2, 10, (3, 32, 32)),
    "folder": (1, 1, 1, (3, 16, 16)),
    "packed": (1, 1, 1, (3, 16, 16)),
    "generated": (10_000, 2_000, 10, (1, 28, 28)),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIRECAFFE_DATA", str(tmp_path / "home"))
    # The published files have 10,000 records; two are enough to be opened by name.
    monkeypatch.setattr(sources, "open_cifar10", lambda path: open_cifar10(path, 2))
    monkeypatch.setattr(sources, "generate", generate)  # all of it
    write_idx_files(tmp_path / "home" / "fashion-mnist")
    write_idx_files(tmp_path / "home" / "mnist")
    write_cifar10(tmp_path / "home" / "cifar10")
    write_images(tmp_path / "home" / "folder")
    write_packed(tmp_path / "home" / "packed")
    return tmp_path / "home"


@pytest.mark.parametrize("name", DATASETS)
def test_every_row_opens_from_the_data_home(home: Path, name: str) -> None:
    config = DataConfig(name=name, resize=16)
    check_data(config)
    data = open_data(config)
    num_train, num_test, num_classes, shape = EXPECTED[name]
    assert (len(data.train), len(data.test)) == (num_train, num_test)
    assert is_images(data.train)
    assert is_images(data.test)
    assert (data.train.num_classes, data.test.num_classes) == (num_classes, num_classes)
    assert data.train.sample_CHW == data.test.sample_CHW == shape
    assert data.description.startswith(f"{name}: {num_train} training and {num_test} test images")


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "generated"])
def test_a_missing_data_set_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FIRECAFFE_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"^{tmp_path / name}: does not exist, expected {name}; "):
        check_data(DataConfig(name=name))


def test_a_broken_first_image_is_found_by_the_check(home: Path) -> None:
    path = home / "folder" / "test" / "cat" / "1.jpg"
    path.write_text("not a jpeg")
    with pytest.raises(DataError, match=f"^{path}: not a whole image"):
        check_data(DataConfig(name="folder"))


def test_training_and_test_images_of_different_shape(tmp_path: Path) -> None:
    write_idx_files(tmp_path / "set", test_side=5)
    with pytest.raises(DataError, match="training images are 1 x 4 x 4, test images 1 x 5 x 5"):
        open_data(DataConfig(name="mnist", path=str(tmp_path / "set")))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"name": "cifar-10"}, "data.name is 'cifar-10', .*did you mean cifar10"),
        ({"name": "zzz"}, "expected one of fashion-mnist, mnist, cifar10, folder, packed, gen"),
        ({"crop": 29}, "data.crop is 29"),
        ({"name": "folder", "resize": 0}, "data.resize is 0"),
        ({"augment": "all"}, "data.augment is 'all', expected one of caf"),
        ({"order": "up"}, "data.order is 'up', expected one of samples"),
        ({"on_error": "x"}, "data.on_error is 'x', expected one of stop"),
        ({"decode_threads": -1}, "data.decode_threads is -1"),
    ],
)
def test_wrong_requests(words: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        check_data(DataConfig(**{"name": "generated", **words}))


def test_data_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("FIRECAFFE_DATA", raising=False)
    assert data_home() == Path("/home/someone/.cache/firecaffe")
    monkeypatch.setenv("FIRECAFFE_DATA", "~/data")
    assert data_home() == Path("/home/someone/data")


SETS = """
    import torch
    from torch.utils.data import Dataset

    class Set(Dataset):
        classes = ["cat", "dog"]

        def __init__(self, count):
            self.targets = [number % 2 for number in range(count)]

        def __len__(self):
            return len(self.targets)

        def __getitem__(self, number):
            return torch.rand(1, 28, 28) + self.targets[number], self.targets[number]

    def as_dict(train=20):
        return {"train": Set(train), "test": Set(6), "validation": Set(4)}

    def as_pair():
        return Set(20), Set(6)

    def as_three():
        return Set(20), Set(4), Set(6)

    def as_tensors():
        images = torch.zeros(20, 1, 28, 28)
        return (images, torch.arange(20) % 3), (images[:6], torch.arange(6) % 3)

    def one():
        return Set(20)

    def named():
        return {"train": Set(20), "tests": Set(6)}

    def empty():
        return Set(0), Set(6)

    def broken():
        raise OSError("no disk")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a file of functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_sets.py").write_text(textwrap.dedent(SETS))
    yield tmp_path
    sys.modules.pop("own_sets", None)


@pytest.mark.parametrize(
    ("name", "args", "lengths"),
    [
        ("own_sets:as_dict", {"train": 30}, (30, 6, 4)),
        ("own_sets.py:as_pair", {}, (20, 6, None)),
        ("own_sets.py:as_three", {}, (20, 6, 4)),
        ("own_sets:as_tensors", {}, (20, 6, None)),
    ],
)
def test_whatever_form_the_parts_come_in(
    folder: Path, name: str, args: dict[str, Any], lengths: tuple[int | None, ...]
) -> None:
    data = open_data(DataConfig(name, args=args))
    parts = (data.train, data.test, data.validation)
    assert tuple(part and len(part) for part in parts) == lengths
    assert is_images(data.train) == name.endswith("tensors")
    assert data.class_names == (() if is_images(data.train) else ("cat", "dog"))
    held = open_data(DataConfig(name, args=args, hold_out=0.1))
    assert held.validation is not None
    assert len(held.train) + len(held.validation) == lengths[0]


@pytest.mark.parametrize(
    ("function", "words", "kind", "parts"),
    [
        ("one", {}, DataError, ["returned <own_sets.Set", "(train, test)"]),
        ("named", {}, DataError, ["a dict with train, tests", "train, test"]),
        ("empty", {}, DataError, ["own_sets:empty train holds no sample"]),
        ("broken", {}, OwnCodeError, ["data.name 'own_sets:broken'", "no disk"]),
        ("other", {}, RecipeError, ["data.name", "no 'other'", "as_dict"]),
        ("as_dict", {"args": {"size": 3}}, RecipeError, ["size=3", "train=20"]),
        ("as_pair", {"crop": 3}, RecipeError, ["data.crop is 3", "float32 1x28x28"]),
        ("as_pair", {"mean": [0.5]}, RecipeError, ["data.mean is [0.5]"]),
        ("as_pair", {"order": "shards"}, RecipeError, ["data.order is shards"]),
    ],
)
def test_what_is_wrong_is_one_line(
    folder: Path, function: str, words: dict[str, Any], kind: type[Exception], parts: list[str]
) -> None:
    config = DataConfig(f"own_sets:{function}", **words)
    with refused(kind, parts):
        shard_counts(open_data(config).train, config)


def test_a_run_s_own_recipe_is_looked_over_and_trained_again_to_the_same_bits(folder: Path) -> None:
    recipe = Recipe(
        ModelConfig("lenet"),
        DataConfig("own_sets.py:as_dict", args={"train": 24}, balance="classes"),
        TrainConfig(8, 4, steps=2, device="cpu"),
        run=RunConfig("a", tensorboard=False),
    )
    preflight(check_recipe(recipe), 2)
    firecaffe.train(recipe)
    again = recipe_of(folder / "a" / "recipe.toml")
    assert again == recipe.replace("data.name", f"{folder / 'own_sets.py'}:as_dict")
    again = again.replace("run.folder", "b")
    preflight(again, 2)
    firecaffe.train(again)
    first, second = (record_of(folder / run) for run in "ab")
    assert first["state_sha256"] == second["state_sha256"]
    assert first["class_names"] == ["cat", "dog"]
    assert first["identity_doubts"] == []
    assert "24 training, 4 validation and 6 test samples" in first["data"]


def test_the_page_s_data_set_is_one(folder: Path) -> None:
    """The snippet of docs/reference/data.md, as it stands."""
    shapes = r"```python\n# shapes.py\n(.*?)```"
    [snippet] = re.findall(shapes, page("docs/reference/data.md"), re.DOTALL)
    (folder / "shapes.py").write_text(snippet)
    data = open_data(DataConfig("shapes.py:load", args={"count": 30}))
    assert (len(data.train), str(data.layout)) == (30, "float32 1x16x16 with targets float32 2")
    assert is_repeatable(data.train)
    sys.modules.pop("shapes")


def test_a_plan_is_made_of_trees_too(folder: Path) -> None:
    """A table of five words of 4 numbers, and a layer of 4 x 3: no channels and no images."""
    (folder / "own_sets.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def load():\n"
        "    words = {'ids': torch.arange(20).view(10, 2), 'scale': torch.ones(10, 1)}\n"
        "    return (words, torch.arange(10) % 3), (words, torch.arange(10) % 3)\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed, self.last = nn.Embedding(20, 4), nn.Linear(4, 3)\n"
        "    def forward(self, words):\n"
        "        return self.last(self.embed(words['ids']).mean(1) * words['scale'])\n"
    )
    own = "model.name=own_sets:Net data.name=own_sets:load train.device=cpu train.steps=1"
    recipe = recipe_with(f"{own} train.global_batch_size=4 train.micro_batch_size=2")
    preflight(check_recipe(recipe), 2)
    work = workload_of(check_recipe(recipe))
    assert work.parameter_bytes == 4 * (20 * 4 + 4 * 3 + 3)
    assert sum(layer.flops for layer in work.layers) == 2 * 4 * 3
    assert (work.samples, work.layout.num_bytes) == (10, 8 * 2 + 4 + 8)
    seconds = by_layer_type(check_recipe(recipe), torch.device("cpu"), 2).time_s
    assert set(seconds) >= {"fully connected"}
