"""Links that are remembered: for a day, for the same ranks; whatever else lies there is no link."""

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from firecaffe.transport import link as link_module
from firecaffe.transport.link import MAX_LINKS, NAME, described, recall, remember

RANKS = ["a", "b"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def file_in(home: Path) -> Path:
    return home / ".cache" / "firecaffe" / NAME


def test_the_newest_link_of_the_same_ranks_counts(home: Path) -> None:
    assert recall(RANKS) is None
    remember(RANKS, 50e-6, 12.5e6)
    remember(["a", "c"], 60e-6, 125e6)
    remember(RANKS, 40e-6, 250e6)
    known = recall(RANKS)
    assert known is not None
    assert (known.latency_s, known.bandwidth_bytes_per_s) == (40e-6, 250e6)
    for others in (["b", "a"], ["a"], ["a", "b", "b"], ["ab"], []):
        assert recall(others) is None
    assert [path.name for path in file_in(home).parent.iterdir()] == [NAME]
    assert len(json.loads(file_in(home).read_text())["links"]) == 2


@pytest.mark.parametrize(("hours", "is_known"), [(23.9, True), (24.1, False), (-1, False)])
def test_a_link_is_known_for_a_day(
    home: Path, monkeypatch: pytest.MonkeyPatch, hours: float, is_known: bool
) -> None:
    """Nor does one count that a clock which was put back has measured in the future."""
    now_s = 1.8e9
    monkeypatch.setattr(time, "time", lambda: now_s)
    remember(RANKS, 50e-6, 12.5e6)
    monkeypatch.setattr(time, "time", lambda: now_s + 3600 * hours)
    assert (recall(RANKS) is not None) == is_known
    remember(["c"], 50e-6, 12.5e6)
    kept = json.loads(file_in(home).read_text())["links"]
    assert len(kept) == 1 + is_known


def foreign(**words: object) -> str:
    """A file with one link of ours, some of whose words are others."""
    link = {"ranks": link_module._digest(RANKS), "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e8}
    link |= {"measured_at_s": time.time(), **words}
    return json.dumps({"version": link_module.VERSION, "links": [link]})


DAMAGED = {
    "empty": "",
    "cut short": foreign()[:-9],
    "another file": '{"name": "fashion-mnist"}',
    "a list": "[]",
    "text": foreign(latency_s="1e-5"),
    "no rate": foreign(bandwidth_bytes_per_s=0),
    "below zero": foreign(latency_s=-1e-5),
    "another version": foreign().replace('"version": 1', '"version": 2'),
    "nested": "[" * 100_000,
    "no UTF-8": "\udcff",
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_or_foreign_file_is_measured_again_and_written_anew(
    home: Path, text: str
) -> None:
    file = file_in(home)
    file.parent.mkdir(parents=True)
    file.write_text(foreign())
    assert recall(RANKS) is not None
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert recall(RANKS) is None
    remember(RANKS, 50e-6, 12.5e6)
    assert recall(RANKS) is not None


def test_a_home_that_takes_nothing_costs_the_memory_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".cache").write_text("")  # no folder: root may write anywhere else
    remember(RANKS, 50e-6, 12.5e6)
    assert recall(RANKS) is None
    (home / ".cache").unlink()
    file_in(home).parent.mkdir(parents=True)
    os.mkfifo(file_in(home))  # nobody waits for it, nor is it replaced
    remember(RANKS, 50e-6, 12.5e6)
    assert recall(RANKS) is None
    assert file_in(home).is_fifo()

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    remember(RANKS, 50e-6, 12.5e6)
    assert recall(RANKS) is None


def test_the_file_does_not_grow_without_end(home: Path) -> None:
    """Containers have another name each time."""
    remember(RANKS, 50e-6, 12.5e6)
    file = json.loads(file_in(home).read_text())
    file["links"] = [{**file["links"][0], "ranks": str(number)} for number in range(MAX_LINKS)]
    file_in(home).write_text(json.dumps(file, indent=2))
    remember(RANKS, 50e-6, 12.5e6)
    kept = json.loads(file_in(home).read_text())["links"]
    assert len(kept) == MAX_LINKS
    assert kept[0]["ranks"] == "1"
    assert recall(RANKS) is not None


def test_what_decides_a_link_is_in_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = {described(*of) for of in (("cpu", "a0"), ("cpu", "b0"), ("cuda", "a0"))}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none")
    found |= {described("cpu", "a0")}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found |= {described("cpu", "a0")}
    assert len(found) == 5
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # of nobody: the way out is asked for alone
    assert json.loads(described("cpu", "a0"))[2] in psutil.net_if_addrs()
