"""The whole training on one worker against a bare PyTorch loop: the same weights, bit for bit."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, optim

from firecaffe import DataConfig, ExchangeConfig
from firecaffe.data import SampleOrder, TensorDataset
from tests.parity.network import (
    DECAY,
    MICRO_BATCH,
    MOMENTUM,
    RATE,
    SEED,
    STEPS,
    Net,
    dense,
    gradients_of,
    ours,
    recipe_for,
    same_bits,
    state_tensors,
    tree_sum,
)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(SEED)
    return Net()


def data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(num_samples, 2, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(0, 5, (num_samples,), generator=generator), 5)


def moved(found: dict[str, Tensor], net: Net) -> None:
    for name, parameter in net.named_parameters():
        assert not torch.equal(found[f"parameter/{name}"], parameter), name


@pytest.mark.parametrize("num_samples", [60, 32])
def test_one_micro_batch(tmp_path: Path, net: Net, num_samples: int) -> None:
    """60 samples: no epoch ends within 6 steps of 8. 32: one does, with a whole step."""
    train_set = data(num_samples)
    found = ours(net, train_set, recipe_for(tmp_path, 8, 8))
    moved(found, net)

    order = SampleOrder(SEED, num_samples, 8, 8)
    optimizer = optim.SGD(net.parameters(), RATE, MOMENTUM, weight_decay=DECAY)
    for step in range(STEPS):
        samples = order.micro_batch(step, 0)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(train_set.inputs[samples]), train_set.targets[samples])
        torch.autograd.backward(loss)
        optimizer.step()
    same_bits(found, state_tensors(net, optimizer))


def left_to_right(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def bare_loop(
    net: Net,
    train_set: TensorDataset,
    batch: int,
    add: Callable[[Sequence[Tensor]], Tensor],
) -> dict[str, Tensor]:
    """Gradients of micro-batches, added by `add`, over the samples that the step has."""
    order = SampleOrder(SEED, len(train_set), batch, MICRO_BATCH)
    parameters = list(net.parameters())
    optimizer = optim.SGD(parameters, RATE, MOMENTUM, weight_decay=DECAY)
    for step in range(STEPS):
        leaves = range(batch // MICRO_BATCH)
        of_leaves = [gradients_of(net, train_set, order, step, leaf) for leaf in leaves]
        weight = order.samples_in_step(step) / MICRO_BATCH
        for parameter, gradients in zip(parameters, zip(*of_leaves, strict=True), strict=True):
            parameter.grad = add(dense(gradients, parameter)) / weight
        optimizer.step()
    return state_tensors(net, optimizer)


@pytest.mark.parametrize("num_micro_batches", [2, 3, 5, 7, 11])
@pytest.mark.parametrize("num_samples", [200, 37])
def test_several_micro_batches_in_tree_order(
    tmp_path: Path, net: Net, num_micro_batches: int, num_samples: int
) -> None:
    """37 samples: an epoch ends within the training, with short and empty micro-batches."""
    train_set = data(num_samples)
    batch = 3 * num_micro_batches
    recipe = recipe_for(tmp_path, batch)
    found = ours(net, train_set, recipe)
    moved(found, net)
    same_bits(found, bare_loop(net, train_set, batch, tree_sum))


def test_neither_buckets_nor_the_exchange_enter(tmp_path: Path, net: Net) -> None:
    train_set = data(50)
    expected = bare_loop(copy.deepcopy(net), train_set, 18, tree_sum)
    for index, (algorithm, bucket_bytes) in enumerate([("ring", 1), ("native", 300)]):
        exchange = ExchangeConfig(algorithm, bucket_bytes=bucket_bytes)
        recipe = recipe_for(tmp_path / str(index), 18, exchange=exchange)
        same_bits(ours(net, train_set, recipe), expected)


def test_another_order_gives_other_bits(tmp_path: Path, net: Net) -> None:
    """The control: were all orders equal here, the tests above would show nothing."""
    train_set = data(200)
    found = ours(net, train_set, recipe_for(tmp_path, 24))
    other = bare_loop(copy.deepcopy(net), train_set, 24, left_to_right)
    assert any(not torch.equal(value, other[name]) for name, value in found.items())
    for name, value in found.items():
        torch.testing.assert_close(value, other[name])


def test_images_reach_the_network_normalized(tmp_path: Path, net: Net) -> None:
    """Bytes, mean and deviation of the recipe against the same written out."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randint(0, 256, (40, 2, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.arange(40) % 5
    recipe = recipe_for(tmp_path, 9, data=DataConfig(mean=[0.25, 0.5], std=[0.125]))
    found = ours(net, TensorDataset(images, labels), recipe)
    mean = torch.tensor([0.25, 0.5]).view(1, 2, 1, 1)
    plain = TensorDataset((images.float() / 255 - mean) / 0.125, labels)
    same_bits(found, bare_loop(net, plain, 9, tree_sum))
