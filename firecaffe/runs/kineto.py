"""Reads a trace of torch's profiler (Kineto), of any training, as timings for `explain`.

A step is a `ProfilerStep#N`, which `profiler.step()` marks under a schedule, or else the time
between the ends of two optimizer steps. Communication is the time covered by NCCL's kernels or a
backend's annotations (`nccl:…`, `gloo:…`, `mpi:…`); compute is the time covered by other kernels,
on a CPU by other operators. Communication without compute is exposed. Data and update are the times
covered by the annotations of DataLoader and optimizer.

Source: the Chrome trace event format, as `torch.profiler` exports it.
"""

import gzip
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from firecaffe.errors import RunError
from firecaffe.files import open_regular, read_bytes
from firecaffe.runs.schemas import Rank
from firecaffe.schema import Real, decoded

Interval = tuple[float, float]

SUFFIXES = (".json", ".json.gz")
STEP = re.compile(r"ProfilerStep#(\d+)")
COMMUNICATION = re.compile(r"^(nccl|gloo|mpi|ucc):|nccl(Dev)?Kernel|ncclKernel")
DATA = re.compile(r"DataLoader.*__next__|^enumerate\(DataLoader\)")
UPDATE = re.compile(r"^Optimizer\.step#")
KERNEL, OPERATOR, ON_GPU = "kernel", "cpu_op", "gpu_user_annotation"
MAX_BYTES = 1_000_000_000
"""The largest trace that is read, after decompression: some 3 million events."""


class Event(Struct):
    """The fields that are read of an event of any phase. Times are in microseconds."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: Real | None = None
    dur: Real = 0.0

    @property
    def span(self) -> Interval:
        start = self.ts or 0.0
        return start, start + self.dur


class Distributed(Struct):
    rank: Rank = 0


class Trace(Struct):
    traceEvents: list[Event]
    distributedInfo: Distributed = field(default_factory=Distributed)


def is_trace(path: Path) -> bool:
    return path.is_file() and path.name.endswith(SUFFIXES)


def read_trace(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the rank, and a row of timings for each step. Raises RunError."""
    events, rank = _load(path)
    steps = _steps(events)
    if not steps:
        raise RunError(
            f"{path}: neither a ProfilerStep nor two optimizer steps in it; profile some steps of "
            "a training"
        )
    has_gpu = any(event.cat == KERNEL for event in events)
    kind = KERNEL if has_gpu else OPERATOR
    comms = _merged_spans(e for e in events if COMMUNICATION.search(e.name))
    works = _merged_spans(
        e
        for e in events
        if e.cat == kind and not COMMUNICATION.search(e.name) and "c10d" not in e.name
    )
    fetches = _merged_spans(e for e in events if DATA.search(e.name))
    updates = _merged_spans(
        e for e in events if UPDATE.search(e.name) and (e.cat == ON_GPU) == has_gpu
    )
    rows = []
    for number, (start, stop) in steps:
        inside = (start, stop)
        update = _length(_within(updates, inside))
        work = _within(works, inside)
        comm = _within(comms, inside)
        hidden = _length(_common(comm, work))
        fetch = _within(fetches, inside)
        # A GPU continues while the CPU fetches; on a CPU fetching runs operators too.
        data = _length(fetch) - (_length(_common(fetch, work)) if has_gpu else 0.0)
        others = _length(_common(work, _within(updates, inside)))
        others += 0.0 if has_gpu else _length(_common(work, fetch))
        rows.append(
            {
                "step": number,
                "data_s": data / 1e6,
                "compute_s": (_length(work) - others) / 1e6,
                "exposed_communication_s": (_length(comm) - hidden) / 1e6,
                "exchange_s": _length(comm) / 1e6,
                "update_s": update / 1e6,
                "step_s": (stop - start) / 1e6,
            }
        )
    return rank, rows


def _steps(events: Sequence[Event]) -> list[tuple[int, Interval]]:
    marked = sorted(
        (int(match[1]), event.span)
        for event in events
        if (match := STEP.fullmatch(event.name)) and event.cat != ON_GPU and event.dur > 0
    )
    if marked:
        return marked
    ends = sorted(
        event.span[1] for event in events if UPDATE.search(event.name) and event.cat != ON_GPU
    )
    spans = [(start, stop) for start, stop in pairwise(ends) if stop > start]
    return list(enumerate(spans, start=2))


def _load(path: Path) -> tuple[list[Event], int]:
    try:
        trace = decoded(_unpacked(path), Trace)
        # An event whose end the profiler has not seen may have a time below 0.
        events = [event for event in trace.traceEvents if event.ph == "X" and event.dur >= 0]
        if any(event.ts is None for event in events):
            raise ValueError("an event has no ts")
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:
        raise RunError(f"{path}: is no trace of torch's profiler ({error})") from error
    return events, trace.distributedInfo.rank


def _unpacked(path: Path) -> bytes | bytearray:
    if not path.name.endswith(".gz"):
        return read_bytes(path, MAX_BYTES)
    data = bytearray()
    with open_regular(path) as packed, gzip.open(packed) as file:
        while part := file.read(1 << 20):
            data += part
            if len(data) > MAX_BYTES:
                raise ValueError(f"longer than {MAX_BYTES} bytes")
    return data


def _merged_spans(events: Iterable[Event]) -> list[Interval]:
    # All lists of intervals in this file are sorted and without overlaps.
    merged: list[Interval] = []
    for start, stop in sorted(event.span for event in events):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _within(intervals: Sequence[Interval], limit: Interval) -> list[Interval]:
    first = bisect_right(intervals, limit[0], key=itemgetter(1))
    last = bisect_left(intervals, limit[1], key=itemgetter(0))
    return _common(intervals[first:last], [limit])


def _common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    common, left, right = [], 0, 0
    while left < len(first) and right < len(second):
        (start, stop), (other_start, other_stop) = first[left], second[right]
        low, high = max(start, other_start), min(stop, other_stop)
        if low < high:
            common.append((low, high))
        if stop < other_stop:
            left += 1
        else:
            right += 1
    return common


def _length(intervals: Iterable[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)
