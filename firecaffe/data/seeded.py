"""Random numbers of anyone's code as a function of (seed, epoch, sample).

A transform draws from python's `random`, numpy's global generator or torch's. Each of them is
seeded before a sample is made, by a hash of its key, and put back afterwards, so that what a sample
becomes does not depend on the batch, the worker or the process that makes it. What makes a batch at
a time has the key of its first sample.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from firecaffe.data.hash import Stream, hash64
from firecaffe.errors import DataError
from firecaffe.generators import seed_generators

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
    """The key of the sample that is being made, or of the first one of a batch: for `__getitem__`
    or `batch` of a data set that has a generator of its own, or wants to know the epoch.

    Raises: DataError where no sample is being made.
    """
    try:
        return _current.get()
    except LookupError:
        raise DataError(
            "current_key() was called where no sample is being made; it is known in __getitem__ or "
            "batch of a data set that firecaffe asks"
        ) from None


@contextmanager
def under(key: Key) -> Iterator[None]:
    """A `with` block in which `current_key` is this one. Threads may have one each."""
    token = _current.set(key)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def keyed(stream: Stream, key: Key) -> Iterator[None]:
    """The same, and the generators are seeded by the key."""
    seed_by(stream, key)
    with under(key):
        yield


def seed_by(stream: Stream, key: Key) -> None:
    """Seeds the generators by a key."""
    first, second, third = (
        int(hash64(key.seed, stream, key.epoch, key.sample, which)) % 2**64 for which in range(3)
    )
    seed_generators(first, second, third >> 1)
