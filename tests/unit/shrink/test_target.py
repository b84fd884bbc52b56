"""Targets as people type them."""

import pytest

from firecaffe.errors import RecipeError
from firecaffe.shrink.start_network import parse_target


@pytest.mark.parametrize(
    ("word", "kind", "value"),
    [
        ("40x", "ratio", 40),
        ("1.5X", "ratio", 1.5),
        ("27KB", "bytes", 27_000),
        ("27 kb", "bytes", 27_000),
        ("2KiB", "bytes", 2048),
        ("0.5MB", "bytes", 500_000),
        ("900B", "bytes", 900),
        ("0.1points", "points", 0.1),
        ("0 points", "points", 0),
        (".3point", "points", 0.3),
    ],
)
def test_each_unit(word: str, kind: str, value: float) -> None:
    found = parse_target(word)
    assert found.kind == kind
    assert found.value == pytest.approx(value)
    assert found.is_of_size == (kind != "points")


@pytest.mark.parametrize(
    "word", ["", "x", "40", "-3x", "40xx", "27 kilos", "nanx", "1e3KB", "inf", "9" * 400 + "x"]
)
def test_what_is_no_target(word: str) -> None:
    with pytest.raises(RecipeError, match=r"--target is .*expected a ratio \(40x\)"):
        parse_target(word)


@pytest.mark.parametrize("word", ["1x", "0.5x", "0x", "0KB", "0.4B"])
def test_what_can_be_no_file(word: str) -> None:
    with pytest.raises(RecipeError, match=r"--target is .* must be"):
        parse_target(word)


def test_a_ratio_is_the_whole_file_against_four_bytes_a_weight() -> None:
    """LeNet-300-100 of Deep Compression: 266,610 weights, 40 times, 27 KB."""
    assert parse_target("40x").most_bytes(266_610) == 26_661
    assert parse_target("27KB").most_bytes(266_610) == 27_000
