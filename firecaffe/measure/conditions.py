"""The conditions of a measurement: the load of the host's processors, and its TCP."""

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC = Path("/proc")


@dataclass(frozen=True)
class Counters:
    total_cpu_s: float
    busy_cpu_s: float
    process_cpu_s: float
    retransmitted_segments: int | None


@dataclass(frozen=True)
class Conditions:
    """A host's conditions between two moments; shares are of all its processors."""

    congestion_control: str | None
    cpu_busy_share: float
    process_cpu_share: float
    retransmitted_segments: int | None


def read_counters(proc: Path = PROC) -> Counters:
    cpu = psutil.cpu_times()
    # User time already includes a guest's time.
    total_s = sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0)
    idle_s = cpu.idle + getattr(cpu, "iowait", 0.0)
    return Counters(total_s, total_s - idle_s, time.process_time(), _retransmitted(proc))


def conditions_since(before: Counters, proc: Path = PROC) -> Conditions:
    after = read_counters(proc)
    # The system counts in ticks of 10 ms, so the difference may be 0.
    total_s = max(after.total_cpu_s - before.total_cpu_s, 0.01)
    sent = (before.retransmitted_segments, after.retransmitted_segments)
    return Conditions(
        congestion_control=_read(proc / "sys/net/ipv4/tcp_congestion_control"),
        cpu_busy_share=(after.busy_cpu_s - before.busy_cpu_s) / total_s,
        process_cpu_share=(after.process_cpu_s - before.process_cpu_s) / total_s,
        retransmitted_segments=None if sent[0] is None or sent[1] is None else sent[1] - sent[0],
    )


def _retransmitted(proc: Path) -> int | None:
    lines = [
        line.split() for line in (_read(proc / "net/snmp") or "").splitlines() if line[:4] == "Tcp:"
    ]
    if len(lines) != 2 or "RetransSegs" not in lines[0]:
        return None
    return int(lines[1][lines[0].index("RetransSegs")])


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
