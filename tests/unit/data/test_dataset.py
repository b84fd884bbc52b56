"""The in-memory data set, and the generated one."""

from typing import Any

import pytest
import torch

from firecaffe.data import TensorDataset, is_images
from firecaffe.data.generated import generate
from firecaffe.errors import DataError


def test_a_batch_is_the_samples_asked_for() -> None:
    images = torch.randint(0, 256, (7, 2, 3, 4), dtype=torch.uint8)
    dataset = TensorDataset(images, torch.arange(7, dtype=torch.uint8))
    assert (len(dataset), dataset.num_classes, dataset.sample_CHW) == (7, 7, (2, 3, 4))
    got, labels = dataset.batch(torch.tensor([6, 0, 6]))
    assert torch.equal(got, torch.stack([images[6], images[0], images[6]]))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [6, 0, 6]


IMAGES = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("images", "labels", "num_classes", "words"),
    [
        (IMAGES, LABELS[:2], None, "3 inputs and 2 targets"),
        (IMAGES, LABELS[0], None, r"targets has shape \(\)"),
        ({"a": IMAGES, "b": IMAGES[:2]}, LABELS, None, r"3 .* and 2 inputs\['b'\]"),
        ({"a": IMAGES, "b": [3]}, LABELS, None, r"inputs\['b'\]\[0\] is a int"),
        (IMAGES[:0], LABELS[:0], None, "expected at least one"),
        (IMAGES, LABELS, 2, "label 2 of sample 2 is out of range, expected 0 to 1"),
        (IMAGES, LABELS - 1, None, "label -1 of sample 0"),
    ],
)
def test_what_is_not_a_data_set(
    images: Any, labels: torch.Tensor, num_classes: int | None, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        TensorDataset(images, labels, num_classes)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [(IMAGES.double(), LABELS), (IMAGES, LABELS.float()), (IMAGES, LABELS.view(3, 1))],
)
def test_what_is_no_image_of_a_class_is_other_data(inputs: Any, targets: Any) -> None:
    assert is_images(TensorDataset(IMAGES, LABELS))
    assert not is_images(TensorDataset(inputs, targets))


def test_generated_is_a_function_of_its_seed() -> None:
    train, test = generate(seed=3, num_train=40, num_test=20)
    again, _ = generate(seed=3, num_train=60, num_test=1)
    other, _ = generate(seed=4, num_train=40, num_test=20)
    assert (train.sample_CHW, train.num_classes) == ((1, 28, 28), 10)
    assert (len(train), len(test)) == (40, 20)
    assert torch.equal(again.inputs, torch.cat([train.inputs, test.inputs]))
    assert not torch.equal(train.inputs, other.inputs)


def test_generated_classes_can_be_told_apart_but_not_at_a_glance() -> None:
    """The nearest class mean of the training set: far above chance, well below all right."""
    train, test = generate(num_train=3000, num_test=1000)
    pixels = train.inputs.flatten(1).float()
    means = torch.stack([pixels[train.targets == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test.inputs.flatten(1).float(), means).argmin(1)
    accuracy = float((nearest == test.targets).float().mean())
    assert 0.5 < accuracy < 0.99
    assert len({bytes(image) for image in train.inputs[:1000].flatten(1).tolist()}) == 1000
