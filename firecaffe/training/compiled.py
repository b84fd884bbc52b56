"""A network whose micro-batches are computed by code that torch.compile has made for it.

Code is made for each size of a micro-batch, and for no size in general: else a worker that has met
a short micro-batch would go on with other code than one that has not, and come to other bits. It is
used for training alone; evaluations compute as without it. The wrapper is not the network: names of
parameters stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from firecaffe.errors import RecipeError


def compiled(model: nn.Module) -> Callable[..., Any]:
    """The network's forward pass, compiled when it is first called with a size.

    Raises: RecipeError if there is no compiler.
    """
    check_compiler(next(model.parameters()).device.type)
    # If there were too many sizes torch would go on without its code, and say so to nobody.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    made: Callable[..., Any] = torch.compile(model, dynamic=False)
    return made


def check_compiler(device: str) -> None:
    """Raises: RecipeError if torch finds no C++ compiler, which it needs on a CPU."""
    if device != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise RecipeError(
            "train.compile is true, and torch finds no C++ compiler here, which it needs on a CPU: "
            "install g++, or name yours in the variable CXX"
        ) from None
