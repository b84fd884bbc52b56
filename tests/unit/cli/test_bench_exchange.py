"""The words of `firecaffe bench exchange`: sizes as nccl-tests has them, rates, exchanges."""

import re

import pytest

from firecaffe.cli.bench_exchange import (
    make_parser,
    make_plan,
    parse_compressors,
    parse_exchanges,
    parse_link,
    parse_size,
    sizes,
)
from firecaffe.errors import RecipeError
from firecaffe.exchange import EXCHANGES

IN_BRACKETS = "hierarchical(tree,ring),ring,hierarchical(parameter_server,tree)"


def test_sizes_are_in_units_of_1024_and_rates_of_1000() -> None:
    for text, size in (("4", 4), ("64K", 65536), ("128M", 134217728), ("1G", 1073741824)):
        assert parse_size("-b", text) == size
    for text, rate in (("9600", 9600), ("56k", 56e3), ("200M", 200e6), ("2.5G", 2.5e9)):
        assert parse_link(text) == rate


@pytest.mark.parametrize("text", ["", "0", "2", "10", "-8", "8B", "1k", "1 K", "1.5K", "1e6", "٨"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"-e is {text!r}; it must be bytes")):
        parse_size("-e", text)


@pytest.mark.parametrize("text", ["", "0.0G", "-1G", "25GB", "1g", "1K", "1 G", "1e9", ".5G"])
def test_no_rates(text: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(f"--link is {text!r}; it must be bits per")):
        parse_link(text)


def test_series_of_sizes() -> None:
    assert sizes(8, 64, 2) == sizes(8, 100, 2) == (8, 16, 32, 64)
    assert sizes(12, 1000, 8) == (12, 96, 768)
    assert sizes(4096, 4096, 2) == (4096,)
    # By default that of nccl-tests, from 8 bytes to 128 MiB.
    plan = make_plan(make_parser().parse_args([]))
    assert plan.sizes_bytes == tuple(2**power for power in range(3, 28))
    assert (plan.compressors, plan.shared_memory) == ((), True)


def test_the_control_always_takes_part_and_each_exchange_once() -> None:
    assert parse_exchanges("ring,tree,ring") == ("native", "ring", "tree")
    assert parse_exchanges("native") == ("native",)
    assert sorted(parse_exchanges("all")) == sorted(EXCHANGES)
    assert parse_exchanges("all")[0] == "native"
    # Commas within brackets are of the name.
    assert ",".join(parse_exchanges(IN_BRACKETS)) == f"native,{IN_BRACKETS}"


def test_compressors_come_in_a_list_each_once() -> None:
    assert parse_compressors("int8,top_k,int8,one_bit") == ("int8", "top_k", "one_bit")
    plan = make_plan(make_parser().parse_args(["--compressors", "int8", "--no-shared-memory"]))
    assert (plan.compressors, plan.shared_memory) == (("int8",), False)


@pytest.mark.parametrize("text", ["", "gzip", "int8,", "none"])
def test_no_compressors(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--compressors: no compressor '.*'; it must be some of"):
        parse_compressors(text)


NO_EXCHANGES = {
    **dict.fromkeys(("", "rign", "ring,", "ring, tree", "all,ring", "auto"), "no exchange '"),
    **dict.fromkeys(("hierarchical(tree", "tree)"), "no exchange '"),
    "tree,hierarchical(tree,rign)": "outer is 'rign'",
    "hierarchical(tree,native)": "outer is 'native'",
}


@pytest.mark.parametrize(("text", "said"), NO_EXCHANGES.items())
def test_no_exchanges(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=f"^--exchanges: .*{said}"):
        parse_exchanges(text)
