"""explanation/exchange.md: its formulas are those of the schedules, its bytes those of `encode`."""

import ast
import re
from fractions import Fraction
from math import ceil, log2, prod
from typing import Any

import pytest
import torch

from firecaffe.cluster.world import World
from firecaffe.exchange import ALGORITHMS, EXCHANGES, NATIVE, find_schedule
from firecaffe.exchange.leaves import largest_nodes, leaf_share
from firecaffe.exchange.pipelined_tree import SEGMENT_ELEMENTS, num_segments
from firecaffe.exchange.route import adds_in_tree_order
from firecaffe.exchange.schedule import Schedule, lower_bound_elements
from firecaffe.gradients.compressors import COMPRESSORS, make_compressor
from firecaffe.gradients.compressors.codec import ROW, BucketLayout, LowRank, RowCodec, TensorCodec
from firecaffe.transport.fold_nodes import NodeWire
from tests.kit.models_pages import page, table

PAGE = "docs/explanation/exchange.md"
SCHEDULES, CODECS = table(PAGE, "exchange"), table(PAGE, "codec", "## Codecs")
WORLD_SIZES = range(1, 18)
OVER_NODES = "hierarchical(tree,ring)"
NODES = [(p, m) for p in WORLD_SIZES for m in range(1, p + 1) if p % m == 0]
GRAMMAR = (
    *(ast.Expression, ast.BinOp, ast.operator, ast.Compare, ast.Gt),
    *(ast.Call, ast.Name, ast.Load, ast.Constant),
)


def elements_of(world_size: int) -> int:
    """So that shards and segments are equally long: lcm(1, …, 16); 32640 is 16 * 17 * 120."""
    return 720720 if world_size <= 16 else 32640 * 22


def lg(x: Any) -> Any:
    """Exact at powers of two, so that formulas may be compared with ==."""
    exponent = log2(x)
    return int(exponent) if exponent.is_integer() else exponent


def evaluate(formula: str, p: int, **letters: int) -> Any:
    """The value of a formula of the page, in fractions."""
    n, q = elements_of(p), 2 ** (p.bit_length() - 1)
    known = {"p": p, "q": q, "r": p - q, "n": n, "B": 4 * n}
    known |= {"s": num_segments(n, SEGMENT_ELEMENTS), **letters}
    tree = ast.parse(formula.strip("`"), mode="eval")
    assert all(isinstance(node, GRAMMAR) for node in ast.walk(tree)), f"{formula} is no formula"
    values = {name: Fraction(value) for name, value in known.items()}
    code = compile(tree, formula, "eval")
    return eval(code, {"__builtins__": {}, "lg": lg, "ceil": ceil, **values})


def compare(row: dict[str, str], schedule: Schedule, ranks_per_node: int = 1) -> None:
    """The formulas of a row against the counts of a schedule."""

    def value(column: str, **prices: int) -> Any:
        return evaluate(row[column], schedule.world_size, m=ranks_per_node, **prices)

    def time(alpha: int = 0, beta: int = 0, gamma: int = 0) -> Any:
        return value("time", alpha=alpha, beta=beta, gamma=gamma)

    assert value("rounds") == len(schedule.rounds)
    busiest = value("elements through the busiest rank, one way")
    assert busiest == schedule.elements_of_busiest_rank()
    parts = time(alpha=1), time(beta=1), time(gamma=1)
    messages, elements = schedule.serial_messages(), schedule.serial_elements()
    assert parts == (messages, 4 * elements, schedule.serial_additions())
    assert time(3, 5, 7) == 3 * parts[0] + 5 * parts[1] + 7 * parts[2]


def test_rows_are_what_there_is() -> None:
    assert tuple(SCHEDULES) == (*ALGORITHMS, OVER_NODES, NATIVE)
    assert tuple(CODECS) == tuple(COMPRESSORS)
    for p in WORLD_SIZES:  # the vector of the formulas is cut into equal segments, evenly many
        segments = num_segments(elements_of(p), SEGMENT_ELEMENTS)
        assert (segments % 2, elements_of(p) % segments, elements_of(p) % p) == (0, 0, 0)


def test_tree_order_is_the_one_computed() -> None:
    for algorithm in EXCHANGES:
        cell = SCHEDULES[algorithm]["adds in tree order at"]
        named = {int(number) for number in re.findall(r"\d+", cell)}
        computed = {p for p in WORLD_SIZES if adds_in_tree_order(algorithm, p)}
        assert computed == (set(WORLD_SIZES) if cell == "every p" else named), algorithm
    assert SCHEDULES[OVER_NODES]["adds in tree order at"] == "p = m; p = 2 m where m = 2^k"
    over_nodes = {(p, m) for p, m in NODES if adds_in_tree_order(OVER_NODES, p, m)}
    assert over_nodes == {(p, m) for p, m in NODES if p == m or (p == 2 * m and m in (1, 2, 4, 8))}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_formulas_are_the_schedules(algorithm: str) -> None:
    for p in WORLD_SIZES:
        compare(SCHEDULES[algorithm], ALGORITHMS[algorithm](p, elements_of(p)))


