"""Random numbers without state: 64-bit hashes of integer keys, for a whole batch at once.

A hash of (seed, use, epoch, sample) depends on nothing else, so any worker can draw the numbers of
any sample at any time. `hash64` feeds its keys one by one into the output function of SplitMix64:

    state = 0
    for key in keys:  state = mix((state XOR key) + 0x9E3779B97F4A7C15)

So `hash64(seed)` is the first output of SplitMix64. With all keys but one fixed, the hash is a
bijection of that key, so no two samples of an epoch get the same number. Users' code runs with the
generators of python, numpy and torch seeded by such a hash; afterwards they are restored.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014;
constants of Stafford's variant 13, as in Vigna's public-domain splitmix64.c.
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
    """The uses of random numbers. Each is a key of the hash, so no two uses share numbers."""

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
    return ((value + 2**63) % 2**64) - 2**63


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch's `>>` on int64 copies the sign bit; the mask removes the copies.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    # As `_mix`, on an unsigned int: hashing a batch's scalar keys as tensors would cost the most.
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def hash64(*keys: int | Tensor) -> Tensor:
    """Hash ints (modulo 2^64) or int64 tensors to int64, all 64 bits random, of broadcast shape."""
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
    return _shift_right(hashes, 64 - bits)


EVALUATION = -1
"""The epoch of evaluations. With seed 0, it gives all evaluations the same samples."""


class Key(NamedTuple):
    """The key of a sample's random numbers."""

    seed: int
    """`train.seed` of the recipe; 0 in evaluations."""
    epoch: int
    """From 0; EVALUATION (-1) in evaluations."""
    sample: int
    """The sample's number in the data set."""


_current: ContextVar[Key] = ContextVar("firecaffe.data.current_key")


def current_key() -> Key:
    """Return the key of the sample being made, or of the first sample of a batch.

    Call it in `__getitem__` or `batch` of a data set. Raises DataError if no sample is being made.
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
    """Set `current_key` for a `with` block. Each thread may have a different one."""
    token = _current.set(key)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def keyed(stream: Stream, key: Key) -> Iterator[None]:
    """Set `current_key` for a `with` block, and seed the generators by it."""
    seed_by(stream, key)
    with under(key):
        yield


def seed_by(stream: Stream, key: Key) -> None:
    third = 2  # torch's key when each library had its own hash; kept so that torch draws the same
    seed_generators(int(hash64(key.seed, stream, key.epoch, key.sample, third)) % 2**64 >> 1)
