"""docs/synchrony.md tells what the code has: its modes, and what measured shares come to."""

import re
from pathlib import Path

import pytest

from firecaffe.exchange.leaves import Shares, equal_shares
from firecaffe.synchrony.config import MODES
from firecaffe.synchrony.shares import GAIN, TOLERANCE, longest_s, next_shares

PAGE = (Path(__file__).parents[2] / "docs" / "synchrony.md").read_text()


def test_every_mode_has_a_row() -> None:
    table = PAGE.split("| `synchrony.mode` |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(MODES)


def test_what_can_be_won() -> None:
    rows = re.findall(
        r"^\| (\d+) \| ([\d, ]+): (\d+) \| ([\d, ]+): (\d+) \| ([\d.]+) \|", PAGE, re.M
    )
    assert len(rows) == 6
    seconds = [1.0, 1.0, 1.0, 2.0]
    for leaves, *said, factor in rows:
        equal = equal_shares(int(leaves), 4)
        measured = next_shares(int(leaves), seconds, equal)
        before, after = longest_s(equal, seconds), longest_s(measured, seconds)
        assert said == [counts(equal), f"{before:g}", counts(measured), f"{after:g}"]
        assert float(factor) == pytest.approx(before / after, abs=0.005)
    assert f"within {TOLERANCE * 100:g} % of it" in PAGE
    assert f"at least {GAIN * 100:g} % less" in PAGE


def counts(shares: Shares) -> str:
    return ", ".join(str(len(share)) for share in shares)
