"""docs/exchange.md says what codecs do: its bytes are those of `encode`, its example adds up."""

import re
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest
import torch

from firecaffe.cluster.world import World
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES
from firecaffe.exchange.leaves import leaf_share, num_nodes
from firecaffe.exchange.route import keeps_tree_order
from firecaffe.gradients.compressors import COMPRESSORS, make_compressor
from firecaffe.gradients.compressors.codec import ROW, Layout, LowRank, RowCodec, TensorCodec
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.config import TrainConfig
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.worker_numbers import check_ranks
from firecaffe.transport.fold_nodes import NodeWire
from tests.habits.test_exchange_page import cells, evaluate

PAGE = (Path(__file__).parents[2] / "docs" / "exchange.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## Codecs\n")[1].split("\n## ")[0]
SHAPE = (1024, 1024)
ELEMENTS = prod(SHAPE)


def table() -> dict[str, dict[str, str]]:
    """The cells of the section's table, by codec and by heading."""
    headings, _, *rows = [cells(line) for line in SECTION.splitlines() if line.startswith("|")]
    named = [dict(zip(headings, row, strict=True)) for row in rows]
    return {row["codec"].strip("`"): row for row in named}


def value(formula: str) -> Fraction:
    a, b = SHAPE
    return Fraction(evaluate(f"`{formula}`", 1, n=ELEMENTS, a=a, b=b))


def formulas(name: str) -> list[Fraction]:
    return [
        value(formula) for formula in re.findall(r"`([^`]+)`", table()[name]["bytes per element"])
    ]


def noise(step: int = 0) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))


class CountingWire(NodeWire):
    """One node, and the bytes of it that would travel one way."""

    def __init__(self) -> None:
        super().__init__(World(0, 1, torch.device("cpu")), 1)
        self.node_bytes = 0

    def sum_nodes(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        self.node_bytes += vectors[0].nbytes
        return super().sum_nodes(vectors)


def test_every_codec_is_a_row_and_nothing_else_is() -> None:
    assert tuple(table()) == tuple(COMPRESSORS)


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if name != "threshold"])
def test_bytes_are_those_of_encode(name: str) -> None:
    [expected] = formulas(name)
    codec = COMPRESSORS[name]
    match codec:
        case RowCodec():
            found = codec.encode(noise()).nbytes
        case TensorCodec():
            found = codec.encode(noise(), torch.zeros(ELEMENTS)).nbytes
        case LowRank():
            wire = CountingWire()
            layout = Layout(("matrix",), ((0, ELEMENTS),), (SHAPE,))
            make_compressor(name, [layout]).reduce(0, [(0, noise())], wire)
            found = wire.node_bytes
    assert Fraction(found, ELEMENTS) == expected


def test_bytes_of_threshold_are_about_and_at_most() -> None:
    about, most = formulas("threshold")
    codec = COMPRESSORS["threshold"]
    assert isinstance(codec, TensorCodec)
    # A random walk reaches 8 deviations after some 64 steps. An eighth of the elements will do.
    few = ELEMENTS // 8
    memory = torch.zeros(few)
    found = []
    for step in range(160):
        x = memory + noise(step)[:few]
        payload = codec.encode(x, memory)
        memory = x - codec.decode(payload, few)
        found.append(payload.nbytes / few)
    steady = sum(found[80:]) / 80
    assert steady == pytest.approx(float(about), rel=0.25)
    # As many entries as elements: all of one magnitude, which then is tau.
    ones = torch.ones(ELEMENTS)
    assert codec.encode(ones, ones).nbytes == most * ELEMENTS


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_encoded_and_remembered(name: str) -> None:
    row, codec = table()[name], COMPRESSORS[name]
    kind = {RowCodec: "rows", TensorCodec: "payloads", LowRank: "two thin matrices"}[type(codec)]
    assert row["what travels, and how"].startswith(f"{kind}: ")
    if isinstance(codec, RowCodec):
        assert row["what is encoded"].startswith(f"rows of {ROW}")
        assert (row["memory of each node"] == "none") == (not codec.remembers)
    else:
        assert row["memory of each node"] != "none"
    author, year = row["source"].split()[0].rstrip(","), row["source"].split()[-1]
    assert any(author in s and year[-4:] in s for s in PAGE.split("## Sources")[1].splitlines())


def test_the_example_of_a_level() -> None:
    def check(workers: int, level: int) -> None:
        words = ExchangeConfig(compressor="int8", compressor_level=level)
        check_ranks(Recipe(train=TrainConfig(64, 1), exchange=words), workers, workers, False)

    assert "64 micro-batches on up to 8 workers: level 3" in SECTION
    assert num_nodes(64, 3) == 8
    check(8, 3)
    with pytest.raises(RecipeError, match="9 ranks but only 8 sums of 8 micro-batches"):
        check(9, 3)
    # The next level would be too high for 8 workers.
    with pytest.raises(RecipeError):
        check(8, 4)
    assert [len(leaf_share(64, 4, rank, 3)) // 8 for rank in range(4)] == [2] * 4

    def sent(m: int, per_element: Fraction) -> str:
        """Bytes an element, by 8 workers of m nodes each."""
        return f"{float(evaluate(vectors, 8, m=m) * per_element):.2f}"

    vectors = "`(m + 1) * (p - 1) / p`"
    assert f"sends {vectors} times the encoded vector" in SECTION
    [int8] = formulas("int8")
    assert f"send {sent(1, int8)} bytes an element" in SECTION
    assert f"float32 rows would be {sent(1, Fraction(4))}" in SECTION
    assert f"on each worker, it would be {sent(8, int8)}, more than without a codec" in SECTION


def test_the_refused_exchanges_are_named() -> None:
    sentence = SECTION.split("not made for tree order (")[1].split(")")[0]
    refused = {name for name in EXCHANGES if not keeps_tree_order(name)}
    assert refused == {name for name in EXCHANGES if f"`{name}`" in sentence}
    for name in EXCHANGES:
        recipe = Recipe(exchange=ExchangeConfig(algorithm=name, compressor="int8"))
        if name in refused:
            with pytest.raises(RecipeError, match="use tree"):
                check_recipe(recipe)
        else:
            check_recipe(recipe)
