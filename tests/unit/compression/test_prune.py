"""Masks against few-line versions of their rules."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from firecaffe.compression.prune_and_share import (
    above,
    above_with_hold,
    adaptive,
    count_of,
    kept_share,
    largest,
    largest_of_all,
    threshold_of,
    with_hold,
)


def by_sorting(scores: list[float], count: int) -> list[bool]:
    """The largest, the first of equal ones, and no zeros."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[:count]
    return [place in order and scores[place] > 0 for place in range(len(scores))]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 40))
def test_the_largest(scores: list[int], count: int) -> None:
    found = largest({"w": torch.tensor(scores).float()}, {"w": count})["w"]
    assert found.tolist() == by_sorting([*map(float, scores)], count)


def test_the_largest_of_all_layers_together() -> None:
    scores = {"a": torch.rand(3, 4), "b": torch.rand(5), "c": torch.rand(2, 1, 2)}
    found = largest_of_all(scores, 8)
    together = [float(each) for part in scores.values() for each in part.flatten()]
    told = [bool(each) for mask in found.values() for each in mask.flatten()]
    assert told == by_sorting(together, 8)
    assert [mask.shape for mask in found.values()] == [each.shape for each in scores.values()]


def test_adaptive_scores_are_those_of_the_paper() -> None:
    """Lee et al. 2021, equation 4, of weights in any order; the largest of every layer has 1, so
    the one that has the least weights keeps some beside a layer of a hundred times its scale.
    """
    weights = torch.randn(6, 7)
    squares = [float(each) ** 2 for each in weights.flatten()]
    told = [each / sum(other for other in squares if other >= each) for each in squares]
    assert adaptive(weights.abs()).flatten().tolist() == pytest.approx(told)
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


def _guo(weight: float, kept: bool, threshold: float) -> bool:
    """Guo et al. 2016, equation 3."""
    if abs(weight) <= 0.9 * threshold:
        return False
    return True if abs(weight) > 1.1 * threshold else kept


def test_weights_near_a_threshold_stay_as_they_are() -> None:
    weights, mask = torch.linspace(-2, 2, 80), torch.rand(80) > 0.5
    found = above_with_hold(weights, 1.0, mask)
    pairs = zip(weights.tolist(), mask.tolist(), strict=True)
    assert found.tolist() == [_guo(weight, kept, 1.0) for weight, kept in pairs]


def test_a_weight_comes_back_if_it_is_larger_by_a_margin() -> None:
    mask = torch.tensor([True, False])

    def chosen(scores: Tensor) -> list[bool]:
        return largest({"w": with_hold(scores, mask)}, {"w": 1})["w"].tolist()

    assert chosen(torch.tensor([1.0, 1.2])) == [True, False]
    assert chosen(torch.tensor([1.0, 1.3])) == [False, True]
