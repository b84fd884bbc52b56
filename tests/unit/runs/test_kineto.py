"""Traces of others' profilers: a step by what covers what, and what is no trace."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from firecaffe.errors import RunError
from firecaffe.runs import kineto
from firecaffe.runs.kineto import is_trace, read_trace


def trace(path: Path, events: list[dict[str, Any]], rank: int = 0) -> Path:
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}}))
    return path


def event(name: str, start: float, stop: float, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": stop - start}


def mark(name: str, start: float, stop: float) -> dict[str, Any]:
    return event(name, start, stop, "user_annotation")


FETCH, UPDATE = "enumerate(DataLoader)#_Iter.__next__", "Optimizer.step#SGD.step"
TRACES: dict[str, tuple[list[dict[str, Any]], dict[str, float]]] = {
    "by what covers what": (
        [
            mark("ProfilerStep#3", 0, 1000),
            mark(FETCH, 0, 100),
            event("aten::copy_", 10, 90),
            event("aten::conv2d", 100, 500),
            event("aten::conv2d", 300, 600),
            mark("gloo:all_reduce", 500, 800),
            mark(UPDATE, 800, 900),
            event("aten::add_", 810, 890),
        ],
        {"data_s": 100, "compute_s": 500, "exchange_s": 300, "exposed_communication_s": 200}
        | {"update_s": 100, "step_s": 1000, "step": 3e6},
    ),
    "on a GPU kernels count and not their launches": (
        [
            mark("ProfilerStep#0", 0, 1000),
            event("aten::conv2d", 0, 900),
            event("sm90_xmma_fprop", 100, 500, "kernel"),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400, 700, "kernel"),
        ],
        {"compute_s": 400, "exposed_communication_s": 200},
    ),
    "a GPU works on while the CPU fetches": (
        [
            mark("ProfilerStep#0", 0, 1000),
            mark(FETCH, 0, 300),
            mark(UPDATE, 800, 900),
            event(UPDATE, 980, 1000, "gpu_user_annotation"),
            event("sm90_xmma_fprop", 0, 980, "kernel"),
            event("multi_tensor_apply", 980, 1000, "kernel"),
        ],
        {"data_s": 0, "compute_s": 980, "update_s": 20},
    ),
    "without marks a step is between two updates": (
        [mark(UPDATE, 90, 100), mark(UPDATE, 190, 200)],
        {"step_s": 100},
    ),
}
"""Events, and microseconds of parts of the step that they are."""


@pytest.mark.parametrize(("events", "microseconds"), TRACES.values(), ids=TRACES)
def test_a_trace_is_read(
    tmp_path: Path, events: list[dict[str, Any]], microseconds: dict[str, float]
) -> None:
    path = trace(tmp_path / "trace.json", events, rank=5)
    assert is_trace(path)
    rank, (row,) = read_trace(path)
    assert rank == 5
    assert {name: 1e6 * row[name] for name in microseconds} == pytest.approx(microseconds)


EVENTS = '{"traceEvents": [%s]}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is no JSON"),
        ("[]", "expected object, got array"),
        ("[" * 100_000, "expected object"),
        (EVENTS % '{"args": ' + "[" * 100_000, "nested too deep|is no JSON"),
        ("{}", "missing required field traceEvents"),
        ('{"traceEvents": 3}', r"\$.traceEvents: expected array, got int"),
        ('{"traceEvents": [], "distributedInfo": {"rank": -1}}', r"distributedInfo.rank: .*>= 0"),
        (EVENTS % "", "neither a ProfilerStep"),
        (EVENTS % '{"ph": "X", "name": "a"}', "an event has no ts"),
        (EVENTS % '{"ph": "X", "name": "a", "ts": "x"}', r"\$.traceEvents\[0\].ts: expected float"),
        (EVENTS % '{"ph": "X", "name": "a", "ts": 1, "dur": 1e300}', r"dur: expected float <="),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: str, said: str) -> None:
    for name, data in (
        ("bad.json", content.encode()),
        ("bad.json.gz", gzip.compress(content.encode())),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RunError, match=rf"{name}: .*({said})"):
            read_trace(tmp_path / name)


def test_a_trace_is_regular_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "MAX_BYTES", 5_000_000)
    long = json.dumps({"traceEvents": [], "filler": "x" * 5_000_000}).encode()
    packed = gzip.compress(long)
    os.mkfifo(tmp_path / "pipe.json")
    for name, data, said in (
        ("pipe.json", None, "no regular file"),
        ("a.json", long, "longer than 5000000 bytes"),
        ("b.json.gz", packed, "longer than 5000000 bytes"),
        ("cut.json.gz", packed[:-20], ""),
        ("bad.json.gz", packed[:30] + b"xx" + packed[32:], ""),
    ):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(RunError, match=f"{name}: .*{said}"):
            read_trace(tmp_path / name)


def test_a_long_trace_is_read_in_one_go(tmp_path: Path) -> None:
    """Each step looks at what is in it alone: all by all these would be 2.5 billion pairs."""
    works = [event("aten::mm", t, t + 0.5) for t in range(50_000)]
    comms = [event("gloo:all_reduce", t + 0.25, t + 0.75) for t in range(50_000)]
    steps = [event(f"ProfilerStep#{n}", n * 25_000, (n + 1) * 25_000, "mark") for n in range(2)]
    unseen = [{**event("aten::mm", 7, 9), "dur": -1}]
    _, rows = read_trace(trace(tmp_path / "a.json", [*works, *comms, *steps, *unseen]))
    for row in rows:
        assert row["compute_s"] == pytest.approx(12_500e-6)
        assert row["exposed_communication_s"] == pytest.approx(6_250e-6)
