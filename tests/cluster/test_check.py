"""`firecaffe check` on emulated hosts: a slow link is named, the file says what links carry."""

import json
from pathlib import Path
from typing import Any

import pytest

from firecaffe.planner.cluster import load_cluster
from tests.typed import python

RATE = 200_000_000
"""Bits a second, which one core carries for all hosts with other work beside."""
PAYLOAD = 1448 / 1514

CHECK = """
import sys
from benchmarks.emulated.virtual_cluster import VirtualCluster
hosts, rate, slow_rate, *words = sys.argv[1:]
with VirtualCluster(int(hosts), int(rate)) as net:
    net.set_rate(2, int(slow_rate))
    check = [sys.executable, "-m", "firecaffe", "check", "--json", *words]
    print(net.run(check, timeout_s=600.0))
"""


def check(hosts: int, slow_rate: int, folder: Path) -> Any:
    """What is found where host 2's link has another rate. In a process: see `tests.typed`."""
    words = ("--write", folder / "found.toml", "--folder", folder)
    done = python("-c", CHECK, hosts, RATE, slow_rate, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.alone
@pytest.mark.usefixtures("can_emulate")
def test_a_slow_link_is_named_and_the_others_rate_is_written(tmp_path: Path) -> None:
    found = check(4, RATE // 2, tmp_path)
    assert len(found["links"]) == 6
    (said,) = [line for line in found["findings"] if line.startswith("slow link")]
    assert "that of rank 2 on" in said
    (link,) = load_cluster(str(tmp_path / "found.toml")).links
    # Half of the pairs are slow; the median lies between, at most at what a whole link carries.
    assert link.bandwidth_bytes_per_s <= 1.1 * RATE / 8 * PAYLOAD


@pytest.mark.alone
@pytest.mark.usefixtures("can_emulate")
def test_like_links_are_measured_alike(tmp_path: Path) -> None:
    found = check(3, RATE, tmp_path)
    # That a latency varied says something of the machine beside, and nothing of the links.
    assert not [line for line in found["findings"] if line.startswith("slow link")]
    (link,) = load_cluster(str(tmp_path / "found.toml")).links
    assert link.bandwidth_bytes_per_s == pytest.approx(RATE / 8 * PAYLOAD, rel=0.1)
    assert "ring" in link.efficiency
