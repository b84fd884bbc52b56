"""`firecaffe schedule`: what a user types, sees and gets back."""

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

import firecaffe
from firecaffe.exchange import ALGORITHMS, EXCHANGES
from tests.typed import in_process


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def run(*argv: str) -> str:
    done = in_process("schedule", *argv)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def run_json(*argv: str) -> Any:
    return json.loads(run(*argv, "--json"))


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_json_holds_the_whole_schedule(algorithm: str, world_size: int) -> None:
    found = run_json(algorithm, str(world_size), "--elements", "1009")
    schedule = ALGORITHMS[algorithm](world_size, 1009)
    assert [
        (t["source"], t["destination"], t["start"], t["stop"], t["action"])
        for t in found["transfers"]
    ] == [
        (t.source, t.destination, t.start, t.stop, "add" if t.reduce else "overwrite")
        for t in schedule.transfers()
    ]
    counted = [sum(t["round"] == i for t in found["transfers"]) for i in range(1, 40)]
    lengths = list(map(len, schedule.rounds))
    assert counted == lengths + [0] * (39 - len(lengths))
    assert (found["algorithm"], found["world_size"]) == (algorithm, world_size)
    assert (found["num_rounds"], found["num_transfers"]) == (len(lengths), sum(lengths))


def test_json_of_a_ring_by_its_formulas() -> None:
    found = run_json("ring", "6")
    n = 6 * 1024
    assert found["num_elements"] == n
    assert found["num_rounds"] == found["serial_messages"] == 2 * 5
    assert found["num_transfers"] == 2 * 5 * 6
    assert found["busiest_rank_bytes"] == found["serial_bytes"] == 2 * 5 * n // 6 * 4
    assert found["lower_bound_bytes"] == pytest.approx(2 * 5 / 6 * n * 4)
    assert found["ratio_to_lower_bound"] == pytest.approx(1)
    assert found["serial_additions"] == 5 * n // 6
    assert found["adds_in_tree_order"] is False


def test_json_of_a_parameter_server_by_its_formulas() -> None:
    found = run_json("parameter_server", "5", "--elements", "1000")
    assert found["num_elements"] == 1000
    assert found["busiest_rank_bytes"] == 4 * 1000 * 4
    assert found["serial_bytes"] == 8 * 1000 * 4
    assert found["ratio_to_lower_bound"] == pytest.approx(4 / (2 * 4 / 5))
    assert found["adds_in_tree_order"] is True


@pytest.mark.parametrize("argv", [("tree", "1"), ("ring", "4", "--elements", "0")])
def test_nothing_to_send(argv: tuple[str, ...]) -> None:
    found = run_json(*argv)
    assert found["transfers"] == []
    assert found["busiest_rank_bytes"] == found["lower_bound_bytes"] == 0
    assert found["ratio_to_lower_bound"] is None
    assert "0, of 0 transfers" in run(*argv)
    assert "nothing is sent" in run(*argv, "--draw")


def test_table() -> None:
    lines = run("tree", "4").splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "→" in line]
    assert rows[1:] == [
        ["1", "1 → 0", "0:4096", "add"],
        ["1", "3 → 2", "0:4096", "add"],
        ["2", "2 → 0", "0:4096", "add"],
        ["3", "0 → 2", "0:4096", "overwrite"],
        ["4", "0 → 1", "0:4096", "overwrite"],
        ["4", "2 → 3", "0:4096", "overwrite"],
    ]
    assert lines[-5:] == [
        "exchange      tree, 4 ranks, 4096 float32 elements",
        "rounds        4, of 6 transfers in all",
        "busiest rank  32768 bytes one way, 1.33 times the least that any all-reduce needs",
        "in lock step  4 messages, 65536 bytes, 8192 additions, one after the other",
        "additions     in the order of the fixed tree at this world size",
    ]


def test_another_order_is_said() -> None:
    assert "additions     in another order at this world size" in run("ring", "3")


