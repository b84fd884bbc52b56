"""Networks: one family per file, by name in MODELS; docs/reference/networks.md shows them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.models.known_networks import MODELS, build_model
    from firecaffe.models.model import (
        AUX_WEIGHT,
        HeadedLogits,
        Model,
        classification_loss,
        logits_of,
    )

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

__all__ = [
    "AUX_WEIGHT",
    "MODELS",
    "HeadedLogits",
    "Model",
    "build_model",
    "classification_loss",
    "logits_of",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
