"""The generators that all code of a process shares: python's `random`, numpy's global one, torch's.

What a training draws from them is a function of keys, so each use seeds them; what anyone's code
does to them beside it is put back.
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
    """Puts the three generators back as they were, after a `with` block; torch's on the CPU."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)


def seed_generators(for_python: int, for_numpy: int, for_torch: int) -> None:
    """Seeds each by a number of its own, below 2^64 (torch's: 2^63): python's and numpy's are the
    same algorithm.
    """
    random.seed(for_python)
    np.random.seed([for_numpy % 2**32, for_numpy >> 32])
    # torch.manual_seed would also record a call stack for GPUs that are not there: 0.7 ms.
    torch.default_generator.manual_seed(for_torch)


@contextmanager
def noticed() -> Iterator[list[str]]:
    """A `with` block's list is given, at its end, the names of the generators that the block has
    drawn from or seeded; those are then put back as they were.
    """
    touched: list[str] = []
    with generators_kept():
        before = all_states()
        yield touched
        touched += changed(before)


def changed(before: Mapping[str, Any]) -> list[str]:
    """The names of the generators whose states are others than before. before: of `all_states`."""
    return [name for name, state in all_states().items() if state != before[name]]


def all_states() -> dict[str, Any]:
    """The states by name, to compare; of torch's the GPU's, too."""
    kind, words, *more = np.random.get_state(legacy=True)
    of_torch = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        of_torch.append(torch.cuda.get_rng_state())
    return {
        PYTHON: random.getstate(),
        NUMPY: (kind, np.asarray(words).tobytes(), *more),
        TORCH: [each.numpy().tobytes() for each in of_torch],
    }
