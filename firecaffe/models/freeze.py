"""Parameters that are not trained, and normalization layers that keep their statistics."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from firecaffe.errors import RecipeError


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters with such names from training.

    A normalization layer whose parameters are all frozen stays in evaluation mode: its statistics
    do not change. Raises RecipeError if a pattern matches nothing, or nothing is left to train.
    """
    named = dict(network.named_parameters())
    for pattern in patterns:
        found = [name for name in named if fnmatchcase(name, pattern)]
        if not found:
            raise RecipeError(
                f"model.freeze has {pattern!r}, which no parameter of the network matches; they "
                f"are called {', '.join(list(named)[:4])} …"
            )
        for name in found:
            named[name].requires_grad_(False)
    if patterns and not any(each.requires_grad for each in named.values()):
        raise RecipeError(
            f"model.freeze {list(patterns)} leaves none of the network's {len(named)} parameters "
            "to train"
        )
    for layer in network.modules() if patterns else ():
        own = list(layer.parameters(recurse=False))
        if isinstance(layer, _NormBase) and own and not any(each.requires_grad for each in own):
            layer.eval()
