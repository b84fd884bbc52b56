"""`firecaffe bench exchange`: started both ways, what it prints, and what it refuses."""

import json
import os
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from PIL import Image

from firecaffe.cli import main
from firecaffe.errors import OwnCodeError
from firecaffe.exchange import ALGORITHMS, EXCHANGES, ring
from firecaffe.exchange.schedule import Schedule, from_rounds
from firecaffe.transport.link import measure_link
from tests import typed
from tests.world import Ranks

SMALL = ("-b", "8", "-e", "4K", "-f", "512", "-n", "2")

NUMBER = (int, float)
RESULT = {
    "algorithm": str,
    "is_compressed": bool,
    "through": str,
    "wire_bytes": (int, type(None)),
    "size_bytes": int,
    "count": int,
    "time_s": float,
    "min_s": float,
    "max_s": float,
    "algbw_bytes_per_s": float,
    "busbw_bytes_per_s": float,
    "ratio_to_native": NUMBER,
    "share_of_bound": float,
    "tree_bits_checked": bool,
    "samples_s": list,
}
REPORT = {
    "bench": str,
    "world_size": int,
    "device": str,
    "dtype": str,
    "threads_per_rank": int,
    "repetitions": int,
    "warm_up": int,
    "nodes": list,
    "link": dict,
    "results": list,
    "auto": list,
}
NODE = {"host": str, "ranks": list, "environment": dict, "conditions": dict}
CONDITIONS = {
    "congestion_control": (str, type(None)),
    "retransmitted_segments": (int, type(None)),
    "cpu_busy_share": float,
    "cpu_own_share": float,
}
LINK = {
    "between_ranks": list,
    "between_nodes": bool,
    "latency_s": float,
    "bandwidth_bytes_per_s": float,
    "latency_samples_s": list,
    "bandwidth_samples_bytes_per_s": list,
    "bound_uses": str,
    "bound_bandwidth_bytes_per_s": float,
}


def check_schema(found: dict[str, Any], schema: dict[str, Any]) -> None:
    assert list(found) == list(schema)
    for name, kind in schema.items():
        assert isinstance(found[name], kind), f"{name} is {found[name]!r}"


