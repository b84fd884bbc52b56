"""The report of `firecaffe bench exchange`: figures worked out by hand, and the table of them."""

import io
from typing import Any

import pytest
from rich.console import Console

from firecaffe.api.exchange_bench_report import ExchangeTimes, make_report
from firecaffe.exchange.route import Choice, choose
from firecaffe.measure.exchange_times import Timing
from firecaffe.transport.link import MeasuredLink

ENVIRONMENT = {"cpu": "A processor", "gpus": [], "cores": 2, "torch": "2.13.0"}
CONDITIONS = {
    "congestion_control": "reno",
    "retransmitted_segments": 3,
    "cpu_busy_share": 0.5,
    "process_cpu_share": 0.125,
}
ROWS = (
    "16000000 4000000 native group ? 8000.0 8000.0 9000.0 2.000 3.000 1.00 1.500",
    "16000000 4000000 tree both 32000000 4000.0 3000.0 6000.0 4.000 6.000 0.50 3.000",
    "16000000 4000000 int8 group 6093750 2000.0 2000.0 2000.0 8.000 12.000 0.25 6.000",
)
LINK = MeasuredLink(0, 2, (50e-6, 40e-6, 90e-6), (2e9, 1e9, 4e9))


def report(link_bits_per_s: float | None = None) -> dict[str, Any]:
    """4 ranks on 2 nodes, 16 MB: 8 ms by native, 4 ms by the tree."""
    return make_report(
        [
            Timing("native", 4, 16_000_000, (8e-3, 9e-3, 8e-3)),
            Timing("tree", 4, 16_000_000, (4e-3, 3e-3, 6e-3), "both", 32_000_000),
            Timing("int8", 4, 16_000_000, (2e-3,) * 3, "group", 6_093_750, is_encoded=True),
        ],
        LINK,
        link_bits_per_s,
        device="cpu",
        threads=1,
        nodes=[("a", "0"), ("a", "0"), ("b", "1"), ("b", "1")],
        environments=[{**ENVIRONMENT, "host": host} for host in "aabb"],
        conditions=[CONDITIONS, CONDITIONS, CONDITIONS, {**CONDITIONS, "process_cpu_share": 0.25}],
        choices=[choose(4, [16_000_000], 50e-6, 2e9)],
    )


def test_results() -> None:
    native, tree, int8 = report()["results"]
    assert (tree["algorithm"], tree["size_bytes"], tree["count"]) == ("tree", 16e6, 4e6)
    assert (tree["time_s"], tree["min_s"], tree["max_s"]) == (4e-3, 3e-3, 6e-3)
    assert tree["samples_s"] == [4e-3, 3e-3, 6e-3]
    assert tree["algbw_bytes_per_s"] == pytest.approx(4e9)
    assert tree["busbw_bytes_per_s"] == pytest.approx(6e9)
    assert tree["ratio_to_native"] == pytest.approx(0.5)  # of 1/2, 1/3 and 3/4
    assert native["ratio_to_native"] == 1
    assert [row["through"] for row in (native, tree, int8)] == ["group", "both", "group"]
    assert [row["wire_bytes"] for row in (native, tree, int8)] == [None, 32_000_000, 6_093_750]
    assert [row["is_compressed"] for row in (native, tree, int8)] == [False, False, True]


@pytest.mark.parametrize(
    ("given_bits_per_s", "used", "share"), [(None, "measured", 3.0), (80e9, "given", 0.6)]
)
def test_bound_is_of_the_link_as_given_or_else_as_measured(
    given_bits_per_s: float | None, used: str, share: float
) -> None:
    found = report(given_bits_per_s)
    assert found["link"]["bound_uses"] == used
    assert found["results"][1]["share_of_bound"] == pytest.approx(share)
    assert found["link"]["latency_s"] == 40e-6  # of 40, 50 and 60
    assert found["link"]["bandwidth_bytes_per_s"] == 2e9
    assert found["link"]["between_nodes"] is True


def test_nodes_are_told_once_and_the_work_of_their_ranks_is_added() -> None:
    first, second = report()["nodes"]
    assert (first["host"], first["ranks"]) == ("a", [0, 1])
    assert (second["host"], second["ranks"]) == ("b", [2, 3])
    assert second["environment"]["host"] == "b"
    assert second["conditions"]["cpu_own_share"] == 0.375
    assert second["conditions"]["cpu_busy_share"] == 0.5


def printed(found: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    ExchangeTimes(found).print_to(Console(file=out, width=160))
    return out.getvalue().splitlines()


def test_table_without_a_terminal_is_plain_lines() -> None:
    lines = printed(report())
    assert lines[0] == "4 ranks on 2 nodes, cpu, A processor, 2 cores, torch 2.13.0"
    assert lines[1] == (
        "link       measured between rank 0 and rank 2 on different nodes: "
        "α 40.0 us, β 0.500 ns/B, that is 16.000 Gbit/s"
    )
    assert lines[2] == "bound      uses 16.000 Gbit/s, as measured"
    assert lines[3] == (
        "conditions a from rank 0 on: congestion control reno, retransmitted segments 3, "
        "processors 50% busy, 25% by these ranks"
    )
    header = next(i for i, line in enumerate(lines) if line.startswith("size (B)"))
    for line, row in zip(lines[header + 1 : header + 4], ROWS, strict=True):
        assert " ".join(line.split()) == row
    assert lines[-2].startswith("int8: compressed; the first sum as near as the codec says, ")
    assert lines[-2].endswith("up to 0 bytes those of one process")
    assert lines[-1] == "auto, by the measured α and β: halving_doubling 16000000 B"
    assert not any("\x1b" in line for line in lines)


def test_what_the_system_does_not_tell_is_not_made_up() -> None:
    found = report(link_bits_per_s=1e9)
    found["nodes"][0]["conditions"].update(congestion_control=None, retransmitted_segments=None)
    lines = printed(found)
    assert lines[2] == "bound      uses 1.000 Gbit/s, as given (--link)"
    assert "congestion control ?, retransmitted segments ?," in lines[3]


AUTO = {
    "one": (["tree"], "tree 8 B"),
    "same": (["tree", "tree", "tree"], "tree 8 B to 32 B"),
    "from a size on": (["tree", "tree", "ring"], "tree 8 B to 16 B, ring 32 B"),
    "there and back": (["tree", "ring", "tree"], "tree 8 B, ring 16 B, tree 32 B"),
}


@pytest.mark.parametrize(("algorithms", "said"), AUTO.values(), ids=AUTO)
def test_what_auto_would_take_is_one_line(algorithms: list[str], said: str) -> None:
    found = report()
    found["auto"] = [
        {"size_bytes": 8 * 2**i, "algorithm": name, "predicted_s": {"tree": 1.0, "ring": 2.0}}
        for i, name in enumerate(algorithms)
    ]
    assert printed(found)[-1] == f"auto, by the measured α and β: {said}"


def test_in_shared_memory_auto_has_nothing_to_choose() -> None:
    found = report()
    nothing = Choice("tree", 0.0, {"tree": 0.0})
    found["auto"] = [
        {"size_bytes": 8, "algorithm": nothing.algorithm, "predicted_s": nothing.by_algorithm}
    ]
    assert printed(found)[-1] == "auto: tree (shared memory, nothing goes between hosts)"
