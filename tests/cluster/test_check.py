"""`firecaffe check` on emulated hosts: a slow link is named, the file says what links carry."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.virtual_cluster import VirtualCluster
from firecaffe.plan.cluster import load_cluster

Up = Callable[..., VirtualCluster]

RATE = 1_000_000_000
PAYLOAD = 1448 / 1514


def test_a_slow_link_is_named_and_the_others_rate_is_written(cluster: Up, tmp_path: Path) -> None:
    net = cluster(4, RATE)
    net.set_rate(2, RATE // 5)
    file = tmp_path / "found.toml"
    check = [sys.executable, "-m", "firecaffe", "check", "--json", "--write", str(file)]
    found = json.loads(net.run([*check, "--folder", str(tmp_path)], timeout_s=600.0))
    assert len(found["links"]) == 6
    (said,) = [line for line in found["findings"] if line.startswith("slow link")]
    assert "that of rank 2 on" in said
    (link,) = load_cluster(str(file)).links
    # Half of the pairs are slow; the median lies between, at most at what a whole link carries.
    assert link.bandwidth_bytes_per_s <= 1.1 * RATE / 8 * PAYLOAD


def test_like_links_are_measured_alike(cluster: Up, tmp_path: Path) -> None:
    file = tmp_path / "found.toml"
    check = [sys.executable, "-m", "firecaffe", "check", "--json", "--write", str(file)]
    found = json.loads(cluster(3, RATE).run([*check, "--folder", str(tmp_path)], timeout_s=600.0))
    assert not [line for line in found["findings"] if "link" in line]
    (link,) = load_cluster(str(file)).links
    assert link.bandwidth_bytes_per_s == pytest.approx(RATE / 8 * PAYLOAD, rel=0.1)
    # Of three ranks on whatever cores this machine has left for them.
    assert 0.5 < link.efficiency["ring"] < 2.0
