"""A user's mistakes from Python: each one line, with what was found and what is right."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.utils.data
from torch import Tensor, nn

import firecaffe
from firecaffe import TensorDataset
from firecaffe.errors import DataError, FirecaffeError, OwnCodeError, RecipeError
from tests.kit.models_refused import refused
from tests.kit.training import recipe_in, recipe_with

IMAGES = torch.arange(20 * 16, dtype=torch.float32).view(20, 1, 4, 4) / 320
LABELS = torch.arange(20) % 3


class Own:
    """A data set of one's own; each word of it may be made wrong."""

    def __init__(self, images: Tensor = IMAGES, labels: Tensor = LABELS, **words: Any) -> None:
        self.sample_CHW: Any = words.get("sample_CHW", (1, 4, 4))
        if words.get("num_classes", 3):
            self.num_classes: Any = words.get("num_classes", 3)
        self._length: Any = words.get("length", 20)
        self._images, self._labels, self._batch = images, labels, words.get("batch")

    def __len__(self) -> int:
        length: int = self._length
        return length

    def batch(self, indices: Tensor) -> Any:
        assert len(indices) > 0, "asked for nothing"
        if self._batch is not None:
            return self._batch(indices)
        return self._images[indices], self._labels[indices]


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


def call(folder: Path, **words: Any) -> firecaffe.Result:
    recipe = recipe_in(
        folder / "run", "train.global_batch_size=8 train.micro_batch_size=4 train.steps=3"
    )
    given: dict[str, Any] = {"recipe": recipe, "model": Net, "train_set": Own(), "test_set": Own()}
    return firecaffe.train(**given | words)


def wrong_label(indices: Tensor) -> tuple[Tensor, Tensor]:
    """That of sample 13, which no look at the first ones finds."""
    return IMAGES[indices], torch.where(indices == 13, 3, LABELS[indices])


Misuses = dict[str, tuple[Any, list[str]]]

MASKS = torch.zeros(20, 4, 4, dtype=torch.int64)
ONE_HOT = torch.nn.functional.one_hot(LABELS)
DOUBLE = (IMAGES.double(), LABELS)
ODD = Listed([(IMAGES[0], 0), (IMAGES[1], 1), (IMAGES[2, :, 1:], 0)] * 3)

