"""events.jsonl: what is written is read, and any damage is refused with its line."""

import dataclasses
import os
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from firecaffe.errors import RunError
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event
from firecaffe.synchrony.log import Lines, LogReader, head
from firecaffe.synchrony.server_policies import BackupAgain, Leaves
from tests.unit.synchrony.drive import LEAVES, POLICIES, drive, pushes, some_events, write_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def read_on(log: Path, leaves: Leaves | None) -> None:
    reader = LogReader(log)
    if leaves is not None:
        reader.expect(leaves)
    while True:
        reader.next()


def refused(log: Path, said: str, data: bytes | None = None, leaves: Leaves | None = None) -> None:
    if data is not None:
        log.write_bytes(data)
    with pytest.raises(RunError, match=said):
        read_on(log, leaves)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_written_is_read(name: str, log: Path) -> None:
    events = some_events(name, faults=6)
    write_log(log, events)
    reader = LogReader(log)
    assert [reader.next() for _ in events] == events


def test_damage_is_refused_with_its_line(log: Path) -> None:
    whole, random = write_log(log, some_events(faults=6)), Random(0)
    for _ in range(300):
        place = random.randrange(len(whole))
        byte = random.choice([byte for byte in range(256) if byte != whole[place]])
        line = whole[:place].count(b"\n") + 1
        # A line end that is gone, or new, is seen in the line that it makes.
        said = rf"events\.jsonl line {line}: (?!is not there)"
        refused(log, said, whole[:place] + bytes([byte]) + whole[place + 1 :])
    for length in range(0, len(whole), 97):
        line = whole[:length].count(b"\n") + 1
        refused(log, rf"line {line}: (is cut off|is not there)", whole[:length])
    lines = whole.splitlines(keepends=True)
    gone, twice = lines[:5] + lines[6:], [*lines[:6], lines[5], *lines[6:]]
    for changed in (gone, twice, [*lines[:5], lines[6], lines[5], *lines[7:]]):
        refused(log, r"line [67]: is not what was written", b"".join(changed))


def impossible() -> list[tuple[str, list[Event]]]:
    """Events that no run could have brought about, each line of them well-formed."""
    events = some_events()
    first, second = (events.index(push) for push in pushes(events)[:2])
    again = drive(
        lambda queue: BackupAgain(queue, 4, 2, SynchronyConfig(backup_workers=1)),
        lambda count: count - 1,
    )
    late = next(push for push in pushes(again) if not push.counts)
    push = next(push for push in pushes(again) if push.update is not None)
    assert push.update is not None
    twice = replace(push.update, again=push.update.again * 2)
    return [
        ("counts, and came too late", [*again[: again.index(late)], replace(late, counts=True)]),
        ("nobody has it", [*again[: again.index(push)], replace(push, update=twice)]),
        ("version 4 is made, after 2", [*events[:first], *events[second:]]),
        ("brings leaf 0 of step 2|brings leaf 1|is handed out", events[1:]),
        ("handed out again|has work already", [*events[:1], *events[:1]]),
        ("which it has not", [*events[: first + 1], events[first]]),
        ("s after", [*events[: first + 1], replace(events[first + 1], time_s=-1.0)]),
    ]


@pytest.mark.parametrize(("reason", "events"), impossible(), ids=lambda value: str(value)[:20])
def test_what_could_not_have_happened(reason: str, events: list[Event], log: Path) -> None:
    refused(log, rf"line \d+: .*({reason})", write_log(log, events))


def test_what_is_no_log(log: Path) -> None:
    refused(log, "No such file")
    for text in ("", "{}\n", "[1]\n", '{"event": "begin"}\n', "[" * 100_000 + "\n"):
        refused(log, "line 1: ", text.encode())
    log.unlink()
    os.mkfifo(log)
    refused(log, "is no regular file")


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
def test_each_word_of_an_event_has_its_type(row: dict[str, object], said: str, log: Path) -> None:
    lines = Lines()
    refused(log, rf"line 2: .*{said}", lines.line(head(2, 3)) + lines.line(row))


def test_a_leaf_of_another_training_is_refused(log: Path) -> None:
    """As of a recipe with larger micro-batches, of which a step has fewer."""
    larger = dataclasses.replace(LEAVES, per_step=1, per_epoch=3)
    data = write_log(log, some_events(faults=6))
    refused(log, r"line \d+: the training has no leaf 1 of step 2", data, larger)
