"""Links that were measured lately, remembered for a day in the user's cache folder.

A link is that of certain ranks: their hosts and interfaces, how many there are, and their device.
What cannot be read, is not ours or is too old is measured again; where nothing can be written
nothing is remembered.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
from msgspec import Meta

from firecaffe.cluster.addresses import interface_of, own_addresses
from firecaffe.cluster.groups import GLOO_INTERFACE
from firecaffe.files import cache_folder, read_bytes, write_json
from firecaffe.schema import Count, decoded

NAME = "links.json"

MOST_AGE_S = 24 * 3600.0

MOST_LINKS = 1000
"""So many of a day are kept, the newest."""

MOST_BYTES = 1_000_000

UNREADABLE = (OSError, ValueError, RuntimeError)
"""RuntimeError: a user without a home."""

Real = Annotated[float, Meta(gt=0, le=1e30)]


@dataclass(frozen=True)
class KnownLink:
    """A link as the file has it."""

    ranks: str
    """The digest of `described`, of all ranks."""
    measured_at_s: Real
    """Seconds since 1970."""
    latency_s: Real
    bandwidth_bytes_per_s: Real


@dataclass(frozen=True)
class _File:
    version: Count
    links: list[KnownLink]


VERSION = 1
"""The version of the file, and of what its figures are measured by."""


def described(device_type: str, place: Sequence[str]) -> str:
    """What a link depends on, of this rank. place: what its host is called.

    An interface has an address of its own, by which a host that is rebuilt under its name is told
    from the one before it.
    """
    name = os.environ.get(GLOO_INTERFACE) or _interface_to(os.environ.get("MASTER_ADDR", ""))
    found = psutil.net_if_addrs().get(name, [])
    hardware = [each.address for each in found if each.family == psutil.AF_LINK]
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    return json.dumps([*place, name, *hardware, nccl, device_type])


def _interface_to(host: str) -> str:
    return interface_of(own_addresses(host)[0]) if host else ""


def recall(ranks: Sequence[str]) -> KnownLink | None:
    """The link between such ranks, if it was measured within a day. ranks: as each is described."""
    key = _digest(ranks)
    return next((each for each in reversed(_read()) if each.ranks == key), None)


def remember(ranks: Sequence[str], latency_s: float, bandwidth_bytes_per_s: float) -> None:
    """Keeps what was measured now, if that is possible."""
    key = _digest(ranks)
    kept = [each for each in _read() if each.ranks != key][1 - MOST_LINKS :]
    kept.append(KnownLink(key, time.time(), latency_s, bandwidth_bytes_per_s))
    with suppress(*UNREADABLE):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(_File(VERSION, kept)))


def _read() -> list[KnownLink]:
    """Those of the last day, as they were measured."""
    try:
        file = decoded(read_bytes(_path(), MOST_BYTES), _File)
    except UNREADABLE:
        return []
    now_s = time.time()
    is_ours = file.version == VERSION
    return [each for each in file.links if is_ours and 0 <= now_s - each.measured_at_s < MOST_AGE_S]


def _path() -> Path:
    return cache_folder() / NAME


def _digest(ranks: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()
