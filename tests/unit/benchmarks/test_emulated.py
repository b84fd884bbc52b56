"""What an emulated cluster is asked for: rates, and shares of processors."""

import pytest

from benchmarks.emulated.namespaces import ClusterError
from benchmarks.emulated.processors import bound
from benchmarks.emulated.virtual_cluster import VirtualCluster, parse_rate

RATE = 100_000_000


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("200mbit", 200_000_000), ("2.5Gbit", 2_500_000_000), ("64kbit", 64_000), ("9bit", 9)],
)
def test_rates(text: str, bits_per_s: int) -> None:
    assert parse_rate(text) == bits_per_s


def test_a_share_that_the_kernel_cannot_give_is_refused_before_anything_is_made() -> None:
    with pytest.raises(ClusterError, match=r"0\.05 processors for each host; 0\.1 is the least"):
        VirtualCluster(16, RATE, processors=0.05)


def test_whole_processors_are_bound_while_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 5})
    assert bound([1, 0.5, 2]) == {0: {2}, 2: {3, 5}}
    assert bound([2, 2]) == {0: {2, 3}}
