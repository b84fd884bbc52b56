"""What else went on, from a /proc of our own."""

import dataclasses
from collections import namedtuple
from pathlib import Path

import pytest

from firecaffe.measure.exchange_times import conditions_since, read_counters

SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm OutSegs RetransSegs InErrs
Tcp: 1 1000 {retransmitted} 0
"""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/snmp").write_text(SNMP.format(retransmitted=7))
    (tmp_path / "sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "sys/net/ipv4/tcp_congestion_control").write_text("reno\n")
    return tmp_path


def test_congestion_control_and_segments_sent_again(proc: Path) -> None:
    before = read_counters(proc)
    assert before.retransmitted_segments == 7
    (proc / "net/snmp").write_text(SNMP.format(retransmitted=19))
    found = conditions_since(before, proc)
    assert (found.congestion_control, found.retransmitted_segments) == ("reno", 12)


def test_shares_of_processor_time(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_counters(proc)
    after = dataclasses.replace(
        before,
        total_cpu_s=before.total_cpu_s + 10,
        busy_cpu_s=before.busy_cpu_s + 5,
        process_cpu_s=before.process_cpu_s + 2,
    )
    monkeypatch.setattr("firecaffe.measure.exchange_times.read_counters", lambda _: after)
    found = conditions_since(before, proc)
    assert found.cpu_busy_share == pytest.approx(0.5)
    assert found.process_cpu_share == pytest.approx(0.2)


def test_idle_is_who_waits_for_a_disk_and_a_guest_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = namedtuple("times", "user nice system idle iowait irq softirq steal guest guest_nice")
    monkeypatch.setattr("psutil.cpu_times", lambda: times(30, 2, 10, 100, 20, 1, 4, 3, 5, 0))
    found = read_counters()
    assert (found.busy_cpu_s, found.total_cpu_s) == (50, 170)


@pytest.mark.parametrize("text", [None, "", "Tcp: RtoAlgorithm\nTcp: 1\n"])
def test_what_the_system_does_not_tell_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "net").mkdir()
        (tmp_path / "net/snmp").write_text(text)
    before = read_counters(tmp_path)
    assert before.retransmitted_segments is None
    found = conditions_since(before, tmp_path)
    assert (found.congestion_control, found.retransmitted_segments) == (None, None)
