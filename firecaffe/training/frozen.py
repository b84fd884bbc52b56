"""The parameters that `model.freeze` has frozen, and those of them that no file has given."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from firecaffe.models.config import ModelConfig
from firecaffe.models.weights import FirstWeights

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
    for name, each in all_names:
        first_name.setdefault(each, name)
    named = {name: each for each, name in first_name.items()}
    frozen = [name for name, each in named.items() if not each.requires_grad]
    if is_resumed or (taken is None and any(config.args.get(word) for word in LOADS)):
        fresh = []
    elif taken is None:
        fresh = frozen
    else:  # a tied parameter has several names, of which the file may have one
        lacking = {*taken.missing, *taken.reshaped}
        ids = {id(each) for name, each in all_names if name in lacking}
        fresh = [name for name in frozen if id(named[name]) in ids]
    return Frozen(frozen, len(named), fresh)
