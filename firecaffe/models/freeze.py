"""Parameters that are not trained: by patterns in a recipe, or frozen by their network."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.models.weights import FirstWeights


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude the parameters with such names from training.

    A normalization layer whose parameters are all frozen stays in evaluation mode: its statistics
    do not change. Raises RecipeError if a pattern matches nothing, or nothing is left to train.
    """
    named = dict(network.named_parameters())
    for pattern in patterns:
        matches = [name for name in named if fnmatchcase(name, pattern)]
        if not matches:
            raise RecipeError(
                f"model.freeze has {pattern!r}, which no parameter of the network matches; they "
                f"are called {', '.join(list(named)[:4])} …"
            )
        for name in matches:
            named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise RecipeError(
            f"model.freeze {list(patterns)} leaves none of the network's {len(named)} parameters "
            "to train"
        )
    for layer in network.modules() if patterns else ():
        parameters = list(layer.parameters(recurse=False))
        if (
            isinstance(layer, _NormBase)
            and parameters
            and not any(parameter.requires_grad for parameter in parameters)
        ):
            layer.eval()


LOADS = ("pretrained", "weights")
"""Arguments by which timm's and torchvision's functions load weights themselves."""


@dataclass(frozen=True)
class Frozen:
    names: list[str]
    of: int
    """The number of the network's parameters, trained ones too."""
    fresh: list[str]
    """Names of parameters that are neither trained nor loaded."""

    def notes(self, config: ModelConfig) -> list[str]:
        if not config.freeze:
            return []
        notes = [f"model.freeze: {len(self.names)} of {self.of} parameters frozen"]
        if self.fresh:
            lacks = "has none that fits" if config.weights else "is empty"
            notes.append(
                f"warning: {len(self.fresh)} of {len(self.names)} frozen parameters stay as "
                f"model.name made them and are never trained (the first: {self.fresh[0]}), for "
                f"model.weights {lacks}"
            )
        return notes


def frozen_of(
    tied: Iterable[tuple[str, nn.Parameter]],
    config: ModelConfig,
    taken: FirstWeights | None,
    is_resumed: bool = False,
) -> Frozen:
    """Count what is frozen. tied: the network's parameters under all their names.

    taken: read from `model.weights`, if anything. is_resumed: whether all are a checkpoint's.
    """
    all_names = list(tied)
    first_name: dict[nn.Parameter, str] = {}
    for name, parameter in all_names:
        first_name.setdefault(parameter, name)
    named = {name: parameter for parameter, name in first_name.items()}
    frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
    if is_resumed or (taken is None and any(config.args.get(word) for word in LOADS)):
        fresh = []
    elif taken is None:
        fresh = frozen
    else:  # a tied parameter has several names, of which the file may have one
        lacking = {*taken.missing, *taken.reshaped}
        ids = {id(parameter) for name, parameter in all_names if name in lacking}
        fresh = [name for name in frozen if id(named[name]) in ids]
    return Frozen(frozen, len(named), fresh)
