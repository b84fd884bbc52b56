"""Deep Compression's layers beside ours, from records of `firecaffe compress`: NET.json.

    python -m benchmarks.compression.deep_compression_layers RECORD.json…

Records of one network, scheme and target are seeds, whose means stand in one table.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from firecaffe.compression.transfer import BYTES_PER_WEIGHT

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Theirs:
    """A layer of Deep Compression: what is kept, and what it takes in the end."""

    weights: int
    kept: float
    """Share of the weights."""
    book_bits: int
    """Of an index into the layer's values."""
    bits: float
    """Of a kept weight's value, with Huffman's code."""
    index_bits: float
    """Of its distance to the one before, with Huffman's code."""
    share: float
    """Bytes of the layer over 4 bytes a weight."""


THEIRS: dict[str, dict[str, Theirs]] = {
    "lenet_300_100": {
        "ip1": Theirs(235_200, 0.08, 6, 4.4, 3.7, 0.0232),
        "ip2": Theirs(30_000, 0.09, 6, 4.4, 4.3, 0.0304),
        "ip3": Theirs(1_000, 0.26, 6, 4.3, 3.2, 0.1270),
    },
    "lenet": {
        "conv1": Theirs(500, 0.66, 8, 7.2, 1.5, 0.6745),
        "conv2": Theirs(25_000, 0.12, 8, 7.2, 3.9, 0.0528),
        "ip1": Theirs(400_000, 0.08, 5, 4.5, 4.5, 0.0245),
        "ip2": Theirs(5_000, 0.19, 5, 5.2, 3.7, 0.0613),
    },
}
"""By network and layer. Source: Han, Mao and Dally 2016, tables 2 and 3."""

THEIR_RATIOS = {"lenet_300_100": 40, "lenet": 39}
"""Source: the same, table 1."""

HEAD = """
### {title}, layer by layer

Theirs is Deep Compression (Han, Mao and Dally 2016, tables 2 and 3), {theirs}x in all; ours the
mean of {seeds} seeds, {ours}x in all. Bits are of a kept weight: for its value, and for where it
is. The last share has the layer's values too.

"""

COLUMNS = (
    *("layer", "weights", "kept, theirs", "ours", "value bits, theirs", "ours"),
    *("where bits, theirs", "ours", "of 4 bytes a weight, theirs", "ours"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path, help="NET.json of each seed")
    options = parser.parse_args()
    print(make_page([json.loads(path.read_text()) for path in options.records]), end="")


def make_page(records: Sequence[Record]) -> str:
    """A table for all seeds of a network, scheme and target; none of other networks."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for each in records:
        if each["network"] not in THEIRS:
            continue
        key = (each["network"], each["scheme"], each["target"] or "")
        groups.setdefault(key, []).append(each)
    page = ""
    for (network, scheme, target), seeds in sorted(groups.items()):
        title = f"{network}, scheme {scheme}" + (f", target {target}" if target else "")
        ratio = fmean(each["ratio"] for each in seeds)
        page += HEAD.format(
            title=title, seeds=len(seeds), ours=f"{ratio:.1f}", theirs=THEIR_RATIOS[network]
        )
        page += _table(COLUMNS, [_layer(*each, seeds) for each in THEIRS[network].items()])
    return page


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _layer(layer: str, theirs: Theirs, seeds: Sequence[Record]) -> list[str]:
    rows = [row for each in seeds for row in each["tensors"] if row["name"] == f"{layer}.weight"]
    kept = [row["kept_share"] * row["size"] for row in rows]

    def bits(word: str) -> float:
        """A kept weight's."""
        return fmean(8 * row[word] / count for row, count in zip(rows, kept, strict=True))

    whole = theirs.weights * BYTES_PER_WEIGHT
    return [
        *(layer, f"{theirs.weights:,}"),
        *(f"{theirs.kept:.0%}", f"{fmean(kept) / theirs.weights:.1%}"),
        *(f"{theirs.bits:.1f}", f"{bits('symbol_bytes'):.1f}"),
        *(f"{theirs.index_bits:.1f}", f"{bits('mask_bytes'):.1f}"),
        *(f"{theirs.share:.2%}", f"{fmean(row['bytes'] for row in rows) / whole:.2%}"),
    ]


if __name__ == "__main__":
    main()
