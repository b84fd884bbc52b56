"""Faults are told in one line, survive their way as JSON, and are kept the best known first."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from firecaffe import errors
from firecaffe.cluster.agent import HOPELESS
from firecaffe.cluster.lost_ranks import TOGETHER
from firecaffe.errors import FirecaffeError, PeerLostError
from firecaffe.faults import GOES_ON, KINDS, MAX_TEXT, RESTARTS, RESUME, Fault
from firecaffe.resume_advice import command_wording, replaced
from firecaffe.runs.fault import NAME, fault_of, settle_fault, with_can_resume, write_fault

faults = st.builds(
    Fault,
    kind=st.sampled_from(sorted(KINDS)),
    rank=st.integers(0, 1 << 20),
    host=st.text(max_size=100),
    step=st.integers(0, 1 << 40),
    seen=st.text(max_size=100),
    can_resume=st.booleans(),
    detail=st.text(max_size=100),
)


@given(faults)
@example(Fault("killed", 0, "a", 1, "its launcher", "x" * (MAX_TEXT + 1)))
def test_a_fault_comes_back_from_its_text(fault: Fault) -> None:
    back = Fault.parse(fault.as_text())
    assert back == replace(fault, detail=fault.detail[:MAX_TEXT])
    assert "\n" not in fault.as_text()


@given(faults, st.data())
def test_a_damaged_text_is_a_fault_or_refused(fault: Fault, data: st.DataObject) -> None:
    text = bytearray(fault.as_text().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(text)))
    try:
        found = Fault.parse(bytes(text[:cut]).decode(errors="replace"))
    except ValueError:
        return
    assert found.kind in KINDS


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", '"x"', "[" * 100_000, '{"kind": "frozen"}', json.dumps({"kind": []})],
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no fault"):
        Fault.parse(text)


def test_a_fault_is_one_line_that_advises_by_where_the_user_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = Fault("killed", 1, "node-a", 40, "its launcher", "SIGKILL")
    event = "rank 1 on node-a was killed at step 40: SIGKILL (seen by its launcher)"
    advice = "resume from the newest checkpoint"
    assert fault.event == event
    assert fault.line == f"{event}; {advice} (resume=…)"
    with command_wording():
        assert fault.line == f"{event}; {advice} (--resume), or let --max-restarts do so"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun's")
    assert fault.line == f"{event}; {advice} (resume=…), or let max_restarts do so"
    error = PeerLostError.of(fault)
    assert (error.rank, error.host, error.step, error.kind) == (1, "node-a", 40, "killed")
    assert error.exit_code == 10
    assert "before the first step" in Fault("gone", 1, "a", 0, "rank 0").line
    settings = {"model.name": "a.py:net", "data.name": "a.py:sets"}
    assert replaced(settings) == f"replace={settings}"
    with command_wording():
        assert replaced(settings) == "--model.name a.py:net --data.name a.py:sets"


@pytest.mark.parametrize("kind", [kind for kind, row in KINDS.items() if RESUME in row.advice])
def test_it_is_resumed_only_from_a_checkpoint_that_is_there(kind: str, tmp_path: Path) -> None:
    fault = Fault(kind, 0, "a", 5, "itself", "what is wrong")
    (tmp_path / "checkpoints").mkdir()
    assert "resume" not in settle_fault(tmp_path, fault, "the run ended").line
    assert ("can_resume", False) in read(tmp_path).items()
    assert with_can_resume(None, fault).can_resume is False  # a rank that has made no folder yet
    assert with_can_resume(tmp_path / "of another host", fault) == fault
    (tmp_path / "own folder of a host").mkdir()  # the checkpoints are on that of rank 0
    assert with_can_resume(tmp_path / "own folder of a host", fault) == fault
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    line = settle_fault(tmp_path, fault, "the run ended").line
    assert f'(resume="{tmp_path}")' in line
    assert "itself" not in line
    with command_wording():
        assert f"(--resume {tmp_path})" in settle_fault(tmp_path, fault, "the run ended").line


def of_error(error: Exception) -> Fault:
    fault = fault_of(error, 0, "host", 1)
    assert fault is not None
    return fault


def test_a_fault_has_the_code_of_the_error_that_it_is() -> None:
    classes = [v for v in vars(errors).values() if isinstance(v, type)]
    for cls in classes:
        if issubclass(cls, FirecaffeError) and cls not in (FirecaffeError, PeerLostError):
            assert of_error(cls("words")).exit_code == cls.exit_code
            assert "traceback" not in of_error(cls("words")).line
    assert of_error(MemoryError()).kind == "out_of_memory"
    assert of_error(RuntimeError("x: can't allocate memory")).kind == "out_of_memory"
    assert of_error(KeyError("x")).detail == "KeyError: 'x'"


def test_a_lost_peer_of_whom_nobody_knows_is_no_fault_of_this_rank() -> None:
    assert fault_of(PeerLostError("another rank went away"), 0, "host", 1) is None
    lost = Fault("frozen", 1, "a", 5, "rank 0")
    assert fault_of(PeerLostError.of(lost), 0, "host", 1) == lost


def read(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / NAME).read_text())
    return value


def test_a_fault_is_written_before_the_earlier_ones(tmp_path: Path) -> None:
    write_fault(tmp_path, Fault("gone", 1, "a", 5, "rank 0: its connection closed"))
    better = Fault("killed", 1, "a", 6, "its launcher", "SIGKILL")
    write_fault(tmp_path, better, "restart 1 of 2")  # the same event, known better
    assert (read(tmp_path)["kind"], read(tmp_path)["earlier"]) == ("killed", [])
    # On the next attempt at the same step: a launcher has told the first one already.
    write_fault(tmp_path, Fault("frozen", 1, "a", 6, "rank 0"), "restart 2 of 2")
    row = read(tmp_path)
    assert (row["kind"], row["then"]) == ("frozen", "restart 2 of 2")
    assert [earlier["kind"] for earlier in row["earlier"]] == ["killed"]


@pytest.mark.parametrize(
    ("reported", "kept", "earlier"),
    [
        # Who saw a connection close knows no better.
        (
            [("killed", 1, 6), ("gone", 2, 7), ("gone", 1, 9), ("killed", 2, 6)],
            ("killed", 2, 7),
            [("killed", 1)],
        ),
        # What a rank reports, and others steps later, is one fault.
        ([("exception", 3, 5), ("exception", 3, 9)], ("exception", 3, 9), []),
    ],
)
def test_a_fault_is_one_row_whoever_reports_it(
    tmp_path: Path, reported: list[Any], kept: tuple[str, int, int], earlier: list[Any]
) -> None:
    for kind, rank, step in reported:
        write_fault(tmp_path, Fault(kind, rank, "a", step, "rank 0", "seen"), GOES_ON)
    row = read(tmp_path)
    assert (row["kind"], row["rank"], row["step"]) == kept
    assert [(other["kind"], other["rank"]) for other in row["earlier"]] == earlier


@pytest.mark.parametrize("content", ["", "null", "[]", '{"rank": 1}', '{"earlier": 3}', "\x00"])
def test_a_damaged_record_of_faults_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / NAME).write_text(content)
    write_fault(tmp_path, Fault("gone", 1, "a", 5, "rank 0"))
    assert read(tmp_path)["kind"] == "gone"


def test_a_launcher_takes_the_step_from_the_ranks_own_record(tmp_path: Path) -> None:
    (tmp_path / "timings").mkdir()
    rows = '{"step": 1}\n{"step": 2}\n{"st'
    (tmp_path / "timings" / "rank-1.jsonl").write_text(rows)
    fault = Fault("killed", 1, "a", 0, "its launcher", "SIGKILL")
    assert settle_fault(tmp_path, fault, "the run ended").step == 3
    assert read(tmp_path)["step"] == 3
    assert settle_fault(None, fault, "the run ended") == fault


def test_a_restart_is_offered_for_what_is_restarted() -> None:
    """A launcher restarts nothing that would end so again; see cluster.agent."""
    offered = {kind for kind, row in KINDS.items() if RESTARTS in row.advice}
    hopeless = {kind for kind, row in KINDS.items() if row.exit_code in HOPELESS | TOGETHER}
    assert offered
    assert {"data", "checkpoint", "preempted", "not_finite"} <= hopeless
    assert not offered & hopeless


def test_a_fault_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fault = Fault("checkpoint", 0, "a", 5, "itself", "not saved")
    monkeypatch.setattr("firecaffe.runs.fault.write_json", full)
    settled = settle_fault(tmp_path, fault, "the run ended")
    assert str(tmp_path / NAME) in settled.line
    assert "No space left" in settled.line
    assert settle_fault(tmp_path, settled, "the run ended") == settled  # once
