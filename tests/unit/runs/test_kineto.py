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


def test_a_trace_is_read_by_what_covers_what(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#3", 0, 1000, "user_annotation"),
        event("enumerate(DataLoader)#_Iter.__next__", 0, 100, "user_annotation"),
        event("aten::copy_", 10, 90),
        event("aten::conv2d", 100, 500),
        event("aten::conv2d", 300, 600),
        event("gloo:all_reduce", 500, 800, "user_annotation"),
        event("Optimizer.step#SGD.step", 800, 900, "user_annotation"),
        event("aten::add_", 810, 890),
    ]
    path = trace(tmp_path / "trace.json", events, rank=5)
    assert is_trace(path)
    rank, rows = read_trace(path)
    assert rank == 5
    (found,) = rows
    assert found["step"] == 3
    expected = {
        "data_s": 100e-6,
        "compute_s": 500e-6,
        "exchange_s": 300e-6,
        "exposed_communication_s": 200e-6,
        "update_s": 100e-6,
        "step_s": 1000e-6,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_on_a_gpu_kernels_count_and_not_their_launches(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#0", 0, 1000, "user_annotation"),
        event("aten::conv2d", 0, 900),
        event("sm90_xmma_fprop", 100, 500, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400, 700, "kernel"),
    ]
    _, (found,) = read_trace(trace(tmp_path / "gpu.json", events))
    assert found["compute_s"] == pytest.approx(400e-6)
    assert found["exposed_communication_s"] == pytest.approx(200e-6)


def test_a_gpu_works_on_while_the_cpu_fetches(tmp_path: Path) -> None:
    events = [
        event("ProfilerStep#0", 0, 1000, "user_annotation"),
        event("enumerate(DataLoader)#_Iter.__next__", 0, 300, "user_annotation"),
        event("Optimizer.step#SGD.step", 800, 900, "user_annotation"),
        event("Optimizer.step#SGD.step", 980, 1000, "gpu_user_annotation"),
        event("sm90_xmma_fprop", 0, 980, "kernel"),
        event("multi_tensor_apply", 980, 1000, "kernel"),
    ]
    _, (found,) = read_trace(trace(tmp_path / "gpu.json", events))
    expected = {"data_s": 0.0, "compute_s": 980e-6, "update_s": 20e-6}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_without_marks_a_step_is_what_lies_between_two_updates(tmp_path: Path) -> None:
    events = [event("Optimizer.step#SGD.step", t, t + 10, "user_annotation") for t in (90, 190)]
    _, (found,) = read_trace(trace(tmp_path / "plain.json", events))
    assert found["step_s"] == pytest.approx(100e-6)


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
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(RunError, match=rf"bad.json: .*({said})"):
        read_trace(path)
    packed = tmp_path / "bad.json.gz"
    packed.write_bytes(gzip.compress(content.encode()))
    with pytest.raises(RunError, match=rf"bad.json.gz: .*({said})"):
        read_trace(packed)


def test_a_trace_is_regular_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(RunError, match=r"pipe.json: .*no regular file"):
        read_trace(tmp_path / "pipe.json")
    monkeypatch.setattr(kineto, "MOST_BYTES", 5_000_000)
    long = json.dumps({"traceEvents": [], "filler": "x" * 5_000_000}).encode()
    for name, data in (("a.json", long), ("b.json.gz", gzip.compress(long))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RunError, match=f"{name}: .*longer than 5000000 bytes"):
            read_trace(tmp_path / name)
    cut = gzip.compress(long)
    for name, data in (("cut.json.gz", cut[:-20]), ("bad.json.gz", cut[:30] + b"xx" + cut[32:])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(RunError, match=rf"{name}: "):
            read_trace(tmp_path / name)


def test_a_long_trace_is_read_in_one_go(tmp_path: Path) -> None:
    """Each step looks at what is in it alone: all by all these would be 10 billion pairs."""
    works = [event("aten::mm", t, t + 0.5) for t in range(100_000)]
    talks = [event("gloo:all_reduce", t + 0.25, t + 0.75) for t in range(100_000)]
    ends = [(n * 50_000, (n + 1) * 50_000) for n in range(2)]
    steps = [event(f"ProfilerStep#{n}", *each, "mark") for n, each in enumerate(ends)]
    unseen = [{**event("aten::mm", 7, 9), "dur": -1}]
    path = trace(tmp_path / "a.json", [*works, *talks, *steps, *unseen])
    _, rows = read_trace(path)
    for found in rows:
        assert found["compute_s"] == pytest.approx(25_000e-6)
        assert found["exposed_communication_s"] == pytest.approx(12_500e-6)
