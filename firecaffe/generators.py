"""The random generators that all code of a process shares: Python's, numpy's and torch's.

A training seeds them from keys at each use. Changes by other code are undone.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

PYTHON, NUMPY, TORCH = "python's random", "numpy's global generator", "torch's global generator"


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the three generators after the block; torch's on the CPU only."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)


def seed_generators(number: int) -> None:
    """Seed all three with a number below 2^63; numpy's, with its lower 32 bits.

    A training calls it for each micro-batch, so it has to be fast. Python and numpy have the same
    algorithm, but draw different numbers from one seed, which they expand into a state differently.
    """
    random.seed(number)
    # A list of two numbers of 32 bits takes four times as long: 140 us between two convolutions.
    np.random.seed(number % 2**32)
    # torch.manual_seed would also record a call stack for absent GPUs, which takes 0.7 ms.
    torch.default_generator.manual_seed(number)


@contextmanager
def noticed() -> Iterator[list[str]]:
    """Yield a list that names, after the block, the generators used in it. Restores them."""
    touched: list[str] = []
    with generators_kept():
        before = all_states()
        yield touched
        touched += changed(before)


def changed(before: Mapping[str, Any]) -> list[str]:
    """Return the names of generators whose states differ from `before`, made by `all_states`."""
    return [name for name, state in all_states().items() if state != before[name]]


def all_states() -> dict[str, Any]:
    """Return comparable states by name. torch's include the GPU's, if CUDA is in use."""
    kind, keys, *more = np.random.get_state(legacy=True)
    of_torch = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        of_torch.append(torch.cuda.get_rng_state())
    return {
        PYTHON: random.getstate(),
        NUMPY: (kind, np.asarray(keys).tobytes(), *more),
        TORCH: [state.numpy().tobytes() for state in of_torch],
    }
