"""A set's samples in batches of steps and leaves; in evaluations on any ranks; held out."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from firecaffe.data import (
    Batches,
    DataConfig,
    SampleOrder,
    TensorDataset,
    eval_batches,
    is_images,
    num_classes,
    open_data,
)
from firecaffe.data.augment import normalize, random_crop_mirror
from firecaffe.data.batches import output_shape
from firecaffe.data.datasets import hold_out, num_held_out, some_of
from firecaffe.data.decode import DecodedSet
from firecaffe.data.generated import generate
from firecaffe.data.packed import RawPart
from firecaffe.errors import DataError, RecipeError
from firecaffe.models import ModelConfig
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe
from tests.kit.data_photos import make_folder, pack

IMAGES = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
LABELS = torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("images", "labels", "num_classes", "words"),
    [
        (IMAGES, LABELS[:2], None, "3 inputs and 2 targets"),
        (IMAGES, LABELS[0], None, r"targets has shape \(\)"),
        ({"a": IMAGES, "b": IMAGES[:2]}, LABELS, None, r"3 .* and 2 inputs\['b'\]"),
        ({"a": IMAGES, "b": [3]}, LABELS, None, r"inputs\['b'\]\[0\] is a int"),
        (IMAGES.numpy(), LABELS, None, "inputs is a ndarray.*torch.from_numpy"),
        (IMAGES, {"a": LABELS.numpy()}, None, "targets.*torch.from_numpy"),
        (IMAGES[:0], LABELS[:0], None, "expected at least one"),
        (IMAGES, LABELS, 2, "label 2 of sample 2 is out of range, expected 0 to 1"),
        (IMAGES, LABELS - 1, None, "label -1 of sample 0"),
        (IMAGES, LABELS, 3.0, "num_classes is 3.0"),
        (IMAGES.float().requires_grad_(), LABELS, None, "inputs requires a gradient.*detach"),
        ([IMAGES.to_sparse()], LABELS, None, r"inputs\[0\] is torch.sparse_coo"),
        (IMAGES, LABELS.to("meta"), None, "targets is .* on meta"),
        (IMAGES.double(), LABELS, LABELS.max() + 1, "num_classes is tensor"),
        (IMAGES.double(), LABELS, 0, "num_classes is 0"),
    ],
)
def test_what_is_not_a_data_set(
    images: Any, labels: torch.Tensor, num_classes: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        TensorDataset(images, labels, num_classes)


def test_what_is_no_image_of_a_class_is_other_data() -> None:
    assert is_images(TensorDataset(IMAGES, LABELS, class_names=None))
    for targets in (LABELS.float(), LABELS.view(3, 1)):
        assert not is_images(TensorDataset(IMAGES, targets))
    assert not is_images(TensorDataset(IMAGES.double(), LABELS))


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
    train, test = generate(num_train=1500, num_test=400)
    pixels = train.inputs.flatten(1).float()
    means = torch.stack([pixels[train.targets == label].mean(0) for label in range(10)])
    nearest = torch.cdist(test.inputs.flatten(1).float(), means).argmin(1)
    accuracy = float((nearest == test.targets).float().mean())
    assert 0.5 < accuracy < 0.99
    assert len({bytes(image) for image in train.inputs[:1000].flatten(1).tolist()}) == 1000


def numbered(num_samples: int, side: int = 6) -> TensorDataset:
    """Each image is filled with its own number, so a batch tells which samples it holds."""
    numbers = torch.arange(num_samples, dtype=torch.float32).view(-1, 1, 1, 1)
    return TensorDataset(numbers.expand(-1, 1, side, side).clone(), torch.arange(num_samples))


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5))
def test_evaluation_counts_each_sample_once(
    num_samples: int, batch_size: int, world_size: int
) -> None:
    dataset = numbered(num_samples)
    counted: Counter[int] = Counter()
    by_number = {}
    for rank in range(world_size):
        for number, images, labels in eval_batches(
            dataset, batch_size, rank, world_size, config=DataConfig()
        ):
            assert number % world_size == rank
            assert torch.equal(images[:, 0, 0, 0], labels.to(torch.float32))
            counted.update(labels.tolist())
            by_number[number] = labels.tolist()
    assert counted == Counter(range(num_samples))
    alone = eval_batches(dataset, batch_size, 0, 1, config=DataConfig())
    assert by_number == {number: labels.tolist() for number, _, labels in alone}
    assert all(by_number.values())


def test_a_training_batch_is_the_augmented_and_normalized_leaf() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (23, 3, 8, 8), dtype=torch.uint8, generator=generator)
    dataset = TensorDataset(images, torch.arange(23) % 5)
    order = SampleOrder(seed=4, num_samples=23, global_batch_size=6, micro_batch_size=2)
    config = DataConfig(crop=7, pad=1, mirror=True, mean=[0.5], std=[0.1, 0.2, 0.3])
    batches = Batches(dataset, order, config)
    for step in range(2 * order.steps_per_epoch):
        for leaf in range(order.num_micro_batches):
            samples = order.micro_batch(step, leaf)
            got, labels = batches.train_batch(step, leaf)
            expected = random_crop_mirror(
                images[samples], samples, seed=4, epoch=step // 4, crop=7, pad=1, mirror=True
            )
            assert torch.equal(got, normalize(expected, config.mean, config.std))
            assert torch.equal(labels, samples % 5)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (DataConfig(), (1, 6, 6)),
        (DataConfig(pad=2), (1, 6, 6)),
        (DataConfig(crop=4, mirror=True, mean=[1.0]), (1, 4, 4)),
        (DataConfig(crop=8, pad=1), (1, 8, 8)),
    ],
)
def test_evaluations_and_empty_leaves_have_the_shape_of_a_batch(
    config: DataConfig, shape: tuple[int, int, int]
) -> None:
    dataset = numbered(5)
    assert output_shape(dataset.sample_CHW, config) == shape
    (_, images, _), *_ = eval_batches(dataset, 2, 0, 1, config=config)
    assert images.shape[1:] == shape
    images, labels = Batches(dataset, SampleOrder(0, 5, 4, 2), config).train_batch(1, 1)
    assert (images.shape, images.dtype) == ((0, *shape), torch.float32)
    assert (labels.shape, labels.dtype) == ((0,), torch.int64)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DataConfig(crop=7), "data.crop is 7"),
        (DataConfig(crop=-1), "data.crop is -1"),
        (DataConfig(pad=-1), "data.pad -1"),
        (DataConfig(mean=[0.1, 0.2]), "data.mean has 2 values"),
        (DataConfig(std=[0.1, 0.2, 0.3]), "data.std has 3 values"),
    ],
)
def test_settings_that_do_not_fit_the_images(config: DataConfig, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        output_shape(numbered(2).sample_CHW, config)


class Own:
    """No class of ours; each image is its own number."""

    sample_CHW, num_classes = (1, 1, 1), 20
    subset = "train"  # an attribute of the user's own, as of torchaudio's sets

    def __len__(self) -> int:
        return 20

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        return indices_B.view(-1, 1, 1, 1).float(), indices_B


@pytest.mark.parametrize(
    ("whole", "share"),
    [(numbered(1000, 1), 0.1), (numbered(17, 1), 0.5), (numbered(1000, 1), 0.001), (Own(), 0.2)],
)
def test_every_image_is_on_one_side(whole: Any, share: float) -> None:
    parts = hold_out(whole, share)
    assert len(parts[1]) == num_held_out(len(whole), share) == round(len(whole) * share)
    numbers: list[int] = []
    for part in parts:
        images, labels = part.batch(torch.arange(len(part)))
        assert is_images(part)
        assert torch.equal(labels, images.flatten().long())
        assert num_classes(part) == whole.num_classes
        assert torch.equal(labels, labels.sort().values)
        numbers += labels.tolist()
    assert sorted(numbers) == list(range(len(whole)))
    if len(parts[1]) == 100:  # which are no run of neighbors
        assert 300 < labels.float().mean() < 700


def test_of_photos_and_of_raw_samples_read_from_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firecaffe.data.sources.HELD_BYTES", 0)
    folder = make_folder(tmp_path / "photos")
    for kind, raw in ((DecodedSet, False), (RawPart, True)):
        dest = tmp_path / kind.__name__
        pack(folder, dest, resize=16, raw=raw)
        config = DataConfig("packed", str(dest), resize=16)
        whole = open_data(config).train
        assert isinstance(whole, kind)
        images, labels = whole.batch(torch.arange(30))
        data = open_data(DataConfig("packed", str(dest), resize=16, hold_out=0.2))
        assert "24 training, 6 held-out and " in data.description
        assert data.validation is not None
        seen: list[int] = []
        for part in (data.train, data.validation):
            for number in range(len(part)):
                image, label = part.batch(torch.tensor([number]))
                [place] = [n for n in range(30) if torch.equal(images[n], image[0])]
                assert label[0] == labels[place]
                seen.append(place)
        assert sorted(seen) == list(range(30))


def test_a_part_of_photos_is_cut_as_the_whole_set(tmp_path: Path) -> None:
    pack(make_folder(tmp_path / "photos"), tmp_path / "packed", resize=16)
    config = DataConfig("packed", str(tmp_path / "packed"), resize=16, augment="inception", crop=8)
    whole = open_data(config).train
    _, *expected = list(eval_batches(whole, 1, 0, 1, config=config))[7]
    ((_, *cut),) = eval_batches(some_of(whole, torch.tensor([7])), 1, 0, 1, config=config)
    assert all(map(torch.equal, cut, expected))


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (1.0, "data.hold_out is 1, expected 0 or more and less than 1"),
        (-0.1, "data.hold_out is -0.1"),
        (1e-9, "which is 0 of 10000 training samples"),
    ],
)
def test_what_cannot_be_held_out_is_refused(share: float, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        open_data(DataConfig(name="generated", hold_out=share))


def test_a_plan_counts_what_is_left() -> None:
    recipe = Recipe(model=ModelConfig("lenet"), data=DataConfig(hold_out=0.1))
    assert workload_of(check_recipe(recipe)).samples == 54_000
