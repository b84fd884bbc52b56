"""Networks: one family per file, by name in MODELS; docs/reference/networks.md shows them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
