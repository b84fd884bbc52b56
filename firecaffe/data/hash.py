"""Random numbers without state: a 64-bit hash of integer keys, for a whole batch at once.

A generator has a state that depends on what was drawn before, hence on how the work was dealt
out. A hash of (seed, use, epoch, sample) depends on nothing else, so any worker can draw any
sample's numbers at any time and gets the same ones.

`hash64` feeds its keys one after the other into the output function of SplitMix64:

    state = 0
    for key in keys:  state = mix((state XOR key) + 0x9E3779B97F4A7C15)

so `hash64(seed)` is SplitMix64's first output for that seed, and with all keys but one held fixed
the hash is a bijection of the one that is left: no two samples of an epoch get the same number.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
constants of Stafford's variant 13, as in Vigna's public-domain splitmix64.c.

Random numbers of anyone's code as a function of (seed, epoch, sample).

A transform draws from python's `random`, numpy's global generator or torch's. Each of them is
seeded before a sample is made, by a hash of its key, and put back afterwards, so that what a sample
becomes does not depend on the batch, the worker or the process that makes it. What makes a batch at
a time has the key of its first sample.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from firecaffe.errors import DataError
from firecaffe.generators import seed_generators


class Stream(IntEnum):
    """What a random number is for: a key of its own, so that no two uses share numbers."""

    ORDER = 1
    CROP_TOP = 2
    CROP_LEFT = 3
    MIRROR = 4
    GENERATED_PATTERN = 5
    GENERATED_NOISE = 6
    GENERATED_SHIFT = 7
    BOX = 8
    SHARD = 9
    PACK = 10
    HOLD_OUT = 11
    ITEM = 12
    COLLATE = 13
    BALANCE = 14
    MIX = 15
    ERASE = 16
    BATCH = 17


def _signed(value: int) -> int:
    """`value` modulo 2^64 as the two's complement number that int64 holds."""
    return ((value + 2**63) % 2**64) - 2**63


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's `>>` on int64 copies the sign bit, the mask removes the copies."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    """The same of one number without sign: as tensors, the keys of a batch would cost the most."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def hash64(*keys: int | Tensor) -> Tensor:
    """Hash integer keys to int64 (all 64 bits random, so negative half of the time).

    Keys are Python ints (taken modulo 2^64) or int64 tensors, which broadcast against each other;
    the result has the broadcast shape, 0-dimensional if all keys are ints.
    """
    start, done = 0, 0
    for key in keys:
        if not isinstance(key, int):
            break
        start = _mix_int(((start ^ (key % 2**64)) + 0x9E3779B97F4A7C15) % 2**64)
        done += 1
    state = torch.tensor(_signed(start))
    for key in keys[done:]:
        state = _mix((state ^ (_signed(key) if isinstance(key, int) else key)) + _GAMMA)
    return state


def below(hashes: Tensor, bound: int | Tensor) -> Tensor:
    """Map hashes to 0 ... bound-1: the upper 63 bits modulo `bound` (bias below bound / 2^63)."""
    return _shift_right(hashes, 1) % bound


def upper_bits(hashes: Tensor, bits: int) -> Tensor:
    """The upper bits of hashes: 0 ... 2^bits-1."""
    return _shift_right(hashes, 64 - bits)


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
