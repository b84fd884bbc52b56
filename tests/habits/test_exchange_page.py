"""docs/exchange.md says what the schedules do: its formulas are evaluated, its claims checked."""

import ast
import re
from collections.abc import Callable
from fractions import Fraction
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest

from firecaffe.exchange import ALGORITHMS, EXCHANGES, NATIVE, ROOTED, find_schedule
from firecaffe.exchange.leaves import largest_nodes, leaf_share
from firecaffe.exchange.pieces import SEGMENT_ELEMENTS, num_segments
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import Schedule, lower_bound_elements

PAGE = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text(encoding="utf-8")
WORLD_SIZES = range(1, 18)


def elements_of(world_size: int) -> int:
    """Elements for formulas about shards and segments of equal length: 720720 = lcm(1, …, 16)."""
    return 720720 if world_size <= 16 else 32640 * 22  # 32640 = 16 * 17 * 120


OVER_NODES = "hierarchical(tree,ring)"
NODES = [(p, m) for p in WORLD_SIZES for m in range(1, p + 1) if p % m == 0]


def table() -> dict[str, dict[str, str]]:
    """The cells of the page's table, by exchange and by heading."""
    lines = PAGE.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| exchange |"))
    headings = cells(lines[first])
    rows = {}
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        row = dict(zip(headings, cells(line), strict=True))
        name = row["exchange"].strip("`")
        assert name not in rows
        rows[name] = row
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def lg(x: Any) -> Any:
    """Exact at powers of two, so that formulas may be compared with ==."""
    exponent = log2(x)
    return int(exponent) if exponent.is_integer() else exponent


FUNCTIONS: dict[str, Callable[[Any], Any]] = {"lg": lg, "ceil": ceil}
GRAMMAR = (
    ast.Expression,
    ast.BinOp,
    ast.operator,
    ast.Compare,
    ast.Gt,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Constant,
)


def evaluate(cell: str, world_size: int, **more: int) -> Any:
    """The value of a formula of the page, in fractions."""
    assert re.fullmatch(r"`[^`]+`", cell), f"{cell} is no formula"
    elements = elements_of(world_size)
    q = 2 ** (world_size.bit_length() - 1)
    letters = {
        "p": Fraction(world_size),
        "q": Fraction(q),
        "r": Fraction(world_size - q),
        "n": Fraction(elements),
        "B": Fraction(4 * elements),
        "s": Fraction(num_segments(elements, SEGMENT_ELEMENTS)),
        **{name: Fraction(value) for name, value in more.items()},
    }
    tree = ast.parse(cell.strip("`"), mode="eval")
    assert all(isinstance(node, GRAMMAR) for node in ast.walk(tree)), f"{cell} is no formula"
    return eval(compile(tree, cell, "eval"), {"__builtins__": {}, **FUNCTIONS, **letters})


def world_sizes(cell: str) -> set[int]:
    """Those of 1..17 that a cell such as `every p` or `1, 2, 4, …` names."""
    if cell == "every p":
        return set(WORLD_SIZES)
    return {int(number) for number in cell.removesuffix(", …").split(", ")}


def test_every_exchange_is_a_row_and_nothing_else_is() -> None:
    assert tuple(table()) == (*ALGORITHMS, OVER_NODES, NATIVE)


@pytest.mark.parametrize("algorithm", EXCHANGES)
def test_tree_order_is_the_one_computed(algorithm: str) -> None:
    computed = {p for p in WORLD_SIZES if adds_in_tree_order(algorithm, p)}
    assert world_sizes(table()[algorithm]["adds in tree order at"]) == computed


def test_tree_order_over_nodes_is_the_one_computed() -> None:
    cell = table()[OVER_NODES]["adds in tree order at"]
    assert cell == "p = m; p = 2 m where m = 2^k"
    computed = {(p, m) for p, m in NODES if adds_in_tree_order(OVER_NODES, p, m)}
    assert computed == {(p, m) for p, m in NODES if p == m or (p == 2 * m and m in (1, 2, 4, 8))}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_formulas_are_the_schedules(algorithm: str) -> None:
    for world_size in WORLD_SIZES:
        compare(table()[algorithm], ALGORITHMS[algorithm](world_size, elements_of(world_size)), 1)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), NODES)
def test_formulas_over_nodes_are_the_schedules(world_size: int, ranks_per_node: int) -> None:
    schedule = find_schedule(OVER_NODES, ranks_per_node)(world_size, elements_of(world_size))
    compare(table()[OVER_NODES], schedule, ranks_per_node)


def compare(row: dict[str, str], schedule: Schedule, ranks_per_node: int) -> None:
    """The formulas of a row against the counts of a schedule."""

    def value(cell: str, **costs: int) -> Any:
        return evaluate(cell, schedule.world_size, m=ranks_per_node, **costs)

    busiest = value(row["elements through the busiest rank, one way"])
    assert value(row["rounds"]) == len(schedule.rounds)
    assert busiest == schedule.elements_of_busiest_rank()

    def time(alpha: int = 0, beta: int = 0, gamma: int = 0) -> Any:
        return value(row["time"], alpha=alpha, beta=beta, gamma=gamma)

    assert time(alpha=1) == schedule.serial_messages()
    assert time(beta=1) == 4 * schedule.serial_elements()
    assert time(gamma=1) == schedule.serial_additions()
    assert time(alpha=3, beta=5, gamma=7) == 3 * time(alpha=1) + 5 * time(beta=1) + 7 * time(
        gamma=1
    )


