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


MISUSES: dict[str, tuple[dict[str, Any], type[FirecaffeError], list[str]]] = {
    "a DataLoader": (
        {"train_set": torch.utils.data.DataLoader(TorchSet())},
        DataError,
        ["train_set", "torch DataLoader", "from_torch(loader.dataset, collate="],
    ),
    "a stream": ({"train_set": Stream()}, DataError, ["train_set", "IterableDataset (Stream)"]),
    "a pair of tensors that are not alike": (
        {"train_set": (IMAGES, LABELS[:3])},
        DataError,
        ["20 inputs and 3 targets"],
    ),
    "a class for a data set": (
        {"train_set": Own},
        DataError,
        ["train_set", "the class Own", "batch(indices)"],
    ),
    "a function for a data set": (
        {"train_set": lambda: Own()},
        DataError,
        ["train_set", "the function", "not what it returns"],
    ),
    "three tensors": (
        {"train_set": (IMAGES, LABELS, LABELS)},
        DataError,
        ["train_set is a tuple", "batch", "TensorDataset(inputs, targets)"],
    ),
    "an image's shape without classes": (
        {"train_set": NoClasses()},
        DataError,
        ["train_set has sample_CHW and no num_classes"],
    ),
    "items that differ in shape": (
        {"train_set": Listed([(IMAGES[0], 0), (IMAGES[1], 1), (IMAGES[2, :, 1:], 0)] * 3)},
        DataError,
        ["train_set[", "[1, 3, 4]", "[1, 4, 4]", "collate"],
    ),
    "items of what is no tensor": (
        {"train_set": Listed([(object(), 0)] * 8)},
        DataError,
        ["train_set[0] is (object, int)", "(inputs, targets)"],
    ),
    "items that are no pairs": (
        {"train_set": Listed([{"x": IMAGES[0]}] * 8)},
        DataError,
        ["train_set's items give a dict", "(inputs, targets)", "collate="],
    ),
    "an item that fails": (
        {"train_set": Listed([(IMAGES[0], 0)] * 7 + [None])},
        OwnCodeError,
        ["train_set[7] raised ValueError: nothing there"],
    ),
    "a collate that fails": (
        {"train_set": firecaffe.from_torch(Listed([(IMAGES[0], 0)] * 8), collate=len_of)},
        OwnCodeError,
        ["collate of train_set raised TypeError"],
    ),
    "other samples in the test": (
        {"train_set": (IMAGES.double(), LABELS), "test_set": (IMAGES.double(), LABELS.double())},
        DataError,
        ["float64 1x4x4 with targets int64", "test samples", "with targets float64"],
    ),
    "images in training alone": (
        {"test_set": (IMAGES.double(), LABELS)},
        DataError,
        ["sample_CHW", "the training set says", "the test set does not"],
    ),
    "an image word of other data": (
        {
            "train_set": (IMAGES.double(), LABELS),
            "test_set": (IMAGES.double(), LABELS),
            "recipe": Recipe(data=DataConfig(crop=3)),
        },
        RecipeError,
        ["data.crop is 3", "float64 1x4x4", "sample_CHW"],
    ),
    "one data set alone": (
        {"test_set": None},
        DataError,
        ["train_set and test_set come together"],
    ),
    "an empty set": ({"train_set": Own(length=0)}, DataError, ["train_set holds no sample"]),
    "a set with a strange length": ({"train_set": no_length()}, DataError, ["train_set", "length"]),
    "a shape that is none": (
        {"train_set": Own(sample_CHW=(4, 4))},
        DataError,
        ["train_set.sample_CHW is (4, 4)", "(channels, rows, columns)"],
    ),
    "classes that are none": (
        {"train_set": Own(num_classes=3.0)},
        DataError,
        ["train_set.num_classes is 3.0", "a whole number"],
    ),
    "images of another shape": (
        {"train_set": Own(sample_CHW=(1, 5, 4))},
        DataError,
        ["train_set.batch() gave images", "(1, 1, 4, 4)", "(1, 1, 5, 4)"],
    ),
    "images without channels": (
        {"train_set": Own(images=IMAGES[:, 0])},
        DataError,
        ["train_set.batch()", "(1, 4, 4)", "(1, 1, 4, 4)"],
    ),
    "images of another type": (
        {"train_set": Own(images=IMAGES.double())},
        DataError,
        ["train_set.batch()", "torch.float64", "uint8 or float32"],
    ),
    "labels of another type": (
        {"train_set": Own(labels=LABELS.int())},
        DataError,
        ["train_set.batch() gave labels of torch.int32", "int64 of (1,)"],
    ),
    "labels that are one hot": (
        {"train_set": Own(labels=torch.nn.functional.one_hot(LABELS))},
        DataError,
        ["train_set.batch() gave targets", "(1, 3)", "int64 of (1,)", "task.name"],
    ),
    "masks beside sample_CHW": (
        {"train_set": Own(labels=torch.zeros(len(LABELS), 4, 4, dtype=torch.int64))},
        DataError,
        ["targets of torch.int64, (1, 4, 4)", "task.name", "segmentation", "without sample_CHW"],
    ),
    "labels out of range": (
        {"train_set": Own(num_classes=2, labels=LABELS + 5)},
        DataError,
        ["train_set.batch() gave the label 5", "0 to 1"],
    ),
    "one label out of range": (
        {"train_set": Own(batch=wrong_label)},
        DataError,
        ["train_set.batch() gave the label 3", "0 to 2"],
    ),
    "images alone": (
        {"train_set": Own(batch=lambda indices: IMAGES[indices])},
        DataError,
        ["train_set.batch() gave a Tensor", "the pair (inputs, targets)"],
    ),
    "arrays": (
        {"train_set": Own(batch=lambda i: (np.zeros((len(i), 1, 4, 4)), np.zeros(len(i))))},
        DataError,
        ["train_set.batch() gave a ndarray", "tensors"],
    ),
    "fewer samples than asked for": (
        {"train_set": Own(batch=lambda indices: (IMAGES[indices[:1]], LABELS[indices[:1]]))},
        DataError,
        ["samples were asked for, 1 images"],
    ),
    "more classes in the test": (
        {"test_set": Own(num_classes=4)},
        DataError,
        ["test samples have 4 classes", "training samples 3"],
    ),
    "a network that is made": (
        {"model": Net()},
        RecipeError,
        ["model is a network that is made already (Net)", "lambda: Net("],
    ),
    "a network's name": ({"model": "lenet"}, RecipeError, ["model is 'lenet'", "ModelConfig"]),
    "a class that needs words": (
        {"model": Needy},
        RecipeError,
        ["Needy", "'width'", "lambda: Needy("],
    ),
    "a function that makes no network": (
        {"model": lambda: 3},
        RecipeError,
        ["model() returned 3", "torch.nn.Module"],
    ),
    "no parameters": ({"model": nn.Flatten}, RecipeError, ["Flatten", "no parameter to train"]),
    "frozen parameters alone": ({"model": frozen}, RecipeError, ["no parameter to train"]),
    "a dict of outputs": (
        {"model": lambda: Net(head=lambda logits: {"scores": logits})},
        RecipeError,
        ["the network gives {'scores'", "logits"],
    ),
    "too few outputs": (
        {"model": lambda: Net(outputs=2)},
        RecipeError,
        ["gives outputs of (1, 2)", "(samples, 3)"],
    ),
    "images that a network does not take": (
        {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3))},
        RecipeError,
        ["does not take 1x1x4x4"],
    ),
    "a loss of each sample": (
        {"loss": nn.CrossEntropyLoss(reduction="none")},
        RecipeError,
        ["CrossEntropyLoss(reduction='none')", 'reduction="mean"'],
    ),
    "a loss that is a number": (
        {"loss": lambda outputs, labels: 1.5},
        RecipeError,
        ["loss gave 1.5", "one number"],
    ),
    "a loss without a gradient": (
        {"loss": lambda outputs, labels: (outputs.argmax(1) != labels).float().mean()},
        RecipeError,
        ["loss", "knows no gradient"],
    ),
    "a loss for other labels": (
        {"loss": nn.BCEWithLogitsLoss()},
        RecipeError,
        ["loss does not take", "int64"],
    ),
    "the class of a loss": (
        {"loss": nn.CrossEntropyLoss},
        RecipeError,
        ["loss is", "CrossEntropyLoss()"],
    ),
    "a recipe's file": (
        {"recipe": "recipe.toml"},
        RecipeError,
        ["recipe recipe.toml: No such file"],
    ),
    "a recipe in a dict": (
        {"recipe": {"train": {"steps": 3}}},
        RecipeError,
        ["recipe is {'train'", "firecaffe.Recipe(", "the path of a recipe's file"],
    ),
    "words of another kind": (
        {"recipe": Recipe(solver=SolverConfig(base_lr="0.1"))},  # type: ignore[arg-type]
        RecipeError,
        ["solver.base_lr is '0.1'", "a finite number"],
    ),
    "an augmentation that is none": (
        {"recipe": Recipe(data=DataConfig(augment="mixup"))},
        RecipeError,
        ["data.augment is 'mixup'", "caffe"],
    ),
    "a checkpoint's step": ({"resume": 100}, RecipeError, ["resume is 100", "path"]),
    "a hook without its state": (
        {"comm_hook": lambda state, bucket: None},
        RecipeError,
        ["comm_hook", "(state, hook)"],
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_one_line(tmp_path: Path, misuse: str) -> None:
    words, kind, parts = MISUSES[misuse]
    with pytest.raises(kind) as caught:
        call(tmp_path, **words)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert all(part in said for part in parts), said


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