TRAIN_SETS: Misuses = {
    "a DataLoader": (torch.utils.data.DataLoader(Listed([0])), ["torch DataLoader"]),
    "a stream": (Stream(), ["IterableDataset (Stream)"]),
    "a class for a data set": (Own, ["the class Own", "batch(indices)"]),
    "a function for a data set": (lambda: Own(), ["the function", "not what it returns"]),
    "three tensors": ((IMAGES, LABELS, LABELS), ["train_set is a tuple", "batch"]),
    "a pair that is not alike": ((IMAGES, LABELS[:3]), ["20 inputs and 3 targets"]),
    "an image's shape without classes": (Own(num_classes=None), ["no num_classes"]),
    "items that differ in shape": (ODD, ["train_set[", "[1, 3, 4]", "[1, 4, 4]"]),
    "items of what is no tensor": (Listed([(object(), 0)] * 8), ["train_set[0] is (object, int)"]),
    "items that are no pairs": (Listed([{"x": IMAGES[0]}] * 8), ["train_set's items give a dict"]),
    "an empty set": (Own(length=0), ["train_set holds no sample"]),
    "fewer samples than its length": (Own(length=999), ["end before sample 998", "IndexError"]),
    "inputs that know their graph": (
        Own(batch=lambda i: (IMAGES[i] * torch.ones(1, requires_grad=True), LABELS[i])),
        ["images with the graph", "detached"],
    ),
    "a set with a strange length": (Own(length="20"), ["length"]),
    "a shape that is none": (Own(sample_CHW=(4, 4)), ["train_set.sample_CHW is (4, 4)"]),
    "classes that are none": (Own(num_classes=3.0), ["train_set.num_classes is 3.0"]),
    "images of another shape": (Own(sample_CHW=(1, 5, 4)), ["train_set.batch() gave images"]),
    "images without channels": (Own(IMAGES[:, 0]), ["train_set.batch()", "(1, 4, 4)"]),
    "images of another type": (Own(IMAGES.double()), ["train_set.batch()", "torch.float64"]),
    "labels of another type": (Own(labels=LABELS.int()), ["torch.int32"]),
    "labels that are one hot": (Own(labels=ONE_HOT), ["(1, 3)"]),
    "masks beside sample_CHW": (Own(labels=MASKS), ["(1, 4, 4)", "task.name", "segmentation"]),
    "labels out of range": (Own(num_classes=2, labels=LABELS + 5), ["the label 5"]),
    "one label out of range": (Own(batch=wrong_label), ["train_set.batch() gave the label 3"]),
    "images alone": (Own(batch=lambda indices: IMAGES[indices]), ["gave a Tensor"]),
    "arrays": (Own(batch=lambda i: (IMAGES.numpy()[i], i.numpy())), ["gave a ndarray"]),
    "fewer samples than asked for": (
        Own(batch=lambda i: (IMAGES[i[:1]], LABELS[i[:1]])),
        ["samples were asked for, 1 images"],
    ),
}
SETS: Misuses = {
    "other samples in the test": (
        {"train_set": DOUBLE, "test_set": (IMAGES.double(), LABELS.double())},
        ["float64 1x4x4 with targets int64"],
    ),
    "images in training alone": ({"test_set": DOUBLE}, ["the test set does not"]),
    "one data set alone": ({"test_set": None}, ["train_set and test_set come together"]),
    "weights of fewer samples": (
        {
            "train_set": TensorDataset(IMAGES, LABELS, sample_weights=[1.0]),
            "recipe": recipe_with("data.hold_out=0.2"),
        },
        ["sample_weights", "(1,)", "20 samples"],
    ),
    "more classes in the test": ({"test_set": Own(num_classes=4)}, ["have 4 classes"]),
}
TWO = Listed([((IMAGES[0], IMAGES[0]), 0)] * 8)
OWN_CODE: Misuses = {
    "a network of two arguments": ({"train_set": TWO, "test_set": TWO}, ["as one list"]),
    "an item that fails": (
        {"train_set": Listed([(IMAGES[0], 0)] * 7 + [None])},
        ["train_set[7]", "nothing there"],
    ),
    "a network that fails": ({"model": lambda: len_of([])}, ["model() raised TypeError"]),
    "a collate that fails": (
        {"train_set": firecaffe.from_torch(Listed([(IMAGES[0], 0)] * 8), collate=len_of)},
        ["collate of train_set raised TypeError"],
    ),
}
MODELS: Misuses = {
    "made already": (Net(), ["made already (Net)", "model=Net"]),
    "made with words": (
        nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
        ["(Sequential)", "model=lambda: Sequential("],
    ),
    "a name": ("lenet", ["model is 'lenet'", "ModelConfig"]),
    "a class that needs words": (Needy, ["Needy", "'width'"]),
    "a function that makes none": (lambda: 3, ["model() returned 3"]),
    "no parameters": (nn.Flatten, ["Flatten", "no parameter to train"]),
    "frozen parameters alone": (lambda: Net().requires_grad_(False), ["no parameter to train"]),
    "a dict of outputs": (
        lambda: Net(head=lambda logits: {"scores": logits}),
        ["the network gives {'scores'"],
    ),
    "without values": (lambda: Net().to("meta"), ["meta", "self.base = [base]"]),
    "too few outputs": (lambda: Net(outputs=2), ["(1, 2)"]),
    "images that it does not take": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 3)),
        ["does not take 1x1x4x4"],
    ),
}
PAIRS = (IMAGES.flatten(1), LABELS)
LOSSES: Misuses = {
    "of each sample": (nn.CrossEntropyLoss(reduction="none"), ["reduction='none'"]),
    "a number": (lambda outputs, labels: 1.5, ["gave 1.5"]),
    "without a gradient": (lambda out, labels: out.argmax(1).float().mean(), ["no gradient"]),
    "for other labels": (nn.BCEWithLogitsLoss(), ["int64"]),
    "a class": (nn.CrossEntropyLoss, ["CrossEntropyLoss()"]),
}
RECIPES: Misuses = {
    "a file": ("recipe.toml", ["No such file"]),
    "a dict": ({"train": {"steps": 3}}, ["recipe is {'train'"]),
    "a word's kind": (recipe_with({"solver.base_lr": "0.1"}), ["solver.base_lr is '0.1'"]),
    "no augmentation": (recipe_with("data.augment=mixup"), ["'mixup'"]),
}
OTHERS: Misuses = {
    "a label that torch leaves out": (
        {"train_set": (PAIRS[0], torch.where(LABELS == 1, -100, LABELS)), "test_set": PAIRS},
        ["has the class -100", "0 to 2"],
    ),
    "two kinds of validation": (
        {"validation_set": Own(), "recipe": recipe_with("data.hold_out=0.2")},
        ["validation_set", "data.hold_out = 0.2"],
    ),
    "labels in rows": (
        {"train_set": (PAIRS[0], LABELS[:, None]), "test_set": (PAIRS[0], LABELS[:, None])},
        ["one class for each sample", "(1, 1)"],
    ),
    "one-hot rows": (
        {"train_set": (PAIRS[0], ONE_HOT.float()), "test_set": (PAIRS[0], ONE_HOT.float())},
        ["one class for each sample", "argmax(1)"],
    ),
    "a metric called as an entry": (
        {"task": firecaffe.Task(nn.CrossEntropyLoss(), {"data_wait": len_of})},
        ["'data_wait'", "result.json"],
    ),
    "a task's loss with parameters": (
        {"task": firecaffe.Task(nn.AdaptiveLogSoftmaxWithLoss(3, 3, [1], 1.0))},
        ["task.loss", "has parameters"],
    ),
    "a metric called as a validation": (
        {"task": firecaffe.Task(nn.CrossEntropyLoss(), {"validation_error": len_of})},
        ["'validation_error'"],
    ),
    "an image word of other data": (
        {"train_set": DOUBLE, "test_set": DOUBLE, "recipe": recipe_with("data.crop=3")},
        ["data.crop is 3"],
    ),
    "a checkpoint's step": ({"resume": 100}, ["resume is 100", "path"]),
    "a hook without its state": ({"comm_hook": lambda state, bucket: None}, ["(state, hook)"]),
}


