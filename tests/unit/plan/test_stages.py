"""Layers in stages: the cut against every cut, the turns by hand, memory of what follows."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from firecaffe.plan.held import memory_of
from firecaffe.plan.layouts import Layout
from firecaffe.plan.split_plans import WAYS, split_plans
from firecaffe.plan.stage_times import balanced, best_stages
from tests.unit.plan.test_search_split import cost_of, dense


def test_the_cut_against_every_cut() -> None:
    draws = np.random.default_rng(2)
    for stages in (1, 2, 3, 6):
        computes_s, passes_s = draws.random(6), draws.random((stages, 6)) / 2

        def slowest(cuts: tuple[int, ...], own=computes_s, handed=passes_s) -> float:  # type: ignore[no-untyped-def]
            parts = enumerate(pairwise(cuts))
            return float(max(own[a:b].sum() + handed[k, a] for k, (a, b) in parts))

        every = [(0, *inner, 6) for inner in combinations(range(1, 6), stages - 1)]
        assert slowest(balanced(computes_s, passes_s)) == pytest.approx(min(map(slowest, every)))


def test_turns_by_hand() -> None:
    """Four equal layers in two stages, 8 micro-batches of 2: 9 turns, of which one is idle."""
    cost = cost_of([dense(name, 64, 64) for name in "abcd"], 2, batch=16, micro=2)
    found = best_stages(cost, 2)
    assert found.cuts == (0, 2, 4)
    assert found.idle == pytest.approx(1 / 9)
    layer_s = cost.unit_s(cost.chain[1], Layout(1, copies=2)) / 8
    assert found.step.compute_s == pytest.approx(9 * 2 * layer_s)
    # Two samples of 64 numbers there, and their gradients back.
    assert found.step.activations_s == pytest.approx(9 * 2 * (4 * 2 * 64) / 1e9)
    assert found.step.activations_bytes == 4 * 16 * 64
    assert found.step.gradients_bytes == found.step.exposed_communication_s == 0


def test_stages_of_several_rows() -> None:
    cost = cost_of([dense(name, 64, 64) for name in "abcd"], 4, batch=16, micro=2)
    found = best_stages(cost, 2)
    assert found.idle == pytest.approx(1 / 5)
    assert found.step.gradients_bytes == 4 * 2 * 64 * 64  # 2 (2 - 1) / 2 of two layers
    assert found.step.exposed_communication_s > 0
    whole = memory_of(cost.work, cost.chain, [Layout(4)] * 5)
    assert found.memory["parameters"] == whole["parameters"] / 2
    # The first stage keeps two micro-batches of two layers of four.
    assert found.memory["activations"] == 2 * 2 * (2 * 4 * 64)


def test_more_stages_than_layers() -> None:
    cost = cost_of([dense("a", 8, 8)], 2, batch=4)
    with pytest.raises(ValueError, match="2 stages of 1 layers"):
        best_stages(cost, 2)
    plans = split_plans(cost.work, cost.cluster, cost.chain, 2, "ring", [*WAYS])
    assert [each.name for each in plans] == ["data", "same_samples", "one_weird_trick", "layers"]
    fastest = min(plans, key=lambda each: each.step.step_s)
    assert fastest.step.step_s == plans[-1].step.step_s
