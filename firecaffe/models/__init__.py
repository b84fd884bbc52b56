"""Networks: one family per file, by name in MODELS; docs/reference/networks.md shows them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.models.known_networks import MODELS as MODELS
    from firecaffe.models.known_networks import build_model as build_model
    from firecaffe.models.model import AUX_WEIGHT as AUX_WEIGHT
    from firecaffe.models.model import HeadedLogits as HeadedLogits
    from firecaffe.models.model import Model as Model
    from firecaffe.models.model import classification_loss as classification_loss
    from firecaffe.models.model import logits_of as logits_of

_PLACES = {
    "AUX_WEIGHT": "model",
    "HeadedLogits": "model",
    "MODELS": "known_networks",
    "Model": "model",
    "build_model": "known_networks",
    "classification_loss": "model",
    "logits_of": "model",
}
"""The module of each name, imported on first use: reading a recipe needs no torch."""

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
