"""The generated data set, made by the fork server before any of its processes asks for it.

A training reads it in its launcher and in each rank: a third of a second of a processor every time.
Its bytes are tested where it is made (tests/unit/data).
"""

import gc
import os
import pickle
from typing import Any

import torch

from firecaffe.data import source
from firecaffe.data.dataset import TensorDataset
from firecaffe.data.generated import generate


def generate_elsewhere() -> list[tuple[Any, Any]]:
    """Images and labels, as arrays. In a process of its own: this one's forks find out for
    themselves what the processor can, which torch does when it first computes.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        made = [(each.inputs.numpy(), each.targets.numpy()) for each in generate()]
        with os.fdopen(writer, "wb") as file:
            pickle.dump(made, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        arrays: list[tuple[Any, Any]] = pickle.load(file)
    os.waitpid(child, 0)
    return arrays


_arrays = generate_elsewhere()
vars(source)["generate"] = lambda: tuple(
    TensorDataset(torch.from_numpy(images), torch.from_numpy(labels), 10)
    for images, labels in _arrays
)
# A fork's collections would else touch, and so copy, all that is loaded.
gc.collect()
gc.freeze()
