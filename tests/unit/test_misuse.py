"""A user's mistakes from Python: each one line, with what was found and what is right."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch import Tensor, nn

import firecaffe
from firecaffe import DataConfig, Recipe, RunConfig, SolverConfig, TensorDataset, TrainConfig
from firecaffe.errors import DataError, FirecaffeError, OwnCodeError, RecipeError
from firecaffe.models.config import ModelConfig
from tests.kit.models_refused import refused

IMAGES = torch.arange(20 * 16, dtype=torch.float32).view(20, 1, 4, 4) / 320
LABELS = torch.arange(20) % 3


class Own:
    """A data set of one's own; each word of it may be made wrong."""

    def __init__(self, **words: Any) -> None:
        self.sample_CHW: Any = words.get("sample_CHW", (1, 4, 4))
        self.num_classes: Any = words.get("num_classes", 3)
        self._length: Any = words.get("length", 20)
        self._images = words.get("images", IMAGES)
        self._labels = words.get("labels", LABELS)
        self._batch: Callable[[Tensor], Any] | None = words.get("batch")

    def __len__(self) -> int:
        length: int = self._length
        return length

    def batch(self, indices: Tensor) -> Any:
        assert len(indices) > 0, "asked for nothing"
        if self._batch is not None:
            return self._batch(indices)
        return self._images[indices], self._labels[indices]


