"""The [model] section, and networks: a family per file, in MODELS (docs/reference/networks.md)."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from firecaffe.user_code import without_folder

if TYPE_CHECKING:
    from firecaffe.models.googlenet import AUX_WEIGHT as AUX_WEIGHT
    from firecaffe.models.googlenet import HeadedLogits as HeadedLogits
    from firecaffe.models.googlenet import classification_loss as classification_loss
    from firecaffe.models.known_networks import MODELS as MODELS
    from firecaffe.models.known_networks import Model as Model
    from firecaffe.models.known_networks import build_model as build_model

_PLACES = {
    "AUX_WEIGHT": "googlenet",
    "HeadedLogits": "googlenet",
    "MODELS": "known_networks",
    "Model": "known_networks",
    "build_model": "known_networks",
    "classification_loss": "googlenet",
}
"""The module of each name, imported on first use: reading a recipe needs no torch."""

__all__ = sorted([*_PLACES, "ModelConfig"])


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        name: A network by name (docs/reference/networks.md); or a function that returns one:
            package.module:function, path/file.py:function, timm:NAME, torchvision:NAME; or a Caffe
            network, caffe:PATH.prototxt.
        args: Arguments of that function, such as `args = { width = 32 }`.
        weights: Source of the first weights: a file, safetensors, .fcz or a state_dict of
            torch.save; the folder of a run; or a checkpoint, such as RUN/checkpoints/best. A
            resumed run does not read it. Empty: fresh weights, drawn by the seed.
        freeze: Patterns of names of parameters that are not trained, such as
            `freeze = ["layer1.*"]`.
        low_rank: Layers to replace by two of lower rank: patterns of layer names and ranks, such as
            `low_rank = { "classifier.0" = 128 }`. The last pattern that matches decides.
    """

    name: str = "nin_small"
    args: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    freeze: list[str] = field(default_factory=list)
    low_rank: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with all settings that change the network, which identifies its steps."""
        name = without_folder(self.name)
        parts = [f"{word}={value!r}" for word, value in sorted(self.args.items())]
        parts += [f"freeze={self.freeze!r}"] if self.freeze else []
        parts += [f"low_rank={self.low_rank!r}"] if self.low_rank else []
        return f"{name}({', '.join(parts)})" if parts else name


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
