"""A trained network into a file: its tensors, numbers in fewer bits."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from firecaffe.compression.fcz import FileReport, read, write
from firecaffe.models.network import make_network
from firecaffe.shrink.scheme import Scheme
from firecaffe.training.load import Trained

MOST_SHARED = 1 << 16
"""Distinct values of a tensor that are written once each."""


def write_network(trained: Trained, scheme: Scheme, path: Path) -> FileReport:
    """Writes a run's network. Raises: RecipeError if the file cannot say which network it is."""
    tensors = {
        name: _in_bits(each.detach().cpu().numpy(), scheme.biases)
        for name, each in trained.model.state_dict().items()
        if isinstance(each, Tensor)
    }
    return write(path, tensors, network_of(trained), code=scheme.code)


def _in_bits(values: NDArray[Any], bits: int) -> NDArray[Any]:
    """Float32 numbers that a file has as they are, rounded to float16: those of one dimension, and
    values that many weights share.
    """
    if bits == 32 or values.dtype != np.float32:
        return values
    if values.ndim > 1 and len(np.unique(values)) > MOST_SHARED:
        return values
    return values.astype(np.float16).astype(np.float32)


def network_of(trained: Trained) -> dict[str, Any]:
    about = trained.about
    return {
        "model": {
            "name": trained.recipe.model.name,
            "args": trained.recipe.model.args,
            "num_classes": about.num_classes,
            "in_channels": about.in_channels,
        }
    }


def load(path: Path, trained: Trained) -> nn.Module:
    network = make_network(
        trained.recipe.model, trained.about.num_classes, trained.about.in_channels
    )
    with read(path) as file:
        network.load_state_dict({name: torch.from_numpy(each) for name, each in file.tensors()})
    return network.eval()
