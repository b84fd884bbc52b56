"""The in-memory data set, and the generated one."""

import pytest
import torch

from firecaffe.data import TensorDataset
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
        (IMAGES[0], LABELS, None, r"images are torch.uint8 of shape \(1, 2, 2\)"),
        (IMAGES.double(), LABELS, None, "images are torch.float64"),
        (IMAGES, LABELS.float(), None, "labels are torch.float32"),
        (IMAGES, LABELS.view(3, 1), None, r"labels are torch.int64 of shape \(3, 1\)"),
        (IMAGES, LABELS[:2], None, "3 images and 2 labels"),
        (IMAGES[:0], LABELS[:0], None, "expected at least one"),
        (IMAGES, LABELS, 2, "label 2 of sample 2 is out of range, expected 0 to 1"),
        (IMAGES, LABELS - 1, None, "label -1 of sample 0"),
    ],
)
def test_what_is_not_a_data_set(
    images: torch.Tensor, labels: torch.Tensor, num_classes: int | None, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        TensorDataset(images, labels, num_classes)


def test_generated_is_a_function_of_its_seed() -> None:
    train, test = generate(seed=3, num_train=40, num_test=20)
    again, _ = generate(seed=3, num_train=60, num_test=1)
    other, _ = generate(seed=4, num_train=40, num_test=20)
    assert (train.sample_CHW, train.num_classes) == ((1, 28, 28), 10)
    assert (len(train), len(test)) == (40, 20)
    assert torch.equal(again.images_NCHW, torch.cat([train.images_NCHW, test.images_NCHW]))
    assert not torch.equal(train.images_NCHW, other.images_NCHW)


def test_generated_classes_can_be_told_apart_but_not_at_a_glance() -> None:
    """The nearest class mean of the training set: far above chance, well below all right."""
    train, test = generate(num_train=3000, num_test=1000)
    pixels = train.images_NCHW.flatten(1).float()
    means = torch.stack([pixels[train.labels_N == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test.images_NCHW.flatten(1).float(), means).argmin(1)
    accuracy = float((nearest == test.labels_N).float().mean())
    assert 0.5 < accuracy < 0.99
    assert len({bytes(image) for image in train.images_NCHW[:1000].flatten(1).tolist()}) == 1000
