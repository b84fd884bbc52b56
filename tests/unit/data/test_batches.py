"""Training batches by step and leaf; evaluation on any number of ranks."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.data import (
    Batches,
    DataConfig,
    SampleOrder,
    TensorDataset,
    eval_batches,
    output_shape,
)
from firecaffe.data.augment import normalize, random_crop_mirror
from firecaffe.errors import RecipeError


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


@pytest.mark.parametrize("config", [DataConfig(), DataConfig(crop=4, mirror=True, mean=[1.0])])
def test_an_empty_leaf_has_the_right_shape(config: DataConfig) -> None:
    dataset = numbered(5)
    order = SampleOrder(seed=0, num_samples=5, global_batch_size=4, micro_batch_size=2)
    images, labels = Batches(dataset, order, config).train_batch(1, 1)
    assert images.shape == (0, *output_shape(dataset, config))
    assert images.dtype == torch.float32
    assert labels.shape == (0,)
    assert labels.dtype == torch.int64


def test_training_leaves_the_data_set_as_it_was() -> None:
    dataset = numbered(5)
    kept = dataset.inputs.clone()
    order = SampleOrder(seed=0, num_samples=5, global_batch_size=5, micro_batch_size=5)
    Batches(dataset, order, DataConfig(mean=[3.0], std=[2.0])).train_batch(0, 0)
    assert torch.equal(dataset.inputs, kept)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (DataConfig(), (1, 6, 6)),
        (DataConfig(pad=2), (1, 6, 6)),
        (DataConfig(crop=4), (1, 4, 4)),
        (DataConfig(crop=8, pad=1), (1, 8, 8)),
    ],
)
def test_output_shape(config: DataConfig, shape: tuple[int, int, int]) -> None:
    dataset = numbered(2)
    assert output_shape(dataset, config) == shape
    (_, images, _), *_ = eval_batches(dataset, 2, 0, 1, config=config)
    assert images.shape[1:] == shape


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DataConfig(crop=7), "data.crop is 7"),
        (DataConfig(crop=-1), "data.crop is -1"),
        (DataConfig(pad=-1), "data.pad -1"),
        (DataConfig(mean=[0.1, 0.2]), "data.mean has 2 values"),
        (DataConfig(std=[0.1, 0.2, 0.3]), "data.std has 3 values"),
        (DataConfig(std=[0.0]), "data.std is"),
    ],
)
def test_settings_that_do_not_fit_the_images(config: DataConfig, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        output_shape(numbered(2), config)
