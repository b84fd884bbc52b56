"""What runs the tests: files are handed out the longest first, and a typed Python is one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.order import FOLDER, LONGEST, in_order, processes, slowest, turned
from tests.typed import python


def test_what_is_listed_is_there_once() -> None:
    assert [name for name in LONGEST if not (FOLDER / name).is_file()] == []
    assert len(LONGEST) == len(set(LONGEST))


def test_the_longest_come_first_and_others_by_name() -> None:
    def item(name: str, number: int) -> Any:
        return SimpleNamespace(path=FOLDER / name, number=number)

    other, second, first = Path("unit/test_words.py"), LONGEST[1], LONGEST[0]
    names = [str(other), second, first, second, "unit/test_a.py"]
    found: list[Any] = in_order([item(name, number) for number, name in enumerate(names)])
    assert [each.number for each in found] == [2, 1, 3, 4, 0]


def test_each_process_loads_all_files_and_begins_elsewhere(tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("test_a.py", "test_b.py", "test_c.py", "test_d.py")]
    for path in (*names, tmp_path / "other.py"):
        path.write_text("")
    found = [turned([str(tmp_path)], process, 2) for process in (0, 1)]
    assert found[0] == list(map(str, names))
    assert found[1] == list(map(str, (*names[2:], *names[:2])))
    assert turned([f"{names[0]}::test_x"], 1, 2) == [f"{names[0]}::test_x"]


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


STARTS = """
import subprocess, sys
told = ["-c", "import sys; print(*sys.argv, sys.flags.isolated)", "x"]
for words in (["-I", "-S"], ["-P"]):
    print(subprocess.check_output([sys.executable, *words, *told], text=True), end="")
"""


def test_an_isolated_python_is_one() -> None:
    """As the process is that beats beside a rank."""
    done = python("-c", STARTS)
    assert done.stdout.splitlines() == ["-c x 1", "-c x 0"], done.stderr


TRACKS = """
import subprocess, sys
asks = "from multiprocessing import resource_tracker as r; print(r._resource_tracker._fd)"
print(subprocess.check_output([sys.executable, "-P", "-c", asks], text=True), end="")
"""


def test_a_started_python_asks_nobody_s_tracker() -> None:
    """Its number was another file's by then: a probe stood in a rank's timings."""
    done = python("-c", TRACKS)
    assert done.stdout == "None\n", done.stderr
