"""docs/reference/fcz.md is enough to decode a file: decoding by it alone gives what was written."""

import re
from pathlib import Path

import numpy as np
import pytest

from firecaffe.compression.fcz import CODES, write
from firecaffe.compression.fcz.format import DICTIONARY, DTYPES
from firecaffe.compression.fcz.mask import FACTORS, cheapest_view
from firecaffe.compression.fcz.sequence import How, entropy_bytes
from tests.unit.compression.fcz import by_the_page
from tests.unit.compression.fcz.made import NETWORK, Tensors, bytes_of, pruned, small, smooth

TENSORS: dict[str, Tensors] = {
    "small": small(),
    "many": {"a": pruned((70, 90), 0.1, 30), "b": pruned((5000,), 0.01, 9000)},
    "neighbors": {"ip1.weight": smooth(12, 15, 60), "rest": pruned((30, 30), 0.9, 3)},
    "types": {dtype: np.arange(40).reshape(5, 8).astype(dtype) for dtype in DTYPES},
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", TENSORS)
def test_the_page_decodes_it(name: str, code: How) -> None:
    network, found = by_the_page.decode(bytes_of(TENSORS[name], code))
    assert network == NETWORK
    assert list(found) == list(TENSORS[name])
    for each, array in TENSORS[name].items():
        assert found[each] == (array.dtype.name, array.shape, array.tobytes()), each


def test_neighbors_are_found() -> None:
    """Lines have 15 pixels: the neighbors are about 15 before, and the mask is smaller."""
    weights = smooth(12, 15, 60)
    view, bits = cheapest_view(weights.reshape(-1) != 0, weights.shape, 1.0) or pytest.fail("none")
    assert view.transposed
    assert 14 <= view.distance <= 16
    share = float((weights != 0).mean())
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    assert bits < 0.95 * entropy


def test_signs_of_neighbors_are_used(tmp_path: Path) -> None:
    weights = smooth(12, 15, 60)
    report = write(tmp_path / "net.fcz", {"w": weights}, {})
    (tensor,) = report.tensors
    _, counts = np.unique(weights[weights != 0], return_counts=True)
    assert tensor.symbol_bytes < 0.6 * entropy_bytes(counts)


def test_the_page_has_the_tables() -> None:
    assert by_the_page.DICTIONARY == DICTIONARY  # of which a small header uses but a part
    assert f"its type: {', '.join(DTYPES)}, from 0" in by_the_page.PAGE
    *most, last = [f"{each * 64:.0f}" for each in FACTORS]
    assert f"{', '.join(most)} and {last} sixty-fourths" in " ".join(by_the_page.PAGE.split())
    assert re.findall(r"## The format, version (\d)", by_the_page.PAGE) == ["1"]
