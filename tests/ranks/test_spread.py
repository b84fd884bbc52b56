"""What ranks that each know a part of a step's sums find out: all of them what one rank would; and
norms of tensors in parts.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firecaffe.cluster.group import divide
from firecaffe.cluster.world import join
from firecaffe.parallel.cut import cut
from firecaffe.solvers.update_rules import Lamb
from firecaffe.training.outcome import VOTES
from firecaffe.training.updates.spread import (
    UNUSED,
    Among,
    Found,
    LossScale,
    TensorPart,
    UpdatingScaler,
    total,
)
from tests.kit.training import ALONE
from tests.world import Ranks

NETWORK = {"cut": torch.float32, "of_all": torch.float32, "of_one": torch.float64}
ROWS = 3
"""Rank r has row r of `cut`, all have `of_all`, and the last one has `of_one`."""


def gradients() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(6)
    return {
        "cut": torch.randn(ROWS, 5, generator=drawn),
        "of_all": torch.randn(7, generator=drawn),
        "of_one": torch.randn(4, generator=drawn).double(),
    }


def agreed(change: str, scaled: bool = False) -> tuple[Found, bool, Tensor]:
    """What this rank finds, whether its update was skipped, and the sum of what ranks count."""
    with join("cpu") as world:
        whole, last = gradients(), ROWS - 1
        own = {"cut": whole["cut"][world.rank], "of_all": whole["of_all"]}
        if world.rank == last:
            own["of_one"] = whole["of_one"]
        loss = 3.0 if world.rank == last else 0.0  # known there alone, as in stages
        if change == "inf in a part" and world.rank == 1:
            own["cut"][2] = math.inf
        if change == "nan in all":
            own["of_all"][0] = math.nan
        if change == "nan loss":
            loss = math.nan if world.rank == last else loss
        if change == "beyond float32":
            own = {name: each * 1e38 for name, each in own.items()}
        named = {name: nn.Parameter(torch.zeros_like(each)) for name, each in own.items()}
        scaler = UpdatingScaler("cpu", init_scale=1.0, enabled=scaled)
        optimizer = torch.optim.SGD(named.values(), 1.0)
        scale = LossScale(scaler, optimizer, world.device)
        for name, each in named.items():
            if change != "unused" or name == "cut":
                each.grad = own[name].clone()
        parts = {name: TensorPart(name) for name in named} | {
            "cut": TensorPart("cut", world.rank, ROWS)
        }
        spread = Among([world], NETWORK, parts, named, knows_sums=world.rank == last)
        finite = torch.tensor([bool(each.isfinite().all()) for each in own.values()])
        votes = [float(world.rank == 0), 0.0]
        scale.undo()
        found = spread.agree(torch.tensor([loss, *votes]), VOTES, finite, True, scale)
        scale.step()
        moved = any(bool(each.any()) for each in named.values())
        return found, not moved, spread.total(torch.tensor([1.0, world.rank]))


@pytest.mark.parametrize(
    "change", ["none", "unused", "inf in a part", "nan in all", "nan loss", "beyond float32"]
)
def test_all_find_what_one_would(ranks: Ranks, change: str) -> None:
    told: list[Any] = ranks.shared(ROWS, agreed, change)
    whole = {
        name: each for name, each in gradients().items() if change != "unused" or name == "cut"
    }
    rows = torch.stack([row.norm().double() for row in gradients()["cut"]])
    norms = [rows.square().sum().sqrt().float()]
    norms += [each.norm() for name, each in whole.items() if name != "cut"]
    for found, _, counted in told:
        assert found.names == list(NETWORK)
        broken = {"inf in a part": "cut", "nan in all": "of_all"}.get(change)
        assert found.is_finite.tolist() == [name != broken for name in NETWORK]
        assert found.sums.tolist()[1:] == [1.0, 0.0]
        assert math.isnan(found.sums[0]) if change == "nan loss" else found.sums[0] == 3.0
        if change in ("none", "unused", "nan loss"):
            assert found.norm.equal(nn.utils.get_total_norm(norms))
        else:
            assert not found.norm.isfinite()
        assert counted.tolist() == [3.0, 3.0]
    assert all(found.norm.equal(told[0][0].norm) or found.norm.isnan() for found, _, _ in told)


def test_one_overflow_lets_all_skip(ranks: Ranks) -> None:
    for change, skips in (("inf in a part", True), ("none", False)):
        found = ranks.shared(ROWS, agreed, change, True)
        assert [skipped for _, skipped, _ in found] == [skips] * ROWS


def no_scale(weight: nn.Parameter) -> LossScale:
    scaler = UpdatingScaler("cpu", enabled=False)
    return LossScale(scaler, torch.optim.SGD([weight], 1.0), weight.device)


def told_by_two_columns() -> Found:
    """Of four ranks, two rows of two. Rank 0 updates `of_all` for its column, and rank 3 for the
    other one: they are in no group together.
    """
    with join("cpu") as world:
        columns, rows = [range(0, 4, 2), range(1, 4, 2)], [range(2), range(2, 4)]
        with divide(world, columns) as column, divide(world, rows) as row:
            of_all = nn.Parameter(torch.zeros(7))
            of_all.grad = gradients()["of_all"]
            named = {"of_all": of_all} if world.rank in (0, 3) else {}
            network, parts = {"of_all": torch.float32}, {"of_all": TensorPart("of_all")}
            spread = Among([column, row], network, parts, named)
            finite, scale = torch.tensor([True]), no_scale(of_all)
            return spread.agree(torch.tensor([3.0]), 0, finite, True, scale)


def test_what_ranks_in_no_group_together_know_counts_once(ranks: Ranks) -> None:
    for found in ranks.shared(4, told_by_two_columns):
        assert found.norm.equal(gradients()["of_all"].norm())
        assert found.sums.tolist() == [3.0]


def in_parts(whole: Tensor, parts: int) -> tuple[dict[str, nn.Parameter], Among]:
    """Columns of a weight, and a bias that is not in parts; on one rank."""
    columns = cut(whole.shape[1], parts)
    named = {
        f"0.parts.{part}.weight": nn.Parameter(each.clone())
        for part, each in enumerate(whole.tensor_split(list(columns[1:-1]), 1))
    }
    of = {name: TensorPart("0.weight", number, parts) for number, name in enumerate(named)}
    named["0.bias"] = nn.Parameter(torch.arange(3.0))
    of["0.bias"] = TensorPart("0.bias")
    network = {"0.weight": torch.float32, "0.bias": torch.float32}
    return named, Among([ALONE], network, of, named)


def norm_of_gradient(spread: Among) -> Tensor:
    finite, scale = torch.ones(5, dtype=torch.bool), no_scale(nn.Parameter(torch.zeros(1)))
    return spread.agree(torch.zeros(1), 0, finite, True, scale).norm


def test_norms_of_whole_tensors() -> None:
    whole = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    named, spread = in_parts(whole, 4)
    weights = list(named.values())
    [found] = spread.norms(weights, [[each.detach() for each in weights]])
    expected = [torch.linalg.vector_norm(whole)] * 4 + [torch.tensor(5.0).sqrt()]
    torch.testing.assert_close(list(found), expected)
    assert len({float(each) for each in found}) == 2
    for each in weights:
        each.grad = each.detach().clone()
    both = nn.utils.get_total_norm([whole, torch.arange(3.0)])
    torch.testing.assert_close(norm_of_gradient(spread), both)
    for name in ("0.parts.0.weight", "0.parts.1.weight", "0.parts.2.weight", "0.parts.3.weight"):
        named[name].grad = None
    assert norm_of_gradient(spread) == torch.arange(3.0).norm()


def test_a_layers_rate_is_that_of_the_whole() -> None:
    """Against the whole layer's own update."""
    whole = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    gradient = torch.randn(3, 10, generator=torch.Generator().manual_seed(3))
    alone = nn.Parameter(whole.clone())
    named, spread = in_parts(whole, 4)
    parts = [each for name, each in named.items() if name != "0.bias"]
    words = {"lr": 0.1, "betas": (0.9, 0.99), "delta": 1e-6, "weight_decay": 0.01}
    of_whole, of_parts = Lamb([alone], words), Lamb(parts, words)
    of_parts.take_norms(spread.norms)
    for factor in (1.0, -0.5):
        alone.grad, place = gradient * factor, 0
        for each in parts:
            each.grad = alone.grad[:, place : (place := place + each.shape[1])].clone()
        of_whole.step()
        of_parts.step()
    torch.testing.assert_close(torch.cat([each.detach() for each in parts], 1), alone.detach())


def test_the_norm_of_all_is_torchs_own() -> None:
    kinds = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
    drawn = torch.Generator().manual_seed(4)
    tensors = [torch.randn(99, generator=drawn).to(kind) for kind in kinds]
    told = torch.stack([each.norm().double() for each in tensors])
    assert total(told, kinds).equal(nn.utils.get_total_norm(tensors))
    told[1] = UNUSED
    assert total(told, kinds).equal(nn.utils.get_total_norm([tensors[0], *tensors[2:]]))
