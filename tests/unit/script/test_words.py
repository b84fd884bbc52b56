"""What `parallelize` refuses before it joins anything, as the class of error that DDP raises."""

import inspect
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import nn

import firecaffe
from firecaffe.errors import RecipeError


def in_backward() -> nn.Module:
    """As `torch.distributed.optim._apply_optimizer_in_backward` leaves it."""
    model: Any = nn.Linear(2, 2)
    model.weight._in_backward_optimizers = []
    return cast(nn.Module, model)


def linear() -> nn.Module:
    return nn.Linear(2, 2)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "exchange": (linear, {"exchange": "star"}, ValueError, "no exchange 'star'.*tree.*, auto"),
    "compressor": (linear, {"compressor": "zip"}, ValueError, "'zip'.*one of none, "),
    "order": (linear, {"exchange": "ring", "compressor": "int8"}, ValueError, "ring"),
    "timeout_s": (linear, {"timeout_s": 0.0}, ValueError, "timeout_s is 0"),
    "double": (lambda: linear().double(), {"compressor": "int8"}, ValueError, "torch.float64"),
    "nothing": (nn.ReLU, {}, RuntimeError, "no parameter to train"),
    "frozen": (lambda: linear().requires_grad_(False), {}, RuntimeError, "no parameter to train"),
    "mixed": (linear, {"mixed_precision": object()}, ValueError, "mixed_precision"),
    "delayed": (
        linear,
        {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": nn.Parameter()},
        ValueError,
        "delay_all_reduce_named_params",
    ),
    "in backward": (in_backward, {}, ValueError, "in backward"),
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)),
        {"compressor": "int8"},
        ValueError,
        "int8.* 0 are sparse",
    ),
    "meta": (
        lambda: nn.Sequential(linear(), linear().to("meta")),
        {},
        ValueError,
        "on cpu, meta",
    ),
    "by position": (linear, {"device_ids": "tree"}, ValueError, "exchange='tree'"),
    "unknown": (linear, {"bucket_cap": 1}, TypeError, "bucket_cap"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_by_name(case: str) -> None:
    make, words, kind, message = CASES[case]
    with pytest.raises(kind, match=message) as caught:
        firecaffe.parallelize(make(), **words)
    assert isinstance(caught.value, RecipeError)
    assert not dist.is_initialized()


def test_the_python_reducer_has_no_buckets() -> None:
    with (
        patch("torch._dynamo.config.optimize_ddp", "python_reducer"),
        pytest.raises(RecipeError, match="python_reducer"),
    ):
        firecaffe.parallelize(linear())


def test_without_a_word_the_exchange_is_chosen_as_in_a_recipe() -> None:
    for function in (firecaffe.parallelize, firecaffe.local, firecaffe.comm_hook):
        default = inspect.signature(function).parameters["exchange"].default
        assert default == firecaffe.ExchangeConfig().algorithm == "auto"


def test_comm_hook_joins_nothing() -> None:
    """A launcher such as Lightning's starts the other ranks, and the group, after it."""
    firecaffe.comm_hook("tree")
    assert not dist.is_initialized()
    with pytest.raises(RecipeError, match="no exchange"):
        firecaffe.comm_hook("star")
