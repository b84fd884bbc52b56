"""BatchNorm, against its formula, and its sums over the micro-batches of a step."""

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.batch_norm import BatchNorm
from firecaffe.gradients.buffers import BufferChanges
from tests.unit.caffe.layers.alone import layer_of, random

SHAPE = (4, 3, 5, 6)


def made(words: str = "", shape: tuple[int, ...] = SHAPE) -> BatchNorm:
    layer = layer_of("BatchNorm", f"batch_norm_param {{ {words} }}", shape)
    assert isinstance(layer, BatchNorm)
    return layer


def along(value: Tensor) -> Tensor:
    return value[:, None, None]


def test_in_training_it_uses_the_batch() -> None:
    layer, x = made("eps: 0.01").train(), random(*SHAPE) * 2 + 1
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
    expected = (x - along(mean)) / (along(variance) + 0.01).sqrt()
    torch.testing.assert_close(layer(x), expected)
    count = 4 * 5 * 6
    torch.testing.assert_close(layer.mean, mean)
    torch.testing.assert_close(layer.variance, variance * count / (count - 1))
    assert layer.factor == 1


def test_sums_are_kept_by_the_fraction() -> None:
    layer = made("moving_average_fraction: 0.9").train()
    first, second = random(*SHAPE), random(*SHAPE) + 3
    layer(first)
    layer(second)
    expected = 0.9 * first.mean((0, 2, 3)) + second.mean((0, 2, 3))
    torch.testing.assert_close(layer.mean, expected)
    torch.testing.assert_close(layer.factor, torch.tensor([1.9]))


def test_else_it_uses_the_sums_over_the_factor() -> None:
    layer, x = made().eval(), random(*SHAPE)
    with torch.no_grad():
        layer.mean.copy_(torch.tensor([2.0, 4.0, 6.0]))
        layer.variance.copy_(torch.tensor([8.0, 2.0, 1.0]))
        layer.factor.fill_(2)
    mean, variance = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 1.0, 0.5])
    expected = (x - along(mean)) / (along(variance) + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), expected)
    assert layer.factor == 2


def test_without_any_sums_it_divides_by_the_root_of_eps() -> None:
    layer, x = made("eps: 0.25").eval(), random(*SHAPE)
    torch.testing.assert_close(layer(x), x * 2)


def test_use_global_stats_says_it_for_both_modes() -> None:
    x = random(*SHAPE)
    fixed, own = made("use_global_stats: true"), made("use_global_stats: false")
    torch.testing.assert_close(fixed.train()(x), fixed.eval()(x))
    torch.testing.assert_close(own.eval()(x), own.train()(x))
    assert fixed.factor == 0


def test_other_numbers_of_axes() -> None:
    x = random(6, 5)
    torch.testing.assert_close(made(shape=(6, 5)).train()(x).mean(0), torch.zeros(5))
    assert made(shape=(6,)).train()(x[:, 0]).shape == (6,)
    alone = made(shape=(1, 5)).train()
    assert not alone(x[:1]).any()
    torch.testing.assert_close(alone.mean, x[0])


def test_a_step_adds_the_mean_of_its_micro_batches() -> None:
    """So that it does not matter who has computed which."""
    x = random(8, 3, 5, 6)
    parts = torch.split(x, 2)
    layer = made().train()
    before = nn.Sequential(layer)
    layer(random(*SHAPE))
    start = layer.mean.clone()
    changes = BufferChanges(before)
    changes.begin_step()
    totals = changes.no_changes()
    for number, part in enumerate(parts):
        changes.begin_micro_batch()
        before(part)
        totals = [a + b for a, b in zip(totals, changes.take(number, 2.0), strict=True)]
    changes.finish_step(totals, 8.0)
    torch.testing.assert_close(layer.mean, 0.999 * start + x.mean((0, 2, 3)))
    torch.testing.assert_close(layer.factor, torch.tensor([1.999]))
