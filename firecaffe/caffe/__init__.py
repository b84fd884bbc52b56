"""Readers and writers of Caffe's files (prototxt, caffemodel, binaryproto) and their networks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firecaffe.caffe.net import Net as Net

_PLACES = {"Net": "net"}
"""The module of each name, imported on first use: reading a file needs no torch."""

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