def test_nodes() -> None:
    """Two ring steps each way over three nodes, between the tree's way up and its way down."""
    argv = ("hierarchical(tree,ring)", "12", "--ranks-per-node", "4")
    found = run_json(*argv)
    assert (found["algorithm"], found["ranks_per_node"]) == ("hierarchical(tree,ring)", 4)
    assert found["num_rounds"] == found["serial_messages"] == 2 * 2 + 2 * 2
    assert found["busiest_rank_bytes"] == 12 * 1024 * 4 * (2 + 2 * 2 // 3) + 12 * 1024 * 4 // 3
    assert found["adds_in_tree_order"] is False
    across = {
        (t["source"], t["destination"])
        for t in found["transfers"]
        if t["source"] // 4 != t["destination"] // 4
    }
    assert across == {(0, 4), (4, 8), (8, 0)}
    assert "rounds 3-4  ╞═══╪═══╪" in run(*argv, "--draw")
    in_order = run_json("hierarchical(tree,tree)", "12", "--ranks-per-node", "4")
    assert in_order["adds_in_tree_order"] is True


def test_long_tables_are_cut_and_say_so() -> None:
    out = run("ring", "16")
    assert sum(line.startswith("│") for line in out.splitlines()) == 64
    assert f"… and {2 * 15 * 16 - 64} more transfers; --json has all of them" in out
    assert len(run_json("ring", "16")["transfers"]) == 2 * 15 * 16
    assert "more transfers" not in run("tree", "33")  # 64 transfers


def test_sums_in_shared_memory() -> None:
    words = ("tree", "4", "--ranks-per-node", "2", "--shared-memory")
    found = run_json(*words)
    sent = [t for t in found["transfers"] if not t.get("in_memory")]
    assert [(t["source"], t["destination"]) for t in sent] == [(2, 0), (0, 2)]
    assert found["algorithm"] == "shared_memory(tree)"
    assert found["busiest_rank_bytes"] == found["lower_bound_bytes"] == 4 * 4096
    assert found["adds_in_tree_order"] is True
    drawn = run(*words, "--draw")
    lines = [line for line in drawn.splitlines() if line.startswith("round")]
    assert [line.endswith("in memory") for line in lines] == [True, True, False, False, True, False]
    one_host = run_json("tree", "4", "--ranks-per-node", "4", "--shared-memory")
    assert (one_host["busiest_rank_bytes"], one_host["num_rounds"]) == (0, 2)


def test_draw() -> None:
    out = run("tree", "4", "--draw")
    assert "round 2  ◄═══╪═══╡   │  n" in out
    assert "→" not in out
    assert "exchange      tree, 4 ranks" in out
    assert "the picture does not fit into 170 columns" in run("ring", "64", "--draw")


def test_the_width_of_the_terminal_counts() -> None:
    console = Console(width=40, file=io.StringIO(), record=True)
    firecaffe.schedule("tree", 4, draw=True).print_to(console)
    assert "does not fit into 40 columns" in console.export_text()


REFUSED = {
    "unknown algorithm": (("rign", "4"), f"no exchange 'rign'; .* {', '.join(EXCHANGES)}"),
    "native": (("native", "4"), "native is .* has no schedule; .* tree"),
    "unknown outer": (("hierarchical(tree,rign)", "4"), "outer is 'rign'; it must be one of"),
    "inner without a root": (("hierarchical(ring,tree)", "4"), "inner is 'ring'; it must be one"),
    "native outside": (("hierarchical(tree,native)", "4"), "outer is 'native'; it must be one of"),
    "nodes not whole": (
        ("hierarchical(tree,ring)", "7", "--ranks-per-node", "2"),
        "7 ranks do not fill nodes of 2; .* multiple",
    ),
    "empty nodes": (
        ("hierarchical(tree,tree)", "4", "--ranks-per-node", "0"),
        "--ranks-per-node is 0; .* at least 1",
    ),
    "no nodes": (("tree", "4", "--ranks-per-node", "2"), "--ranks-per-node is 2, .*hierarchical"),
    "another order in memory": (
        ("ring", "4", "--ranks-per-node", "2", "--shared-memory"),
        "--shared-memory: ring .*4 .*--ranks-per-node 2",
    ),
    "another collective in memory": (
        ("ring", "4", "--kind", "broadcast", "--ranks-per-node", "2", "--shared-memory"),
        "--shared-memory .*broadcast",
    ),
    "fold in memory": (("fold", "4", "--shared-memory"), "fold"),
    "two forms": (("tree", "4", "--draw", "--json"), "--draw .*--json"),
    "no rank": (("tree", "0"), "WORKERS is 0; it must be 1 to 1024"),
    "negative world": (("tree", "-2"), "WORKERS is -2; it must be 1 to 1024"),
    "too large": (("tree", "1025"), "WORKERS is 1025; it must be 1 to 1024"),
    "no number": (("tree", "four"), "WORKERS is four; it must be a whole number"),
    "negative elements": (("tree", "4", "--elements", "-1"), "--elements is -1; .* at least 0"),
    "no world size": (("tree",), "workers"),
    "nothing": ((), "exchange"),
    "unknown option": (("tree", "4", "--color"), "--color"),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_in_one_line(argv: tuple[str, ...], message: str) -> None:
    done = in_process("schedule", *argv)
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("firecaffe: ")
    assert re.search(message, line)


def test_largest_world() -> None:
    found = run_json("tree", "1024", "--elements", "1")
    assert found["num_rounds"] == 20
    assert len(found["transfers"]) == 2 * 1023
