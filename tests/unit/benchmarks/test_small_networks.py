"""The page of networks made small says of its records what they say."""

from typing import Any

import pytest

from benchmarks.small_networks import THEIRS, make_page


def record(seed: int, network: str = "lenet_300_100") -> dict[str, Any]:
    """A file of 26,661 bytes whose error is 0.1 points larger, and 0.01 more with each seed; a
    tenth of each layer is kept, in 4 bits for where and 2 for which.
    """
    found = 0.98 - 0.001 * seed
    lost = 0.1 + 0.01 * seed
    rows = [
        {
            "name": f"{layer}.weight",
            "size": each.weights,
            "kept_share": 0.1,
            "bytes": 0.08 * each.weights,
            "mask_bytes": 0.05 * each.weights,
            "symbol_bytes": 0.025 * each.weights,
        }
        for layer, each in THEIRS.get(network, {}).items()
    ]
    return {
        "network": network,
        "scheme": "mine",
        "target": None,
        "float": {"test": found},
        "decoded": {"test": found - lost / 100},
        "lost": {"test": lost},
        "bytes": 26_661,
        "ratio": 40.0,
        "tensors": rows,
    }


def test_seeds_are_one_row_with_their_paired_difference() -> None:
    """Three seeds, 0.10, 0.11 and 0.12: Student's half interval is 4.303 x 0.01 / sqrt(3)."""
    page = make_page([record(seed) for seed in range(3)])
    assert "| lenet_300_100 | mine |  | 3 | 26,661 | 40.0x | 2.10 | 2.21 | +0.11 ± 0.02 |" in page


def test_layers_stand_beside_theirs_in_bits_of_a_kept_weight() -> None:
    page = make_page([record(0)])
    assert "| ip1 | 235,200 | 8% | 10.0% | 4.4 | 2.0 | 3.7 | 4.0 | 2.32% | 2.00% |" in page


def test_a_network_that_is_not_in_their_tables_has_no_layers() -> None:
    page = make_page([record(0, "nin_small")])
    assert "| nin_small |" in page
    assert "layer by layer" not in page


@pytest.mark.parametrize("network", THEIRS)
def test_their_shares_are_what_their_bits_come_to(network: str) -> None:
    """With the values themselves, of 32 bits: so that no figure is typed wrongly. What is left are
    weights that are kept for distances too long for their bits.
    """
    for each in THEIRS[network].values():
        bits = each.weights * each.kept * (each.bits + each.index_bits) + 32 * 2**each.book_bits
        assert bits / 32 / each.weights == pytest.approx(each.share, rel=0.15)
