"""Checks of the words for an exchange in a script, and of its model and options of DDP."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.exchange import NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.choose import AUTO
from firecaffe.exchange.order import keeps_tree_order
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.config import NO_COMPRESSOR, check_timeout
from firecaffe.reference import shown
from firecaffe.script.rank_mean import check_encodable

REFUSED = {
    "mixed_precision": "DDP sums these gradients itself; use torch.autocast, or model.to(dtype)",
    "delay_all_reduce_named_params": "DDP sums the gradients of these parameters itself",
    "param_to_hook_all_reduce": "DDP sums the gradients of delayed parameters itself",
}
"""The options of DDP with which gradients go past any communication hook, in silence."""


class ArgumentError(RecipeError, ValueError):
    """An argument that is not possible. A ValueError, as DDP raises it. (Not every RecipeError is
    one: whoever reads a file takes a ValueError for a damaged one.)
    """


class NothingToTrainError(RecipeError, RuntimeError):
    """The error of a model without a parameter to train; DDP raises a RuntimeError for it."""


class SecondHookError(RecipeError, RuntimeError):
    """The error of a model with a communication hook already; DDP raises a RuntimeError for it."""


@contextmanager
def _of_arguments() -> Iterator[None]:
    """Raises: ArgumentError for a RecipeError that is none of DDP's kinds yet."""
    try:
        yield
    except RecipeError as error:
        if isinstance(error, ValueError | RuntimeError):
            raise
        raise ArgumentError(str(error)) from None


@_of_arguments()
def check_words(exchange: str, compressor: str, timeout_s: float | None) -> None:
    """Raises: RecipeError if a word cannot be, or two cannot be together."""
    if not isinstance(exchange, str):
        raise RecipeError(f"exchange is {shown(exchange)}; it must be a name, as 'tree'")
    if exchange not in (NATIVE, AUTO):
        try:
            find_schedule(exchange)
        except ValueError as error:
            also = f", {AUTO}" if parse_hierarchical(exchange) is None else ""
            raise RecipeError(f"exchange: {error}{also}") from None
    if compressor not in (NO_COMPRESSOR, *COMPRESSORS):
        known = ", ".join((NO_COMPRESSOR, *COMPRESSORS))
        raise RecipeError(f"compressor is {shown(compressor)}; it must be one of {known}")
    if compressor != NO_COMPRESSOR and exchange != AUTO and not keeps_tree_order(exchange):
        raise RecipeError(
            f"compressor {compressor} adds in the order of the tree, which exchange {exchange} "
            "does not keep; use tree"
        )
    check_patience(timeout_s)


@_of_arguments()
def check_patience(timeout_s: float | None) -> None:
    """Raises: RecipeError if nobody can wait for so long."""
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise RecipeError(f"timeout_s is {shown(timeout_s)}; it must be a number of seconds")
    check_timeout("timeout_s", timeout_s)


@_of_arguments()
def check_model(module: nn.Module, compressor: str, options: Mapping[str, Any]) -> None:
    """Raises: RecipeError if gradients of a model, or of an option of DDP's, would not go through
    the exchange.
    """
    if isinstance(options.get("device_ids"), str):
        word = options["device_ids"]
        raise RecipeError(f"device_ids is {word!r}; name an exchange as one: exchange={word!r}")
    for option, why in REFUSED.items():
        if options.get(option) is not None:
            raise RecipeError(f"{option} cannot go with parallelize: {why}")
    if torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer":
        raise RecipeError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which has no buckets that "
            "parallelize could exchange; leave it at True"
        )
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        raise NothingToTrainError("the model has no parameter to train")
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in trained):
        raise RecipeError(
            "the optimizer is applied in backward, for which DDP sums the gradients itself; "
            "call its step() after backward"
        )
    devices = sorted({str(parameter.device) for parameter in trained})
    if len(devices) > 1:
        raise RecipeError(
            f"the parameters are on {', '.join(devices)}; parallelize takes those of one device"
        )
    for parameter in trained:
        check_encodable(compressor, parameter.dtype)
    if compressor != NO_COMPRESSOR:
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise RecipeError(
                    f"compressor {compressor} encodes dense gradients; "
                    f"those of {name or 'the model'} are sparse (sparse=True)"
                )
