"""`firecaffe bench exchange`: started both ways, what it prints, and what ranks refuse."""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from statistics import median

import pytest
import torch

from firecaffe.cli import main
from firecaffe.exchange import ALGORITHMS, EXCHANGES, ring
from firecaffe.exchange.schedule import Schedule, from_rounds
from firecaffe.transport.link import measure_link
from tests.typed import firecaffe
from tests.world import Ranks

SMALL = ("-b", "8", "-e", "4K", "-f", "512", "-n", "2")


def test_started_by_itself_it_prints_one_json_object() -> None:
    done = firecaffe("bench", "exchange", "--nproc-per-node", 2, *SMALL, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    [line] = done.stdout.splitlines()
    report = json.loads(line)
    assert (report["world_size"], report["repetitions"]) == (2, 2)
    assert (report["link"]["between_ranks"], report["link"]["bound_uses"]) == ([0, 1], "measured")
    [node] = report["nodes"]
    assert (node["ranks"], node["environment"]["torch"]) == ([0, 1], torch.__version__)
    assert {(r["algorithm"], r["size_bytes"]) for r in report["results"]} == {
        (name, size) for name in EXCHANGES for size in (8, 4096)
    }
    for result in report["results"]:
        samples_s = result["samples_s"]
        assert len(samples_s) == 2
        times = [median(samples_s), min(samples_s), max(samples_s)]
        assert [result[name] for name in ("time_s", "min_s", "max_s")] == times
        assert result["count"] * 4 == result["size_bytes"]
        # With two ranks, 2 (p - 1) / p is 1.
        assert result["busbw_bytes_per_s"] == pytest.approx(result["size_bytes"] / times[0])
        assert result["tree_bits_checked"] is True  # two numbers have only one sum


def bench(*argv: str) -> tuple[int, str, str]:
    """The command as a rank that a launcher such as torchrun has started."""
    out, errors = io.StringIO(), io.StringIO()
    short = partial(measure_link, least_stream_s=0.001)
    with redirect_stdout(out), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.transport.link.measure_link", short)
        code = main(["bench", "exchange", *SMALL, *argv])
    return code, out.getvalue(), errors.getvalue()


def test_in_torchruns_world_the_first_rank_prints_a_table(ranks: Ranks) -> None:
    by_rank = ranks.shared(3, bench, "--exchanges", "tree,ring", "--link", "200M")
    assert [(code, errors) for code, _, errors in by_rank] == [(0, "")] * 3
    assert [out for _, out, _ in by_rank[1:]] == ["", ""]
    lines = by_rank[0][1].splitlines()
    assert lines[0].startswith("3 ranks on 1 node, cpu, ")
    assert "between rank 0 and rank 1 on the same node" in lines[1]
    assert lines[2] == "bound      uses 0.200 Gbit/s, as given (--link)"
    header = next(i for i, line in enumerate(lines) if line.startswith("size (B)"))
    rows = [line.split() for line in lines[header + 1 : header + 7]]
    # On one host tree is summed in memory; a ring of three is no tree, and sends.
    assert [" ".join(row[:5]) for row in rows] == [
        f"{size} {count} {way}"
        for size, count, ring_bytes in ((8, 2, 12), (4096, 1024, 5464))
        for way in ("native group ?", "tree memory 0", f"ring group {ring_bytes}")
    ]
    assert all(row[10] == "1.00" for row in rows if row[2] == "native")
    assert lines[-1] == "auto: tree (shared memory, nothing goes between hosts)"


def test_sockets_hosts_and_compressors_on_request(ranks: Ranks) -> None:
    words = ("--no-shared-memory", "--exchanges", "tree,hierarchical(tree,ring)", "--json")
    by_rank = ranks.shared(4, bench, *words, "--compressors", "int8,one_bit")
    assert [(code, errors) for code, _, errors in by_rank] == [(0, "")] * 4
    report = json.loads(by_rank[0][1])
    names = ["native", "tree", "hierarchical(tree,ring)", "int8", "one_bit"]
    assert [r["algorithm"] for r in report["results"]] == 2 * names
    assert {r["through"] for r in report["results"]} == {"group"}
    assert [r["is_compressed"] for r in report["results"][5:]] == [False] * 3 + [True] * 2
    by_name = {r["algorithm"]: r for r in report["results"][5:]}
    assert by_name["tree"]["wire_bytes"] == 2 * 4096
    assert by_name["int8"]["wire_bytes"] == 2 * 3 * 260  # a row of four: one to each and back
    assert by_name["hierarchical(tree,ring)"]["tree_bits_checked"] is True  # all in one node
    assert [choice["size_bytes"] for choice in report["auto"]] == [8, 4096]
    for choice in report["auto"]:
        assert choice["predicted_s"][choice["algorithm"]] == min(choice["predicted_s"].values())


def forgetful_ring(world_size: int, num_elements: int) -> Schedule:
    """A ring whose last round is missing: one shard of every rank is not the sum."""
    whole = ring.schedule(world_size, num_elements)
    return from_rounds(whole.algorithm, world_size, num_elements, whole.rounds[:-1])


def bench_with_a_broken_ring() -> tuple[int, str, str]:
    ALGORITHMS["ring"] = forgetful_ring  # in this rank's own process
    return bench()


def test_a_broken_exchange_is_refused_before_any_time_is_shown(ranks: Ranks) -> None:
    for rank, (code, out, errors) in enumerate(ranks.run(2, bench_with_a_broken_ring)):
        assert (code, out) == (7, "")
        [line] = errors.splitlines()
        assert f"rank {rank}: ring over 2 ranks, 8 bytes: the sum is wrong: element " in line


def hierarchical_where_hosts_do_not_fit() -> tuple[int, str, str]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return bench("--exchanges", "hierarchical(tree,ring)")


def test_what_a_rank_refuses(ranks: Ranks) -> None:
    for number, call, *words, said in (
        (1, bench, "WORLD_SIZE is 1; an exchange needs at least 2 ranks"),
        (2, bench, "--nproc-per-node", "3", "--nproc-per-node is 3, but a launcher"),
        (3, hierarchical_where_hosts_do_not_fit, "--exchanges: "),
    ):
        for code, out, errors in ranks.shared(number, call, *words):
            assert (code, out, said in errors) == (2, "", True)