def test_started_by_itself_it_prints_one_json_object() -> None:
    done = typed.firecaffe("bench", "exchange", "--nproc-per-node", 2, *SMALL, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    check_schema(report, REPORT)
    check_schema(report["link"], LINK)
    [node] = report["nodes"]
    check_schema(node, NODE)
    check_schema(node["conditions"], CONDITIONS)
    assert node["ranks"] == [0, 1]
    assert node["environment"]["torch"] == torch.__version__
    assert (report["world_size"], report["repetitions"]) == (2, 2)
    assert report["link"]["between_ranks"] == [0, 1]
    assert report["link"]["bound_uses"] == "measured"
    assert {(r["algorithm"], r["size_bytes"]) for r in report["results"]} == {
        (name, size) for name in EXCHANGES for size in (8, 4096)
    }
    for result in report["results"]:
        check_schema(result, RESULT)
        samples_s = result["samples_s"]
        assert len(samples_s) == 2
        assert result["time_s"] == median(samples_s)
        assert (result["min_s"], result["max_s"]) == (min(samples_s), max(samples_s))
        assert result["count"] * 4 == result["size_bytes"]
        # With two ranks, 2 (p - 1) / p is 1.
        assert result["busbw_bytes_per_s"] == pytest.approx(
            result["size_bytes"] / median(samples_s)
        )
        assert result["tree_bits_checked"] is True  # two numbers have only one sum


BENCHES = {
    "exchange(nproc_per_node=3, exchanges=['ring'], maxbytes='1K', stepfactor=128, iters=2)": (
        "busbw (GB/s)"
    ),
    "step(model='lenet', sizes=[1, 2], seconds=0, write='a.toml')": "wrote a.toml",
    "data('images', images=4, resize=8, crop=8, model_rate=10)": "what limits",
}
SCRIPT = """
import json, sys, torch, firecaffe

torch.set_num_threads(2)
for call, word in json.loads(sys.argv[1]).items():
    answer = eval(f"firecaffe.bench_{call}")
    assert word in repr(answer), call
    assert json.loads(json.dumps(answer.to_dict())), call
    assert torch.get_num_threads() == 2, call
"""


def test_a_function_measures_as_its_command(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for number in range(4):
        image = tmp_path / "images" / "train" / "ab"[number % 2] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(image)
    done = typed.python("script.py", json.dumps(BENCHES), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def forgetful_ring(world_size: int, num_elements: int) -> Schedule:
    """A ring whose last round is missing: one shard of every rank is not the sum."""
    whole = ring.schedule(world_size, num_elements)
    return from_rounds(whole.algorithm, world_size, num_elements, whole.rounds[:-1])


def bench(*argv: str) -> tuple[int, str, str]:
    """The command as a rank that a launcher such as torchrun has started."""
    short = partial(measure_link, least_stream_s=0.001)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firecaffe.api.exchange_bench.measure_link", short)
        done = typed.in_process("bench", "exchange", *argv)
    return done.returncode, done.stdout, done.stderr


def bench_with_a_broken_ring(*argv: str) -> tuple[int, str, str]:
    ALGORITHMS["ring"] = forgetful_ring  # in this rank's own process
    return bench(*argv)


def test_in_torchruns_world_the_first_rank_prints_a_table(ranks: Ranks) -> None:
    words = ("--exchanges", "tree,ring", "--link", "200M")
    by_rank = ranks.shared(3, bench, *SMALL, *words)
    assert [(code, errors) for code, _, errors in by_rank] == [(0, "")] * 3
    assert [out for _, out, _ in by_rank[1:]] == ["", ""]
    lines = by_rank[0][1].splitlines()
    assert lines[0].startswith("3 ranks on 1 node, cpu, ")
    assert lines[1].startswith("link       measured between rank 0 and rank 1 on the same node: α ")
    assert lines[2] == "bound      uses 0.200 Gbit/s, as given (--link)"
    header = next(i for i, line in enumerate(lines) if line.startswith("size (B)"))
    rows = [line.split() for line in lines[header + 1 : header + 7]]
    # On one host tree is summed in memory; a ring of three is no tree, and sends.
    assert [row[:5] for row in rows] == [
        [size, count, *name]
        for size, count, ring_bytes in (("8", "2", "12"), ("4096", "1024", "5464"))
        for name in (
            ["native", "group", "?"],
            ["tree", "memory", "0"],
            ["ring", "group", ring_bytes],
        )
    ]
    assert all(row[10] == "1.00" for row in rows if row[2] == "native")
    assert lines[-1] == "auto: tree (shared memory, nothing goes between hosts)"
    assert not any("\x1b" in line for line in lines)


def test_sockets_hosts_and_compressors_on_request(ranks: Ranks) -> None:
    words = ("--no-shared-memory", "--exchanges", "tree,hierarchical(tree,ring)", "--json")
    by_rank = ranks.shared(4, bench, *SMALL, *words, "--compressors", "int8,one_bit")
    assert [(code, errors) for code, _, errors in by_rank] == [(0, "")] * 4
    report = json.loads(by_rank[0][1])
    names = ["native", "tree", "hierarchical(tree,ring)", "int8", "one_bit"]
    assert [r["algorithm"] for r in report["results"]] == 2 * names
    assert {r["through"] for r in report["results"]} == {"group"}
    compressed = {r["algorithm"] for r in report["results"] if r["is_compressed"]}
    assert compressed == {"int8", "one_bit"}
    by_name = {r["algorithm"]: r for r in report["results"][5:]}
    assert by_name["tree"]["wire_bytes"] == 2 * 4096
    assert by_name["int8"]["wire_bytes"] == 2 * 3 * 260  # a row of four: one to each and back
    assert by_name["hierarchical(tree,ring)"]["tree_bits_checked"] is True  # all in one node
    assert [choice["size_bytes"] for choice in report["auto"]] == [8, 4096]
    for choice in report["auto"]:
        assert choice["predicted_s"][choice["algorithm"]] == min(choice["predicted_s"].values())


def hierarchical_where_hosts_do_not_fit() -> tuple[int, str, str]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return bench(*SMALL, "--exchanges", "hierarchical(tree,ring)")


def test_a_hierarchical_exchange_must_fit_the_hosts(ranks: Ranks) -> None:
    for code, out, errors in ranks.shared(3, hierarchical_where_hosts_do_not_fit):
        assert (code, out) == (2, "")
        assert "--exchanges: " in errors


def test_a_broken_exchange_is_refused_before_any_time_is_shown(ranks: Ranks) -> None:
    for rank, (code, out, errors) in enumerate(ranks.run(2, bench_with_a_broken_ring, *SMALL)):
        assert (code, out) == (7, "")
        [line] = errors.splitlines()
        assert line.startswith(
            f"firecaffe: rank {rank}: ring over 2 ranks, 8 bytes: the sum is wrong: element "
        )


def test_a_world_of_one_has_nothing_to_exchange(ranks: Ranks) -> None:
    [(code, out, errors)] = ranks.shared(1, bench, *SMALL)
    assert (code, out) == (2, "")
    assert errors == "firecaffe: rank 0: WORLD_SIZE is 1; an exchange needs at least 2 ranks\n"


def test_two_launchers_are_one_too_many(ranks: Ranks) -> None:
    for code, out, errors in ranks.shared(2, bench, *SMALL, "--nproc-per-node", "3"):
        assert (code, out) == (2, "")
        assert "--nproc-per-node is 3, but a launcher" in errors


REFUSED = {
    "nothing": ([], 2, ["`bench exchange`", "found nothing"]),
    "another word": (["network"], 2, ["`bench exchange`", "'network'"]),
    "unknown exchange": (["exchange", "--exchanges", "rign"], 2, ["'rign'", "tree, "]),
    "smallest size": (["exchange", "-b", "8KB"], 2, ["--minbytes is '8KB'", "128M", "K is 1024"]),
    "largest size": (["exchange", "-e", "10"], 2, ["--maxbytes is '10'", "multiple of 4"]),
    "nothing between": (["exchange", "-b", "1M", "-e", "1K"], 2, ["--maxbytes is 1024", "1048576"]),
    "no factor": (["exchange", "-f", "1"], 2, ["--stepfactor is 1", "at least 2"]),
    "factor in parts": (
        ["exchange", "-f", "1.5"],
        2,
        ["--stepfactor is 1.5; it must be a whole number"],
    ),
    "no repetition": (["exchange", "-n", "0"], 2, ["--iters is 0", "at least 1"]),
    "rate in bytes": (["exchange", "--link", "25GB"], 2, ["--link is '25GB'", "bits per second"]),
    "empty rate": (["exchange", "--link", ""], 2, ["--link is empty; give it a value"]),
    "device": (["exchange", "--device", "tpu"], 2, ["--device is 'tpu'", "auto, cpu, cuda"]),
    "one rank": (["exchange", "--nproc-per-node", "1"], 2, ["--nproc-per-node is 1", "at least 2"]),
    "no GPU": (["exchange", "--device", "cuda"], 2, ["--device is cuda"]),
    "many ranks": (["exchange", "--nproc-per-node", "1025"], 2, ["1025; it must be at most 1024"]),
    "no rank": (["exchange", "--nproc-per-node", "0"], 2, ["--nproc-per-node is 0", "at least 2"]),
    "memory": (
        ["exchange", "-e", "8192G", "--device", "cpu"],
        2,
        ["--maxbytes would", "this host"],
    ),
    "unknown compressor": (["exchange", "--compressors", "int9"], 2, ["'int9'", "int8, one_bit"]),
    "inner": (["exchange", "--exchanges", "hierarchical(ring,tree)"], 2, ["inner is 'ring'"]),
    "unknown option": (["exchange", "--compact"], 2, ["--compact"]),
    "port": (["exchange", "--master-port", "99999999"], 6, ["--master-port", "99999999"]),
}


@pytest.mark.parametrize(("argv", "code", "parts"), REFUSED.values(), ids=REFUSED)
def test_refuses_in_one_line_before_any_rank_is_started(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    code: int,
    parts: list[str],
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("firecaffe.cluster.agent.FaultAgent.run", refuse)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", *argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("firecaffe: ")
    for part in parts:
        assert part in line


def test_a_size_that_a_network_does_not_take_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "norm.py"
    layers = "nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10)"
    path.write_text(f"from torch import nn\n\ndef net():\n    return nn.Sequential({layers})\n")
    words = ["bench", "step", "--model", f"{path}:net", "--input", "1x28x28"]
    assert main([*words, "--sizes", "1", "--seconds", "0"]) == OwnCodeError.exit_code
    assert "--sizes has 1" in capsys.readouterr().err