class TorchSet(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return IMAGES[index], LABELS[index]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Listed(torch.utils.data.Dataset[Any]):
    """Items in a list; None raises."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if self.items[index] is None:
            raise ValueError("nothing there")
        return self.items[index]


class NoClasses:
    sample_CHW = (1, 4, 4)

    def __len__(self) -> int:
        return 20

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return IMAGES[indices], LABELS[indices]


def len_of(items: list[Any]) -> Any:
    return len(items) + "s"  # type: ignore[operator]


class Net(nn.Module):
    """`head` makes something of the logits; `outputs` how many there are."""

    def __init__(self, outputs: int = 3, head: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(16, outputs)
        self.head = head

    def forward(self, images: Tensor) -> Any:
        return self.head(self.linear(images.flatten(1)))


class Needy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


def no_length() -> Any:
    own = Own()
    own._length = "20"
    return own


def call(folder: Path, **words: Any) -> firecaffe.Result:
    recipe = Recipe(
        train=TrainConfig(8, 4, steps=3), run=RunConfig(str(folder / "run"), tensorboard=False)
    )
    given: dict[str, Any] = {"recipe": recipe, "model": Net, "train_set": Own(), "test_set": Own()}
    return firecaffe.train(**given | words)


def wrong_label(indices: Tensor) -> tuple[Tensor, Tensor]:
    """That of sample 13, which no look at the first ones finds."""
    return IMAGES[indices], torch.where(indices == 13, 3, LABELS[indices])


TRAIN_SETS: dict[str, tuple[Any, list[str]]] = {
    "a DataLoader": (torch.utils.data.DataLoader(TorchSet()), ["torch DataLoader"]),
    "a stream": (Stream(), ["IterableDataset (Stream)"]),
    "a class for a data set": (Own, ["the class Own", "batch(indices)"]),
    "a function for a data set": (lambda: Own(), ["the function", "not what it returns"]),
    "three tensors": ((IMAGES, LABELS, LABELS), ["train_set is a tuple", "batch"]),
    "an image's shape without classes": (NoClasses(), ["no num_classes"]),
    "items that differ in shape": (
        Listed([(IMAGES[0], 0), (IMAGES[1], 1), (IMAGES[2, :, 1:], 0)] * 3),
        ["train_set[", "[1, 3, 4]", "[1, 4, 4]"],
    ),
    "items of what is no tensor": (Listed([(object(), 0)] * 8), ["train_set[0] is (object, int)"]),
    "items that are no pairs": (Listed([{"x": IMAGES[0]}] * 8), ["train_set's items give a dict"]),
    "an empty set": (Own(length=0), ["train_set holds no sample"]),
    "a set with a strange length": (no_length(), ["length"]),
    "a shape that is none": (Own(sample_CHW=(4, 4)), ["train_set.sample_CHW is (4, 4)"]),
    "classes that are none": (Own(num_classes=3.0), ["train_set.num_classes is 3.0"]),
    "images of another shape": (Own(sample_CHW=(1, 5, 4)), ["train_set.batch() gave images"]),
    "images without channels": (Own(images=IMAGES[:, 0]), ["train_set.batch()", "(1, 4, 4)"]),
    "images of another type": (Own(images=IMAGES.double()), ["train_set.batch()", "torch.float64"]),
    "labels of another type": (Own(labels=LABELS.int()), ["torch.int32"]),
    "labels that are one hot": (Own(labels=torch.nn.functional.one_hot(LABELS)), ["(1, 3)"]),
    "masks beside sample_CHW": (
        Own(labels=torch.zeros(len(LABELS), 4, 4, dtype=torch.int64)),
        ["(1, 4, 4)", "task.name", "segmentation"],
    ),
    "labels out of range": (Own(num_classes=2, labels=LABELS + 5), ["the label 5"]),
    "one label out of range": (Own(batch=wrong_label), ["train_set.batch() gave the label 3"]),
    "images alone": (Own(batch=lambda indices: IMAGES[indices]), ["gave a Tensor"]),
    "arrays": (
        Own(batch=lambda i: (np.zeros((len(i), 1, 4, 4)), np.zeros(len(i)))),
        ["gave a ndarray"],
    ),
}
MISUSES: dict[str, tuple[dict[str, Any], type[FirecaffeError], list[str]]] = {
    **{
        name: ({"train_set": made}, DataError, ["train_set", *parts])
        for name, (made, parts) in TRAIN_SETS.items()
    },
    "a pair of tensors that are not alike": (
        {"train_set": (IMAGES, LABELS[:3])},
        DataError,
        ["20 inputs and 3 targets"],
    ),
    "fewer samples than asked for": (
        {"train_set": Own(batch=lambda indices: (IMAGES[indices[:1]], LABELS[indices[:1]]))},
        DataError,
        ["samples were asked for, 1 images"],
    ),
    "an item that fails": (
        {"train_set": Listed([(IMAGES[0], 0)] * 7 + [None])},
        OwnCodeError,
        ["train_set[7]", "nothing there"],
    ),
    "a collate that fails": (
        {"train_set": firecaffe.from_torch(Listed([(IMAGES[0], 0)] * 8), collate=len_of)},
        OwnCodeError,
        ["collate of train_set raised TypeError"],
    ),
    "other samples in the test": (
        {"train_set": (IMAGES.double(), LABELS), "test_set": (IMAGES.double(), LABELS.double())},
        DataError,
        ["float64 1x4x4 with targets int64"],
    ),
    "images in training alone": (
        {"test_set": (IMAGES.double(), LABELS)},
        DataError,
        ["the test set does not"],
    ),
    "an image word of other data": (
        {
            "train_set": (IMAGES.double(), LABELS),
            "test_set": (IMAGES.double(), LABELS),
            "recipe": Recipe(data=DataConfig(crop=3)),
        },
        RecipeError,
        ["data.crop is 3"],
    ),
    "one data set alone": ({"test_set": None}, DataError, ["train_set and test_set come together"]),
    "more classes in the test": ({"test_set": Own(num_classes=4)}, DataError, ["have 4 classes"]),
    "a network that is made": ({"model": Net()}, RecipeError, ["made already (Net)", "model=Net"]),
    "a network that is made with words": (
        {"model": nn.Sequential(nn.Flatten(), nn.Linear(64, 2))},
        RecipeError,
        ["(Sequential)", "model=lambda: Sequential("],
    ),
    "a network's name": ({"model": "lenet"}, RecipeError, ["model is 'lenet'", "ModelConfig"]),
    "a class that needs words": ({"model": Needy}, RecipeError, ["Needy", "'width'"]),
    "a function that makes no network": ({"model": lambda: 3}, RecipeError, ["model() returned 3"]),
    "no parameters": ({"model": nn.Flatten}, RecipeError, ["Flatten", "no parameter to train"]),
    "frozen parameters alone": ({"model": frozen}, RecipeError, ["no parameter to train"]),
    "a dict of outputs": (
        {"model": lambda: Net(head=lambda logits: {"scores": logits})},
        RecipeError,
        ["the network gives {'scores'"],
    ),
    "too few outputs": ({"model": lambda: Net(outputs=2)}, RecipeError, ["(1, 2)"]),
    "images that a network does not take": (
        {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3))},
        RecipeError,
        ["does not take 1x1x4x4"],
    ),
    "a loss of each sample": (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        RecipeError,
        ["reduction='none'"],
    ),
    "a loss that is a number": ({"loss": lambda outputs, labels: 1.5}, RecipeError, ["gave 1.5"]),
    "a loss without a gradient": (
        {"loss": lambda outputs, labels: (outputs.argmax(1) != labels).float().mean()},
        RecipeError,
        ["no gradient"],
    ),
    "a loss for other labels": ({"loss": nn.BCEWithLogitsLoss()}, RecipeError, ["int64"]),
    "the class of a loss": ({"loss": nn.CrossEntropyLoss}, RecipeError, ["CrossEntropyLoss()"]),
    "a recipe's file": ({"recipe": "recipe.toml"}, RecipeError, ["No such file"]),
    "a recipe in a dict": (
        {"recipe": {"train": {"steps": 3}}},
        RecipeError,
        ["recipe is {'train'"],
    ),
    "words of another kind": (
        {"recipe": Recipe(solver=SolverConfig(base_lr="0.1"))},  # type: ignore[arg-type]
        RecipeError,
        ["solver.base_lr is '0.1'"],
    ),
    "an augmentation that is none": (
        {"recipe": Recipe(data=DataConfig(augment="mixup"))},
        RecipeError,
        ["'mixup'"],
    ),
    "a checkpoint's step": ({"resume": 100}, RecipeError, ["resume is 100", "path"]),
    "a hook without its state": (
        {"comm_hook": lambda state, bucket: None},
        RecipeError,
        ["(state, hook)"],
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_one_line(tmp_path: Path, misuse: str) -> None:
    words, kind, parts = MISUSES[misuse]
    with refused(kind, parts):
        call(tmp_path, **words)


def test_what_is_right_trains_to_the_bits_of_a_set_of_ours(tmp_path: Path) -> None:
    """20 samples in steps of 8: the epoch's last step has an empty micro-batch."""
    own = call(tmp_path / "own", model=lambda: Net(outputs=4))
    ours = TensorDataset(IMAGES, LABELS, 3)
    same = call(tmp_path / "ours", model=lambda: Net(4), train_set=ours, test_set=ours)
    assert own.weights_sha256 == same.weights_sha256
    assert own.identity_doubts == []


def test_a_network_of_ours_with_own_data(tmp_path: Path) -> None:
    images = torch.zeros(20, 1, 28, 28)
    recipe = Recipe(
        model=ModelConfig("lenet"),
        train=TrainConfig(8, 4, steps=1),
        run=RunConfig(str(tmp_path / "run"), tensorboard=False),
    )
    own = Own(sample_CHW=(1, 28, 28), images=images)
    call(tmp_path, recipe=recipe, model=None, train_set=own, test_set=own)
