"""Files of tests are handed out the longest first."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.order import FOLDER, LONGEST, in_order, processes, slowest


def test_what_is_listed_is_there_once() -> None:
    assert [name for name in LONGEST if not (FOLDER / name).is_file()] == []
    assert len(LONGEST) == len(set(LONGEST))


def test_the_longest_come_first_and_others_stay_as_they_were() -> None:
    def item(name: str, number: int) -> Any:
        return SimpleNamespace(path=FOLDER / name, number=number)

    other, second, first = Path("unit/test_words.py"), LONGEST[1], LONGEST[0]
    names = [str(other), second, first, second, "unit/test_a.py"]
    found: list[Any] = in_order([item(name, number) for number, name in enumerate(names)])
    assert [each.number for each in found] == [2, 1, 3, 0, 4]


def test_as_many_processes_as_this_one_may_have_cores_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 2), (2, 4), (64, 8)):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert processes() == expected


def test_what_a_file_took_is_that_of_its_tests() -> None:
    parts: list[Any] = [
        SimpleNamespace(location=(name, 1, ""), duration=taken)
        for name, taken in (("a.py", 1.0), ("b.py", 2.5), ("a.py", 2.0))
    ]
    assert [line.split() for line in slowest(parts)] == [["3", "s", "a.py"], ["2", "s", "b.py"]]
