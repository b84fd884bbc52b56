"""Trainers of others on two ranks: the weights of DDP within rounding, by our exchange indeed."""

from pathlib import Path

import pytest
import torch

from tests.ranks import adapted
from tests.ranks.adapted import STEPS, Weights
from tests.world import Ranks


def check(results: list[tuple[Weights, int, int]], other: list[tuple[Weights, int, int]]) -> None:
    """results, other: of both ranks; pairs of a training by DDP alone, and one by our exchange."""
    for (plain, by_ddp, _), (ours, by_us, size) in zip(results[::2], results[1::2], strict=True):
        assert by_ddp == 0
        assert by_us == STEPS * size, "all gradients of all steps go through the exchange"
        torch.testing.assert_close(ours, plain)
    for (mine, _, _), (theirs, _, _) in zip(results, other, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def check_twice(refused: list[str]) -> None:
    """What is said of a model of `parallelize`: by DDP's wrapping, and by that of an adapter."""
    assert "in another DistributedDataParallel" in refused[0]
    assert "in DistributedDataParallel already" in refused[1]


def test_lightning_and_fabric(ranks: Ranks) -> None:
    pytest.importorskip("lightning", reason="needs lightning: pip install -e '.[dev]'")
    (results, refused), (other, _) = ranks.run(2, adapted.by_lightning)
    check(results, other)
    hook, exchange, unknown, *twice = refused
    assert "ddp_comm_hook" in hook
    assert "trees" in exchange
    assert "did you mean exchange" in unknown
    check_twice(twice)


def test_accelerate_and_the_trainer_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[dev]'")
    pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[dev]'")
    (results, refused), (other, _) = ranks.run(2, adapted.by_accelerate, str(tmp_path))
    check(results, other)
    *prepared, hooked, network, by_ddp, by_us = refused
    check_twice([by_ddp, by_us])
    assert all("prepared" in line for line in prepared)
    assert "comm_hook fp16" in hooked
    assert "Sequential" in network
