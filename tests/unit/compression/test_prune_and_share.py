"""Masks against few-line versions of their rules; k-means in one dimension against scipy's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.vq import kmeans2
from torch import Tensor

from firecaffe.compression.prune_and_share import (
    STARTS,
    above,
    adaptive,
    count_of,
    hysteresis_mask,
    kept_share,
    largest,
    largest_of_all,
    lloyd,
    share,
    threshold_of,
    with_hysteresis,
)


def by_sorting(scores: list[float], count: int) -> list[bool]:
    """The largest, the first of equal ones, and no zeros."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[:count]
    return [place in order and scores[place] > 0 for place in range(len(scores))]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 40))
def test_the_largest(scores: list[int], count: int) -> None:
    found = largest(torch.tensor(scores).float(), count)
    assert found.tolist() == by_sorting([*map(float, scores)], count)


def test_the_largest_of_all_layers_together() -> None:
    scores = {"a": torch.rand(3, 4), "b": torch.rand(5), "c": torch.rand(2, 1, 2)}
    found = largest_of_all(scores, 8)
    together, kept = (torch.cat([part.flatten() for part in of.values()]) for of in (scores, found))
    assert kept.tolist() == by_sorting(together.tolist(), 8)
    assert [mask.shape for mask in found.values()] == [each.shape for each in scores.values()]


def test_adaptive_scores_are_those_of_the_paper() -> None:
    """Lee et al. 2021, equation 4, of weights in any order; the largest of every layer has 1, so
    the one that has the least weights keeps some beside a layer of a hundred times its scale.
    """
    weights = torch.randn(6, 7)
    squares = [float(each) ** 2 for each in weights.flatten()]
    expected = [each / sum(other for other in squares if other >= each) for each in squares]
    assert adaptive(weights.abs()).flatten().tolist() == pytest.approx(expected)
    assert adaptive(torch.zeros(3)).tolist() == [0, 0, 0]
    scores = {"a": adaptive(torch.rand(400) + 100), "b": adaptive(torch.rand(5))}
    assert largest_of_all(scores, 20)["b"].any()


def test_a_share_is_of_all_weights_and_at_least_one() -> None:
    assert [count_of(share, 30) for share in (1.0, 0.5, 0.01)] == [30, 15, 1]


def test_the_schedule_is_zhu_and_gupta_s() -> None:
    """Equation 1, of sparsity, from 0."""
    final, steps = 0.9, 50
    for done in range(steps + 5):
        sparsity = final + (0 - final) * (1 - min(done, steps) / steps) ** 3
        assert kept_share(1 - final, done, steps) == pytest.approx(1 - sparsity)
    assert kept_share(0.3, steps, steps) == 0.3


def test_a_threshold_is_in_deviations_of_weights_that_are_not_zero() -> None:
    weights = torch.randn(50)
    weights[10:20] = 0
    left = np.array([each for each in weights.tolist() if each], dtype=np.float64)
    threshold = threshold_of(weights, 1.5)
    assert threshold == pytest.approx(1.5 * float(np.std(left)))
    assert above(weights, threshold).tolist() == [abs(x) > threshold for x in weights.tolist()]


def test_weights_near_a_threshold_stay_as_they_are() -> None:
    """Guo et al. 2016, equation 3."""
    weights, mask = torch.linspace(-2, 2, 80), torch.rand(80) > 0.5
    pairs = zip(weights.tolist(), mask.tolist(), strict=True)
    expected = [abs(w) > 1.1 or (abs(w) > 0.9 and kept) for w, kept in pairs]
    assert hysteresis_mask(weights, 1.0, mask).tolist() == expected


def test_a_weight_comes_back_if_it_is_larger_by_a_margin() -> None:
    for other, kept in ((1.2, [True, False]), (1.3, [False, True])):
        scores = with_hysteresis(torch.tensor([1.0, other]), torch.tensor([True, False]))
        assert largest(scores, 1).tolist() == kept


def weights(count: int = 400) -> Tensor:
    """Pruned: none around zero, and some zeros."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(count, generator=generator)
    found[found.abs() < 0.5] = 0
    return found.view(-1, 4)


def shared(bits: int, start: str, of: Tensor) -> tuple[Tensor, Tensor]:
    return share(of, bits, start, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("start", STARTS)
def test_it_is_scipy_s_from_the_same_start(start: str) -> None:
    ordered = weights()[weights() != 0].double().sort().values
    first = STARTS[start](ordered, 8, torch.Generator().manual_seed(1))
    assert torch.equal(first, first.sort().values)
    found = lloyd(ordered, first)
    theirs, _ = kmeans2(ordered.numpy(), first.numpy(), iter=500, minit="matrix")
    np.testing.assert_allclose(found.numpy(), theirs, rtol=1e-12)


# Many weights of the second are the same, and some as far from one value as from another.
FEW_NUMBERS = torch.tensor([-4.0, -2, -2, 0, 1, 1, 2, 2, 3, 3, 3, 7]).repeat(5)


@pytest.mark.parametrize("made", [weights(), FEW_NUMBERS], ids=["drawn", "few numbers"])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("bits", [1, 2])
def test_codes_are_of_the_nearest_values_which_are_means(
    made: Tensor, start: str, bits: int
) -> None:
    codes, values = shared(bits, start, made)
    assert codes.shape == made.shape
    assert torch.equal(codes == 0, made == 0)
    assert values[0] == 0
    assert 1 < len(values) <= 2**bits + 1
    for code, value in enumerate(values[1:].tolist(), 1):
        members = made[codes == code].double()
        assert members.mean().item() == pytest.approx(value)
        gaps = (members[:, None] - values[None, 1:]).abs()
        assert (gaps.argmin(1) == code - 1).all()


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
