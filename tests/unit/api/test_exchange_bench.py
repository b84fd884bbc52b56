"""The words of `firecaffe bench exchange`: sizes as nccl-tests has them, rates, exchanges."""

import re

import pytest

from firecaffe.api.exchange_bench import (
    parse_compressors,
    parse_exchanges,
    parse_link,
    parse_size,
    sizes,
)
from firecaffe.cli.bench import make_parser_bench_exchange
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4", 4), ("8", 8), ("1K", 1024), ("64K", 65536), ("128M", 134217728), ("1G", 1073741824)],
)
def test_sizes_are_in_units_of_1024(text: str, size_bytes: int) -> None:
    assert parse_size("minbytes", text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "0", "2", "10", "-8", "8B", "1k", "1KB", "1 K", "1.5K", "1e6", "K", "٨"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"maxbytes is {text!r}; it must be bytes")):
        parse_size("maxbytes", text)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("9600", 9600), ("56k", 56e3), ("200M", 200e6), ("1G", 1e9), ("2.5G", 2.5e9)],
)
def test_rates_are_in_units_of_1000(text: str, bits_per_s: float) -> None:
    assert parse_link(text) == bits_per_s


@pytest.mark.parametrize(
    "text", ["", "0", "0.0G", "-1G", "1Gbit", "25GB", "1g", "1K", "1 G", "1e9", ".5G", "inf"]
)
def test_no_rates(text: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"link is {text!r}; it must be bits per")):
        parse_link(text)


@pytest.mark.parametrize(
    ("words", "series"),
    [
        ((8, 64, 2), (8, 16, 32, 64)),
        ((8, 100, 2), (8, 16, 32, 64)),
        ((12, 1000, 8), (12, 96, 768)),
        ((4096, 4096, 2), (4096,)),
    ],
)
def test_series_of_sizes(words: tuple[int, int, int], series: tuple[int, ...]) -> None:
    assert sizes(*words) == series


def test_default_series_is_nccl_tests_from_8_bytes_to_128_mebibytes() -> None:
    series = sizes(parse_size("minbytes", "8"), parse_size("maxbytes", "128M"), 2)
    assert series == tuple(2**power for power in range(3, 28))


def test_the_control_always_takes_part_and_each_exchange_once() -> None:
    assert parse_exchanges("ring,tree,ring") == ("native", "ring", "tree")
    assert parse_exchanges("native") == ("native",)
    everything = parse_exchanges("all")
    assert everything[0] == "native"
    assert sorted(everything) == sorted(EXCHANGES)


def test_commas_within_brackets_are_of_the_name() -> None:
    text = "hierarchical(tree,ring),ring,hierarchical(parameter_server,tree)"
    assert parse_exchanges(text) == (
        "native",
        "hierarchical(tree,ring)",
        "ring",
        "hierarchical(parameter_server,tree)",
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hierarchical(ring,tree)", "inner is 'ring'"),
        ("tree,hierarchical(tree,rign)", "outer is 'rign'"),
        ("hierarchical(tree,native)", "outer is 'native'"),
    ],
)
def test_no_hierarchical_exchanges(text: str, part: str) -> None:
    with pytest.raises(RecipeError, match=rf"^exchanges: .*{part}"):
        parse_exchanges(text)


def test_compressors_come_in_a_list_each_once() -> None:
    assert parse_compressors("int8,top_k,int8,one_bit") == ("int8", "top_k", "one_bit")


@pytest.mark.parametrize("text", ["", "gzip", "int8,", "none"])
def test_no_compressors(text: str) -> None:
    with pytest.raises(RecipeError, match=r"compressors: no compressor '.*'; it must be some of"):
        parse_compressors(text)


@pytest.mark.parametrize(
    ("argv", "is_shared"),
    [([], True), (["--shared-memory"], True), (["--no-shared-memory"], False)],
)
def test_memory_is_shared_as_in_training(argv: list[str], is_shared: bool) -> None:
    assert make_parser_bench_exchange().parse_args(argv).shared_memory is is_shared


@pytest.mark.parametrize(
    "text", ["", "rign", "ring,", "ring, tree", "all,ring", "auto", "hierarchical(tree", "tree)"]
)
def test_no_exchanges(text: str) -> None:
    with pytest.raises(RecipeError, match=r"exchanges: no exchange '.*'; it must be all, or"):
        parse_exchanges(text)