def test_segments_are_as_long_as_the_page_says() -> None:
    """And the vector of the formulas is cut into equal ones, of an even number."""
    assert f"at most {SEGMENT_ELEMENTS} elements (128 kB)" in PAGE
    assert SEGMENT_ELEMENTS * 4 // 1024 == 128
    for world_size in WORLD_SIZES:
        segments = num_segments(elements_of(world_size), SEGMENT_ELEMENTS)
        assert segments % 2 == 0
        assert elements_of(world_size) % segments == 0
        assert elements_of(world_size) % world_size == 0


def test_both_rooted_exchanges_are_named_as_inner() -> None:
    assert "INNER is " + " or ".join(f"`{name}`" for name in reversed(ROOTED)) in PAGE


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, OVER_NODES])
def test_every_algorithm_is_described_and_has_a_source(algorithm: str) -> None:
    assert f"\n- **`{algorithm}`**: " in PAGE
    sources = PAGE.split("## Sources")[1]
    for work in table()[algorithm]["source"].split("; "):
        author, year = work.split(maxsplit=1)[0].rstrip(","), re.search(r"\d{4}", work)
        assert author in sources
        assert year is None or year[0] in sources


def formulas(*wanted: str) -> list[str]:
    """The formulas, which must stand on the page as they stand here."""
    assert all(f"`{formula}`" in PAGE for formula in wanted)
    return [f"`{formula}`" for formula in wanted]


def sizes_where(holds: Callable[[int], bool]) -> set[int]:
    return {p for p in WORLD_SIZES if holds(p)}


def test_server_against_tree_by_the_paper() -> None:
    server, tree = formulas("p * B * beta", "2 * lg(p) * B * beta")
    apart = {p: evaluate(server, p, beta=1) - evaluate(tree, p, beta=1) for p in WORLD_SIZES}
    assert (
        "tie at p = 2 and at p = 4, the server is ahead at p = 3, and the tree from p = 5" in PAGE
    )
    assert sizes_where(lambda p: apart[p] == 0) == {2, 4}
    assert sizes_where(lambda p: apart[p] < 0) == {3}


def test_server_against_tree_by_the_schedules() -> None:
    ours = {
        name: {p: ALGORITHMS[name](p, elements_of(p)) for p in WORLD_SIZES if p > 1}
        for name in ("parameter_server", "tree", "ring", "sharded_parameter_server")
    }
    elements = {
        name: {p: schedule.serial_elements() for p, schedule in schedules.items()}
        for name, schedules in ours.items()
    }
    server, tree, ring = (elements[name] for name in ("parameter_server", "tree", "ring"))
    cost_of = formulas("2 * (p - 1) * B * beta", "2 * ceil(lg(p)) * B * beta")
    assert all(evaluate(cost_of[0], p, beta=1) == 4 * server[p] for p in server)
    assert all(evaluate(cost_of[1], p, beta=1) == 4 * tree[p] for p in tree)
    assert "tie at p = 2 and p = 3, and the tree is ahead from p = 4 on" in PAGE
    assert {p for p in tree if server[p] == tree[p]} == {2, 3}
    assert all(tree[p] < server[p] for p in range(4, 18))
    [least] = formulas("2 * (p - 1) / p * B * beta")
    assert elements["sharded_parameter_server"] == ring
    assert all(evaluate(least, p, beta=1) == 4 * ring[p] for p in ring)
    assert all(ring[p] < min(server[p], tree[p]) for p in ring)


def test_lower_bound() -> None:
    [bound] = formulas("2 * (p - 1) / p * n")
    for p in WORLD_SIZES:
        assert float(evaluate(bound, p)) == pytest.approx(lower_bound_elements(p, elements_of(p)))


def test_fold_example_and_its_bytes() -> None:
    nodes = {p: nodes_of_ranks(16, p) for p in range(1, 17)}
    assert "5, 5 and 6 of 16 micro-batches" in PAGE
    assert [len(leaf_share(16, 3, rank)) for rank in range(3)] == [5, 5, 6]
    assert "they hold 2, 3 and 2 sums" in PAGE
    assert nodes[3] == [2, 3, 2]
    assert (
        "m is on any number of workers at most 3 for 16 micro-batches and\nat most 5 for 64" in PAGE
    )
    assert max(map(max, nodes.values())) == 3
    assert max(max(nodes_of_ranks(64, p)) for p in range(1, 65)) == 5
    # Over all ranks, what is sent is what is received.
    sent, received = formulas("(m + 1) * (p - 1) / p * n", "(M - m) / p * n + (p - 1) / p * n")
    for p, held in nodes.items():
        total = sum(held)
        out = sum(evaluate(sent, p, m=m, M=total) for m in held)
        assert out == sum(evaluate(received, p, m=m, M=total) for m in held)


def nodes_of_ranks(num_leaves: int, world_size: int) -> list[int]:
    return [
        len(largest_nodes(num_leaves, leaf_share(num_leaves, world_size, rank)))
        for rank in range(world_size)
    ]
