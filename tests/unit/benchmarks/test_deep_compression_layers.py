"""Deep Compression's layers beside ours: means over seeds, and figures that are typed rightly."""

from typing import Any

import pytest

from benchmarks.deep_compression_layers import THEIRS, make_page


def record(kept: float = 0.1, network: str = "lenet_300_100") -> dict[str, Any]:
    """Of each layer a share is kept, in 4 bits for where and 2 for which."""
    rows = [
        {
            "name": f"{layer}.weight",
            "size": each.weights,
            "kept_share": kept,
            "bytes": 0.08 * each.weights,
            "mask_bytes": kept * 4 / 8 * each.weights,
            "symbol_bytes": kept * 2 / 8 * each.weights,
        }
        for layer, each in THEIRS.get(network, {}).items()
    ]
    return {"network": network, "scheme": "mine", "target": None, "ratio": 50.0, "tensors": rows}


def test_layers_stand_beside_theirs_in_bits_of_a_kept_weight() -> None:
    page = make_page([record(0.05), record(0.15)])
    assert "of 2 seeds, 50.0x in all" in " ".join(page.split())
    assert "| ip1 | 235,200 | 8% | 10.0% | 4.4 | 2.0 | 3.7 | 4.0 | 2.32% | 2.00% |" in page


def test_a_network_that_is_not_in_their_tables_has_none() -> None:
    assert make_page([record(network="nin_small")]) == ""


@pytest.mark.parametrize("network", THEIRS)
def test_their_shares_are_what_their_bits_come_to(network: str) -> None:
    """With the values themselves, of 32 bits: so that no figure is typed wrongly. What is left are
    weights that are kept for distances too long for their bits.
    """
    for each in THEIRS[network].values():
        bits = each.weights * each.kept * (each.bits + each.index_bits) + 32 * 2**each.book_bits
        assert bits / 32 / each.weights == pytest.approx(each.share, rel=0.15)