def of_word(word: str, misuses: Misuses) -> Misuses:
    """The same, of one word of `train`."""
    return {f"{word}: {name}": ({word: value}, parts) for name, (value, parts) in misuses.items()}


KINDS: dict[type[FirecaffeError], Misuses] = {
    DataError: of_word("train_set", TRAIN_SETS) | SETS,
    OwnCodeError: OWN_CODE,
    RecipeError: of_word("model", MODELS)
    | of_word("loss", LOSSES)
    | of_word("recipe", RECIPES)
    | OTHERS,
}
MISUSES = {name: (kind, *rows[name]) for kind, rows in KINDS.items() for name in rows}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misuse_is_one_line(tmp_path: Path, misuse: str) -> None:
    kind, words, parts = MISUSES[misuse]
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
    words = "model.name=lenet train.global_batch_size=8 train.micro_batch_size=4 train.steps=1"
    own = Own(torch.zeros(20, 1, 28, 28), sample_CHW=(1, 28, 28))
    call(
        tmp_path, recipe=recipe_in(tmp_path / "run", words), model=None, train_set=own, test_set=own
    )


def test_two_threads_do_not_train_at_once(tmp_path: Path) -> None:
    """They would draw from the same generators. One thread may train within a training."""
    done = call(tmp_path / "done")
    failures: list[str] = []

    def second() -> None:
        with pytest.raises(RecipeError) as failure:
            call(tmp_path / "second")
        failures.append(str(failure.value))

    def net() -> Net:
        thread = Thread(target=second)
        thread.start()
        thread.join()
        call(tmp_path / "nested")
        return Net()

    call(tmp_path / "first", model=net)
    assert ["another thread" in failure for failure in failures] == [True]
    assert not (tmp_path / "second").exists()
    assert call(tmp_path / "after").weights_sha256 == done.weights_sha256


def test_a_loss_alone_is_measured_alone_if_targets_are_no_classes(tmp_path: Path) -> None:
    floats = IMAGES, (LABELS[:, None] > 0).float()
    given = {"model": lambda: Net(1), "train_set": floats, "test_set": floats}
    result = call(tmp_path / "floats", **given, loss=nn.BCEWithLogitsLoss())
    assert result.metrics == {}
    assert result.test_loss > 0
    classes = call(tmp_path / "classes", loss=nn.CrossEntropyLoss())
    assert "top1" in classes.metrics
