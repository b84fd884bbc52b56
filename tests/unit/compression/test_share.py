"""k-means in one dimension against scipy's, the best there is, and its own conditions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor

from firecaffe.compression.prune_and_share import STARTS, lloyd, share


def weights(count: int = 400) -> Tensor:
    """Pruned: none around zero, and some zeros."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(count, generator=generator)
    found[found.abs() < 0.5] = 0
    return found.view(-1, 4)


def shared(bits: int, start: str, of: Tensor) -> tuple[Tensor, Tensor]:
    return share(of, bits, start, torch.Generator().manual_seed(1))


def best_cost(ordered: list[float], count: int) -> float:
    """The least sum of squared distances to so many values, by dynamic programming."""
    x = np.array(ordered)
    sums, squares = np.r_[0, x.cumsum()], np.r_[0, (x * x).cumsum()]
    n = len(x)

    def cost(start: int, stop: int) -> float:
        total = sums[stop] - sums[start]
        return float(squares[stop] - squares[start] - total * total / (stop - start))

    best = [0.0] + [np.inf] * n
    for _ in range(count):
        best = [np.inf] + [
            min(best[start] + cost(start, stop) for start in range(stop))
            for stop in range(1, n + 1)
        ]
    return best[n]


@pytest.mark.parametrize("start", STARTS)
def test_it_is_scipy_s_from_the_same_start(start: str) -> None:
    ordered = weights()[weights() != 0].double().sort().values
    first = STARTS[start](ordered, 8, torch.Generator().manual_seed(1))
    assert torch.equal(first, first.sort().values)
    found = lloyd(ordered, first)
    theirs, _ = kmeans2(ordered.numpy(), first.numpy(), iter=500, minit="matrix")
    np.testing.assert_allclose(found.numpy(), theirs, rtol=1e-12)


def few_numbers() -> Tensor:
    """Many weights are alike, and some as far from one value as from another."""
    return torch.tensor([-4.0, -2, -2, 0, 1, 1, 2, 2, 3, 3, 3, 7]).repeat(5)


@pytest.mark.parametrize("made", [weights, few_numbers])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("bits", [1, 2])
def test_codes_are_of_the_nearest_values_which_are_means(
    made: Callable[[], Tensor], start: str, bits: int
) -> None:
    codes, values = shared(bits, start, made())
    assert codes.shape == made().shape
    assert torch.equal(codes == 0, made() == 0)
    assert values[0] == 0
    assert 1 < len(values) <= 2**bits + 1
    for code, value in enumerate(values[1:].tolist(), 1):
        members = made()[codes == code].double()
        assert members.mean().item() == pytest.approx(value)
        gaps = (members[:, None] - values[None, 1:]).abs()
        assert (gaps.argmin(1) == code - 1).all()
    left = made()[made() != 0].double()
    cost = (left - values[codes[codes != 0].long()]).square().sum().item()
    assert cost >= best_cost(left.sort().values.tolist(), 2**bits) * (1 - 1e-9)


def test_from_quantiles_it_is_close_to_the_best() -> None:
    left = weights()[weights() != 0].double()
    codes, values = shared(2, "density", weights())
    cost = (left - values[codes[codes != 0].long()]).square().sum().item()
    assert cost <= best_cost(left.sort().values.tolist(), 4) * 1.1


def test_starts() -> None:
    ordered = torch.tensor([-1.0, 0.1, 0.2, 0.3, 0.4, 3.0]).double()
    generator = torch.Generator().manual_seed(0)
    assert STARTS["linear"](ordered, 3, generator).tolist() == [-1.0, 1.0, 3.0]
    assert STARTS["density"](ordered, 3, generator).tolist() == pytest.approx([0.1, 0.3, 3.0])
    by_chance = [STARTS["random"](ordered, 3, generator).tolist() for _ in range(9)]
    assert all(set(each) <= set(ordered.tolist()) and len({*each}) == 3 for each in by_chance)
    assert len({*map(tuple, by_chance)}) > 1


def test_values_without_weights_are_left_out() -> None:
    """Between two groups that are far apart, linear values have none."""
    far = torch.cat([torch.linspace(1, 1.1, 50), torch.linspace(9, 9.1, 50)])
    codes, values = shared(4, "linear", far)
    assert len(values) < 17
    assert torch.unique(codes).tolist() == [*range(1, len(values))]


def test_weights_that_share_few_values_already_keep_them() -> None:
    few = torch.tensor([[0.5, 0.0, -0.25], [0.5, 0.125, -0.25]])
    codes, values = shared(2, "linear", few)
    assert values.tolist() == [0, -0.25, 0.125, 0.5]
    assert torch.equal(values[codes.long()].float(), few)
