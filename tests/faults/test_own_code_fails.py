"""What a user's code or a codec raises on one rank: all ranks tell it in its own words, at once.

A rank that took it for a lost one would wait for longer than the tests do.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import firecaffe
from firecaffe import ExchangeConfig, Recipe, RunConfig, TrainConfig
from firecaffe.errors import FirecaffeError, PeerLostError
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.compressors.casts import FLOAT16
from firecaffe.runs.run_folder import read_run_file
from tests.ranks.networks import Everything, small_data
from tests.world import Ranks

LONG_S = 1000.0
WORDS = "shapes do not match"
CALLS = 3
"""Until the failing code fails; each step has two buckets or more."""


class Fails:
    """Fails on rank 1 after some calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rank: int) -> None:
        self.calls += 1
        if rank == 1 and self.calls > CALLS:
            raise RuntimeError(WORDS)


def fit(where: str, folder: str) -> tuple[str, Any, int]:
    """The type, the fault and the exit code of what ends a training."""
    fails = Fails()
    options: dict[str, Any] = {}
    exchange = ExchangeConfig(timeout_s=LONG_S, silent_s=LONG_S)
    if where == "codec":
        exchange = dataclasses.replace(exchange, compressor="float16")

        def encode(vector: torch.Tensor) -> torch.Tensor:
            fails(dist.get_rank())
            return FLOAT16.encode(vector)

        COMPRESSORS["float16"] = dataclasses.replace(FLOAT16, encode=encode)
    else:

        def hook(state: Any, bucket: Any) -> Any:
            fails(dist.get_rank())
            return allreduce_hook(state, bucket)

        options["comm_hook"] = (None, hook)
    recipe = Recipe(
        train=TrainConfig(global_batch_size=12, micro_batch_size=2, steps=9),
        exchange=exchange,
        run=RunConfig(folder=folder, tensorboard=False),
    )
    try:
        firecaffe.train(recipe, Everything, small_data(60), small_data(20, 1), **options)
    except Exception as error:
        code = error.exit_code if isinstance(error, FirecaffeError) else 1
        return type(error).__name__, getattr(error, "fault", None), code
    return "", None, 0


@pytest.mark.parametrize("where", ["hook", "codec"])
def test_both_ranks_tell_what_it_said(ranks: Ranks, where: str, tmp_path: Path) -> None:
    (told, first, code), (own, second, own_code) = ranks.run(2, fit, where, str(tmp_path / "run"))
    assert own == "RuntimeError"
    assert told == PeerLostError.__name__
    assert (code, own_code) == (1, 1)
    for fault in (first, second):
        assert (fault.kind, fault.rank) == ("exception", 1)
        assert fault.detail == f"RuntimeError: {WORDS}"
    assert read_run_file(tmp_path / "run", "fault.json")["rank"] == 1
