"""Random numbers of anyone's code as a function of (seed, epoch, sample).

A transform draws from python's `random`, numpy's global generator or torch's. Each of them is
seeded before a sample is made, by a hash of its key, and put back afterwards, so that what a sample
becomes does not depend on the batch, the worker or the process that makes it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np
import torch

from firecaffe.data.hash import Stream, hash64
from firecaffe.errors import DataError

EVALUATION = -1
"""The epoch of evaluations, with seed 0: they see the same samples at any time of any run."""


class Key(NamedTuple):
    """What a sample's random numbers are a function of."""

    seed: int
    """The recipe's `train.seed`; 0 in evaluations."""
    epoch: int
    """From 0; EVALUATION (-1) in evaluations."""
    sample: int
    """Its number in the data set."""


_current: ContextVar[Key] = ContextVar("firecaffe.data.current_key")


def current_key() -> Key:
    """The key of the sample that is being made: for `__getitem__` of a torch data set that has a
    generator of its own, or wants to know the epoch.

    Raises: DataError where no sample is being made.
    """
    try:
        return _current.get()
    except LookupError:
        raise DataError(
            "current_key() was called where no sample is being made; it is known in __getitem__ of "
            "a data set that firecaffe asks"
        ) from None


@contextmanager
def generators_kept() -> Iterator[None]:
    """Puts the three generators back as they were, after a `with` block."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)


@contextmanager
def keyed(key: Key) -> Iterator[None]:
    """A `with` block that makes the sample of a key: the generators are seeded by it."""
    seed_generators(Stream.ITEM, key)
    token = _current.set(key)
    try:
        yield
    finally:
        _current.reset(token)


def seed_generators(stream: Stream, key: Key) -> None:
    """Seeds each by a number of its own: python's and numpy's are the same algorithm."""
    first, second, third = (
        int(hash64(key.seed, stream, key.epoch, key.sample, which)) % 2**64 for which in range(3)
    )
    random.seed(first)
    np.random.seed([second % 2**32, second >> 32])
    torch.default_generator.manual_seed(third >> 1)
