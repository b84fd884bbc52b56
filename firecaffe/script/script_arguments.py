"""Checks of the arguments of functions for a script's own training loop; each error is one line.

They run before a world is joined, because a failed call must not leave one behind. State that ranks
do not exchange is found, and warned about, at a network's first forward.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed import ProcessGroup

from firecaffe.errors import RecipeError
from firecaffe.exchange import AUTO, NATIVE, find_schedule, parse_hierarchical
from firecaffe.exchange.route import keeps_tree_order
from firecaffe.gradients.compressors import COMPRESSORS
from firecaffe.gradients.config import NO_COMPRESSOR, check_timeout
from firecaffe.inventory.network_state import ForwardWatch, kinds_of
from firecaffe.script.script_exchange import check_encodable
from firecaffe.user_code import shown
from firecaffe.value_checks import some_of

REFUSED = {
    "mixed_precision": "DDP sums these gradients itself; use torch.autocast, or model.to(dtype)",
    "delay_all_reduce_named_params": "DDP sums the gradients of these parameters itself",
    "param_to_hook_all_reduce": "DDP sums the gradients of delayed parameters itself",
}
"""The options of DDP with which gradients silently bypass any communication hook."""


# Not every RecipeError is a ValueError: readers of files take a ValueError for a damaged file.
class ArgumentError(RecipeError, ValueError):
    """An impossible argument. It is a ValueError, as DDP raises one."""


class NothingToTrainError(RecipeError, RuntimeError):
    """The model has no parameter to train. DDP raises a RuntimeError for it."""


class SecondHookError(RecipeError, RuntimeError):
    """The model already has a communication hook. DDP raises a RuntimeError for it."""


@contextmanager
def _as_argument_error() -> Iterator[None]:
    try:
        yield
    except RecipeError as error:
        if isinstance(error, ValueError | RuntimeError):
            raise
        raise ArgumentError(str(error)) from None


@_as_argument_error()
def check_words(exchange: str, compressor: str, timeout_s: float | None) -> None:
    """Raise RecipeError if an argument is impossible, or two do not go together."""
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
    check_timeout_s(timeout_s)


@_as_argument_error()
def check_timeout_s(timeout_s: float | None) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise RecipeError(f"timeout_s is {shown(timeout_s)}; it must be a number of seconds")
    check_timeout("timeout_s", timeout_s)


@_as_argument_error()
def check_model(module: nn.Module, compressor: str, options: Mapping[str, Any]) -> None:
    """Raise RecipeError if gradients of a model would not go through the exchange."""
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
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in trained):
        raise RecipeError(
            "the optimizer is applied in backward, for which DDP sums the gradients itself; "
            "call its step() after backward"
        )
    check_trained("parallelize", trained, compressor)
    if compressor != NO_COMPRESSOR:
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise RecipeError(
                    f"compressor {compressor} encodes dense gradients; "
                    f"those of {name or 'the model'} are sparse (sparse=True)"
                )


@_as_argument_error()
def check_trained(function: str, trained: Collection[nn.Parameter], compressor: str) -> None:
    """Raise RecipeError if there is nothing to train, on several devices, or not to be encoded."""
    if not trained:
        raise NothingToTrainError("the model has no parameter to train")
    devices = sorted({str(parameter.device) for parameter in trained})
    if len(devices) > 1:
        raise RecipeError(
            f"the parameters are on {', '.join(devices)}; {function} takes those of one device"
        )
    for parameter in trained:
        check_encodable(compressor, parameter.dtype)


GRADIENT_WRAPPERS = (
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
)
"""Names of classes that sum their gradients themselves. Their modules are mostly not imported."""


def check_network(function: str, word: str, value: Any) -> None:
    if isinstance(value, nn.Module):
        return
    if isinstance(value, type) and issubclass(value, nn.Module):
        name = value.__name__
        described = f"the class {name}; expected a network that is made of it, as {name}(…)"
    elif isinstance(value, list | tuple):
        described = f"{shown(value)}; expected one network (of several, call {function} for each)"
    elif callable(value):
        described = f"{shown(value)}; expected a network, a torch.nn.Module, not what makes it"
    else:
        described = f"{shown(value)}; expected a network, a torch.nn.Module"
    raise ArgumentError(f"{function}: {word} is {described}")


def check_not_wrapped(function: str, word: str, network: nn.Module, instead: str) -> None:
    """Raise ArgumentError if a part of the network sums its gradients itself: they go twice."""
    for name, part in network.named_modules():
        classes = [
            kind.__name__ for kind in type(part).__mro__ if kind.__name__ in GRADIENT_WRAPPERS
        ]
        if classes:
            place = f"{word}.{name} is" if name else f"{word} is"
            raise ArgumentError(
                f"{function}: {place} in {classes[0]} already, which sums its gradients itself; "
                f"{instead}"
            )


def check_optimizer(function: str, value: Any, network: nn.Module) -> None:
    if isinstance(value, type) and issubclass(value, optim.Optimizer):
        name = value.__name__
        raise ArgumentError(
            f"{function}: optimizer is the class {name}; expected one that is made of it, as "
            f"{name}(model.parameters(), …)"
        )
    if not isinstance(value, optim.Optimizer):
        raise ArgumentError(
            f"{function}: optimizer is {shown(value)}; expected a torch.optim.Optimizer"
        )
    if not hasattr(value, "_optimizer_step_post_hooks"):
        raise ArgumentError(
            f"{function}: optimizer is a wrapper ({type(value).__name__}), which has no "
            "hooks; give the optimizer inside it (of accelerate, optimizer.optimizer)"
        )
    own = {id(parameter) for parameter in network.parameters()}
    if not any(
        id(parameter) in own for group in value.param_groups for parameter in group["params"]
    ):
        raise ArgumentError(
            f"{function}: optimizer has none of the model's parameters; make it of "
            "model.parameters(), after all that changes them (split, to, a wrapper)"
        )


def check_group(function: str, value: Any) -> None:
    if value is None or isinstance(value, ProcessGroup):
        return
    if value == dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            f"{function}: this rank is not in process_group; only the ranks of a group call it"
        )
    raise ArgumentError(
        f"{function}: process_group is {shown(value)}; expected a group, as "
        "torch.distributed.new_group([0, 1]) makes it"
    )


def check_whole_number(function: str, word: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ArgumentError(
            f"{function}: {word} is {shown(value)}; it must be a whole number, at least {least}"
        )


def check_number(function: str, word: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{function}: {word} is {shown(value)}; it must be a number")


def warn_of_own_state(module: nn.Module, call: str, averages: bool) -> None:
    """Warn, on the first rank, about state that the function `call` does not exchange.

    `averages`: trained parameters, so that forward may change them.
    """
    if dist.is_initialized() and (dist.get_rank() or dist.get_world_size() == 1):
        return
    if extra := kinds_of(module).extra:
        _warn(call, f"the extra state of {some_of(extra)}")
    _FirstForward(module, call, averages)


class _FirstForward:
    def __init__(self, module: nn.Module, call: str, averages: bool) -> None:
        self._call, self._averages = call, averages
        self._watch: ForwardWatch | None = None
        self._hooks = (
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after),
        )

    def _before(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return  # otherwise the check would be compiled, too
        if module.training and self._watch is None:
            self._watch = ForwardWatch(module)

    def _after(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._watch is None:
            return
        for hook in self._hooks:
            hook.remove()
        changed = self._watch.changed()
        if self._averages:
            changed = [name for name in changed if not self._watch.is_trained(name)]
        if changed:
            _warn(self._call, f"what forward changes of {some_of(changed)}")


def _warn(call: str, what: str) -> None:
    warnings.warn(
        f"{call} does not exchange {what}: each rank has its own; keep it in a buffer, or exchange "
        "it in the script",
        stacklevel=4,
    )