def test_formulas_over_nodes_are_the_schedules() -> None:
    for p, m in NODES:
        compare(SCHEDULES[OVER_NODES], find_schedule(OVER_NODES, m)(p, elements_of(p)), m)


def test_formulas_between_the_lines() -> None:
    for formula, algorithm in (
        ("2 * (p - 1) * B * beta", "parameter_server"),
        ("2 * ceil(lg(p)) * B * beta", "tree"),
        ("2 * (p - 1) / p * B * beta", "ring"),
    ):
        assert f"`{formula}`" in page(PAGE)
        for p in WORLD_SIZES:
            schedule = ALGORITHMS[algorithm](p, elements_of(p))
            assert evaluate(formula, p, beta=1) == 4 * schedule.serial_elements()


def test_the_lower_bound_and_the_bytes_of_a_fold() -> None:
    bound, sent = "2 * (p - 1) / p * n", "(m + 1) * (p - 1) / p * n"
    received = "(M - m) / p * n + (p - 1) / p * n"
    assert all(f"`{formula}`" in page(PAGE) for formula in (bound, sent, received))
    for p in range(1, 17):
        assert float(evaluate(bound, p)) == pytest.approx(lower_bound_elements(p, elements_of(p)))
        held = [len(largest_nodes(16, leaf_share(16, p, rank))) for rank in range(p)]
        # Over all ranks, what is sent is what is received.
        assert sum(evaluate(sent, p, m=m) for m in held) == sum(
            evaluate(received, p, m=m, M=sum(held)) for m in held
        )


SHAPE = (256, 256)
ELEMENTS = prod(SHAPE)


class CountingWire(NodeWire):
    """One node, and the bytes of it that would travel one way."""

    def __init__(self) -> None:
        super().__init__(World(0, 1, torch.device("cpu")), 1)
        self.node_bytes = 0

    def sum_nodes(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        self.node_bytes += vectors[0].nbytes
        return super().sum_nodes(vectors)


def noise(step: int = 0) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))


def bytes_per_element(name: str) -> list[Any]:
    letters = dict(zip("nab", (ELEMENTS, *SHAPE), strict=True))
    formulas = re.findall(r"`([^`]+)`", CODECS[name]["bytes per element"])
    return [evaluate(formula, 1, **letters) for formula in formulas]


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "threshold"])
def test_bytes_are_those_of_encode(name: str) -> None:
    match codec := COMPRESSORS[name]:
        case RowCodec():
            size = codec.encode(noise()).nbytes
        case TensorCodec():
            size = codec.encode(noise(), torch.zeros(ELEMENTS)).nbytes
        case LowRank():
            wire, layout = CountingWire(), BucketLayout(("matrix",), ((0, ELEMENTS),), (SHAPE,))
            make_compressor(name, [layout]).reduce(0, [(0, noise())], wire)
            size = wire.node_bytes
    assert bytes_per_element(name) == [Fraction(size, ELEMENTS)]


def test_bytes_of_threshold_are_about_and_at_most() -> None:
    about, most = bytes_per_element("threshold")
    codec = COMPRESSORS["threshold"]
    assert isinstance(codec, TensorCodec)
    memory, sizes = torch.zeros(ELEMENTS), []
    for step in range(160):  # a random walk reaches 8 deviations after some 64
        x = memory + noise(step)
        payload = codec.encode(x, memory)
        memory = x - codec.decode(payload, ELEMENTS)
        sizes.append(payload.nbytes / ELEMENTS)
    assert sum(sizes[80:]) / 80 == pytest.approx(float(about), rel=0.25)
    # As many entries as elements: all of one magnitude, which then is tau.
    ones = torch.ones(ELEMENTS)
    assert codec.encode(ones, ones).nbytes == most * ELEMENTS


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_encoded_and_remembered(name: str) -> None:
    row, codec = CODECS[name], COMPRESSORS[name]
    kind = {RowCodec: "rows", TensorCodec: "payloads", LowRank: "two thin matrices"}[type(codec)]
    assert row["what travels, and how"].startswith(f"{kind}: ")
    remembers = row["memory of each node"] != "none"
    assert remembers == (codec.remembers if isinstance(codec, RowCodec) else True)
    assert not isinstance(codec, RowCodec) or row["what is encoded"].startswith(f"rows of {ROW}")


def test_every_source_is_in_the_list() -> None:
    sources = page(PAGE).split("## Sources")[1].splitlines()
    cited = [row["source"] for row in (*SCHEDULES.values(), *CODECS.values())]
    for work in "; ".join(cited).split("; "):
        if year := re.search(r"\d{4}", work):  # a backend has none
            author = work.split()[0].rstrip(",")
            assert any(author in line and year[0] in line for line in sources), work
