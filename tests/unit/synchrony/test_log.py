"""events.jsonl: what is written is read, and any damage is refused with its line."""

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from firecaffe.errors import RunError
from firecaffe.synchrony.events import Event, Push
from firecaffe.synchrony.leaf_queue import Leaves
from firecaffe.synchrony.log import Ledger, Lines, LogReader, head
from firecaffe.synchrony.server_policies import Asynchronous, BackupAgain
from tests.unit.synchrony.drive import LEAVES, drive
from tests.unit.synchrony.test_policies import POLICIES


def some_events(name: str = "asynchronous") -> list[Event]:
    return drive(POLICIES[name], Random(5).randrange, faults=6)


def write(path: Path, events: list[Event]) -> None:
    lines = Lines()
    path.write_bytes(b"".join([lines.line(head(2, 3)), *map(lines.event, events)]))


def read(path: Path, count: int) -> list[Event]:
    reader = LogReader(path)
    return [reader.next() for _ in range(count)]


def read_on(path: Path, leaves: Leaves | None = None) -> None:
    """Reads until an error."""
    reader = LogReader(path)
    if leaves is not None:
        reader.expect(leaves)
    while True:
        reader.next()


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, some_events(name))
    assert read(path, len(some_events(name))) == some_events(name)


def test_a_changed_byte_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, some_events())
    whole, random = path.read_bytes(), Random(0)
    for _ in range(300):
        place = random.randrange(len(whole))
        byte = random.choice([each for each in range(256) if each != whole[place]])
        path.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
        line = whole[:place].count(b"\n") + 1
        # A line end that is gone, or new, is seen in the line that it makes.
        with pytest.raises(RunError, match=rf"events\.jsonl line {line}: (?!is not there)"):
            read_on(path)


def test_a_log_that_was_cut_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, some_events())
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        line = whole[:length].count(b"\n") + 1
        with pytest.raises(RunError, match=rf"line {line}: (is cut off|is not there)"):
            read_on(path)


def test_lines_that_are_gone_twice_or_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, some_events())
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (
        lines[:5] + lines[6:],
        [*lines[:6], lines[5], *lines[6:]],
        [*lines[:5], lines[6], lines[5], *lines[7:]],
    ):
        path.write_bytes(b"".join(changed))
        with pytest.raises(RunError, match=r"line [67]: is not what was written"):
            read_on(path)


def impossible() -> list[tuple[str, list[Event]]]:
    """Events that no run could have brought about, each line of them well-formed."""
    policy = POLICIES["asynchronous"]
    events = drive(policy, Random(5).randrange)
    pushes = [place for place, each in enumerate(events) if isinstance(each, Push)]
    first, second = pushes[:2]
    again = drive(lambda queue: BackupAgain(queue, 4, 2, 1), lambda count: count - 1)
    brought = [(place, each) for place, each in enumerate(again) if isinstance(each, Push)]
    place, late = next((place, each) for place, each in brought if not each.counts)
    at, push = next((place, each) for place, each in brought if each.update is not None)
    assert push.update is not None
    twice = replace(push.update, again=push.update.again * 2)
    return [
        ("counts, and came too late", [*again[:place], replace(late, counts=True)]),
        ("nobody has it", [*again[:at], replace(push, update=twice)]),
        ("version 4 is made, after 2", [*events[:first], *events[second:]]),
        ("brings leaf 0 of step 2|brings leaf 1|is handed out", events[1:]),
        ("handed out again|has work already", [*events[:1], *events[:1]]),
        ("which it has not", [*events[: first + 1], events[first]]),
        ("s after", [*events[: first + 1], replace(events[first + 1], time_s=-1.0)]),
    ]


@pytest.mark.parametrize(("reason", "events"), impossible(), ids=lambda each: str(each)[:20])
def test_what_could_not_have_happened(reason: str, events: list[Event], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, events)
    with pytest.raises(RunError, match=rf"line \d+: .*({reason})"):
        read_on(path)


def test_what_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(RunError, match="No such file"):
        LogReader(path)
    for text in ("", "{}\n", "[1]\n", '{"event": "begin"}\n', "[" * 100_000 + "\n"):
        path.write_text(text)
        with pytest.raises(RunError, match="line 1: "):
            LogReader(path)


PULL = {"event": "pull", "time_s": 0.5, "work": [0, 2, 0, 2]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**PULL, "event": "rest"}, "no event 'rest'"),
        ({**PULL, "event": ["pull"]}, "no event"),
        ({**PULL, "time_s": "0.5"}, r"\$\.time_s: expected float, got str"),
        ({**PULL, "work": [0, 2, 0]}, r"\$\.work: expected array of length 4"),
        ({**PULL, "work": [0, 2, -1, 2]}, r"\$\.work\[2\]: expected int >= 0, found -1"),
        ({**PULL, "event": "push"}, "missing required field counts"),
        ({**PULL, "event": "push", "counts": 1, "update": None}, r"\$\.counts: expected bool"),
        ({"event": "lose", "time_s": 1, "learner": 0.5}, r"\$\.learner: expected int"),
    ],
)
def test_each_word_of_an_event_has_its_type(
    row: dict[str, object], said: str, tmp_path: Path
) -> None:
    lines = Lines()
    (tmp_path / "events.jsonl").write_bytes(lines.line(head(2, 3)) + lines.line(row))
    with pytest.raises(RunError, match=rf"line 2: .*{said}"):
        read_on(tmp_path / "events.jsonl")


def test_a_log_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(RunError, match="is no regular file"):
        LogReader(tmp_path / "events.jsonl")


def test_a_leaf_of_another_training_is_refused(tmp_path: Path) -> None:
    """As of a recipe with larger micro-batches, of which a step has fewer."""
    write(tmp_path / "events.jsonl", some_events())
    larger = replace(LEAVES, per_step=1, per_epoch=3)
    with pytest.raises(RunError, match=r"line \d+: the training has no leaf 1 of step 2"):
        read_on(tmp_path / "events.jsonl", larger)


def test_the_ledger_takes_what_a_policy_does() -> None:
    ledger = Ledger(2)
    for event in drive(lambda q: Asynchronous(q, 5, 2, 4), Random(9).randrange):
        ledger.take(event)
