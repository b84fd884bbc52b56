"""`firecaffe schedule`: what a user types, sees and gets back."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

import firecaffe
from firecaffe.cli import main
from firecaffe.exchange import ALGORITHMS

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys: Capture, *argv: str) -> str:
    assert main(["schedule", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def run_json(capsys: Capture, *argv: str) -> Any:
    return json.loads(run(capsys, *argv, "--json"))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_json_holds_the_whole_schedule(capsys: Capture, algorithm: str) -> None:
    for world_size in (1, 2, 5, 8):
        answer = run_json(capsys, algorithm, str(world_size), "--elements", "1009")
        schedule = ALGORITHMS[algorithm](world_size, 1009)
        names = ("source", "destination", "start", "stop", "action")
        assert [tuple(t[name] for name in names) for t in answer["transfers"]] == [
            (t.source, t.destination, t.start, t.stop, "add" if t.reduce else "overwrite")
            for t in schedule.transfers()
        ]
        lengths = list(map(len, schedule.rounds))
        rounds = [t["round"] for t in answer["transfers"]]
        assert rounds == [i + 1 for i, length in enumerate(lengths) for _ in range(length)]
        assert (answer["algorithm"], answer["world_size"]) == (algorithm, world_size)
        assert (answer["num_rounds"], answer["num_transfers"]) == (len(lengths), sum(lengths))


def test_json_by_formulas(capsys: Capture) -> None:
    ring = run_json(capsys, "ring", "6")
    n = 6 * 1024
    assert ring["num_elements"] == n
    assert ring["num_rounds"] == ring["serial_messages"] == 2 * 5
    assert ring["num_transfers"] == 2 * 5 * 6
    assert ring["busiest_rank_bytes"] == ring["serial_bytes"] == 2 * 5 * n // 6 * 4
    assert ring["lower_bound_bytes"] == pytest.approx(2 * 5 / 6 * n * 4)
    assert ring["ratio_to_lower_bound"] == pytest.approx(1)
    assert ring["serial_additions"] == 5 * n // 6
    assert ring["adds_in_tree_order"] is False
    server = run_json(capsys, "parameter_server", "5", "--elements", "1000")
    assert server["busiest_rank_bytes"] == 4 * 1000 * 4
    assert server["serial_bytes"] == 8 * 1000 * 4
    assert server["ratio_to_lower_bound"] == pytest.approx(4 / (2 * 4 / 5))
    assert server["adds_in_tree_order"] is True
    largest = run_json(capsys, "tree", "1024", "--elements", "1")
    assert (largest["num_rounds"], len(largest["transfers"])) == (20, 2 * 1023)


@pytest.mark.parametrize("argv", [("tree", "1"), ("ring", "4", "--elements", "0")])
def test_nothing_to_send(capsys: Capture, argv: tuple[str, ...]) -> None:
    answer = run_json(capsys, *argv)
    assert answer["transfers"] == []
    assert answer["busiest_rank_bytes"] == answer["lower_bound_bytes"] == 0
    assert answer["ratio_to_lower_bound"] is None
    assert "0, of 0 transfers" in run(capsys, *argv)
    assert "nothing is sent" in run(capsys, *argv, "--draw")


def test_table(capsys: Capture) -> None:
    lines = run(capsys, "tree", "4").splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "→" in line]
    assert [" ".join(row) for row in rows[1:]] == [
        "1 1 → 0 0:4096 add",
        "1 3 → 2 0:4096 add",
        "2 2 → 0 0:4096 add",
        "3 0 → 2 0:4096 overwrite",
        "4 0 → 1 0:4096 overwrite",
        "4 2 → 3 0:4096 overwrite",
    ]
    facts = " ".join(" ".join(lines[-5:]).split())
    for fact in (
        "tree, 4 ranks, 4096 float32 elements",
        "4, of 6 transfers in all",
        "32768 bytes one way, 1.33 times",
        "4 messages, 65536 bytes, 8192 additions",
        "in the order of the fixed tree",
    ):
        assert fact in facts
    assert "additions     in another order at this world size" in run(capsys, "ring", "3")


def test_long_tables_are_cut_and_say_so(capsys: Capture) -> None:
    out = run(capsys, "ring", "16")
    assert sum(line.startswith("│") for line in out.splitlines()) == 64
    assert f"… and {2 * 15 * 16 - 64} more transfers; --json has all of them" in out
    assert len(run_json(capsys, "ring", "16")["transfers"]) == 2 * 15 * 16
    assert "more transfers" not in run(capsys, "tree", "33")  # 64 transfers


def test_nodes(capsys: Capture) -> None:
    """Two ring steps each way over three nodes, between the tree's way up and its way down."""
    argv = ("hierarchical(tree,ring)", "12", "--ranks-per-node", "4")
    answer = run_json(capsys, *argv)
    assert (answer["algorithm"], answer["ranks_per_node"]) == ("hierarchical(tree,ring)", 4)
    assert answer["num_rounds"] == answer["serial_messages"] == 2 * 2 + 2 * 2
    assert answer["busiest_rank_bytes"] == 12 * 1024 * 4 * (2 + 2 * 2 // 3) + 12 * 1024 * 4 // 3
    assert answer["adds_in_tree_order"] is False
    links = {(t["source"], t["destination"]) for t in answer["transfers"]}
    assert {link for link in links if link[0] // 4 != link[1] // 4} == {(0, 4), (4, 8), (8, 0)}
    assert "rounds 3-4  ╞═══╪═══╪" in run(capsys, *argv, "--draw")
    in_order = run_json(capsys, "hierarchical(tree,tree)", "12", "--ranks-per-node", "4")
    assert in_order["adds_in_tree_order"] is True


def test_sums_in_shared_memory(capsys: Capture) -> None:
    words = ("tree", "4", "--ranks-per-node", "2", "--shared-memory")
    answer = run_json(capsys, *words)
    sent = [t for t in answer["transfers"] if not t.get("in_memory")]
    assert [(t["source"], t["destination"]) for t in sent] == [(2, 0), (0, 2)]
    assert answer["algorithm"] == "shared_memory(tree)"
    assert answer["busiest_rank_bytes"] == answer["lower_bound_bytes"] == 4 * 4096
    assert answer["adds_in_tree_order"] is True
    drawn = run(capsys, *words, "--draw")
    lines = [line for line in drawn.splitlines() if line.startswith("round")]
    assert [line.endswith("in memory") for line in lines] == [True, True, False, False, True, False]
    one_host = run_json(capsys, "tree", "4", "--ranks-per-node", "4", "--shared-memory")
    assert (one_host["busiest_rank_bytes"], one_host["num_rounds"]) == (0, 2)


def test_draw(capsys: Capture) -> None:
    out = run(capsys, "tree", "4", "--draw")
    assert "round 2  ◄═══╪═══╡   │  n" in out
    assert "→" not in out
    assert "exchange      tree, 4 ranks" in out
    assert "the picture does not fit into 170 columns" in run(capsys, "ring", "64", "--draw")
    console = Console(width=40, file=io.StringIO(), record=True)
    firecaffe.schedule("tree", 4, draw=True).print_to(console)
    assert "does not fit into 40 columns" in console.export_text()
