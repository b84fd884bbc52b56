"""`starts`: its two networks are one, and its page has medians of the pairs' ratios."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks.training import as_typed_ddp, starts, starts_ddp
from benchmarks.training.starts import MOST, check_network, page, timed

RECORD = {
    "ours": {"wall_s": [6.0, 8.0, 9.0], "core_s": [6.0, 8.0, 10.0]},
    "ddp": {"wall_s": [5.0, 5.0, 10.0], "core_s": [5.0, 5.0, 5.0]},
    "on": "a processor",
    "commit": "c1",
}


def test_the_bare_scripts_network_is_nin_small(monkeypatch: pytest.MonkeyPatch) -> None:
    check_network()
    monkeypatch.setattr(starts, "build_model", lambda name: starts_ddp.network()[:-3])
    with pytest.raises(SystemExit, match="nin_small"):
        check_network()


def test_the_bare_script_loads_nothing_of_firecaffe() -> None:
    for module in (starts_ddp, as_typed_ddp):
        source = Path(str(module.__file__)).read_text("utf-8")
        assert re.findall(r"^ *(?:from|import) firecaffe", source, re.M) == []


def test_a_page_has_medians_of_pairs() -> None:
    (row,) = (line for line in page(RECORD).splitlines() if line.startswith("| wall-clock"))
    assert "| 3 | 5.00 | 5.00 to 10.00 | 8.00 | 6.00 to 9.00 | 1.20 | 0.90 to 1.60 |" in row
    assert re.findall(r"(reached|missed)", page(RECORD)) == ["reached", "missed"]
    assert f"at most {MOST}" in page(RECORD)
    assert "a processor, commit c1." in page(RECORD)


def test_core_seconds_are_those_of_a_commands_children_too() -> None:
    spin = "import time\nwhile time.process_time() < 0.2: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    took = timed([sys.executable, "-c", child])
    assert took.core_s >= 0.2
    assert took.wall_s > 0


def test_a_command_that_fails_ends_the_measurement() -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        timed([sys.executable, "-c", "raise SystemExit(3)"])
