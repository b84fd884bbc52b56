"""Published rates of one device as arrays, so that a fit can price all of them at once.

The arithmetic is that of `planner.compute_time.layer_s`; a test compares the two.
"""

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.planner.device_networks import BUILDERS
from firecaffe.models.kernel import KINDS, MULTIPLIES, Kernel
from firecaffe.models.layer_costs import Profile, profile_on
from firecaffe.planner.compute_time import HALF_PRECISION
from firecaffe.planner.library_rates import FLOAT32, HALF
from firecaffe.planner.offers import Sheet, sheets

FILE = Path(__file__).parents[1] / "published" / "devices.toml"
PROFILED = 2
ADAM = ("bert",)
"""Networks whose optimizer keeps two vectors; of the others one."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Row:
    source: str
    device: str
    family: str
    library: str
    precision: str
    channels_last: bool
    casts: bool
    has_update: bool
    is_fitted: bool
    net: str
    batch: int
    seconds: float

    @property
    def arithmetic(self) -> str:
        return HALF if self.precision in HALF_PRECISION else self.precision


def read(path: Path = FILE) -> tuple[dict[str, Sheet], list[Row]]:
    tables = tomllib.loads(path.read_text("utf-8"))
    by_key = sheets()
    return by_key, [row for table in tables["table"] for row in _rows(table, by_key)]


def _rows(table: Mapping[str, Any], by_key: Mapping[str, Sheet]) -> list[Row]:
    is_half = table["precision"] in HALF_PRECISION
    return [
        Row(
            source=table["source"],
            device=table["device"],
            family=by_key[table["device"]].family,
            library=table["library"],
            precision=table["precision"],
            channels_last=table.get("channels_last", False),
            casts=is_half and not table.get("pure", False),
            has_update=table["timed"] == "step",
            is_fitted=table.get("fit", True),
            net=net,
            batch=batch,
            seconds=value / 1e3 if table["unit"] == "ms" else batch / value,
        )
        for net, batch, value in table["rows"]
    ]


@cache
def profile_of(net: str) -> Profile:
    build, shape = BUILDERS[net]
    with torch.device("meta"):
        network = build()
    dtype = torch.float32 if len(shape) > 1 else torch.int64
    return profile_on(network, torch.zeros(PROFILED, *shape, dtype=dtype, device="meta"))


def kernels_of(net: str) -> list[tuple[Kernel, int]]:
    """The kernels of a network, with how often each comes."""
    counts = Counter(kernel for row in profile_of(net).layers for kernel in row.kernels)
    return list(counts.items())


def vectors_of(net: str) -> int:
    return 2 if net.startswith(ADAM) else 1


@dataclass(frozen=True)
class Kernels:
    """One entry for each kernel of each row."""

    row: Array
    starts: Array
    kind: Array
    flops: Array
    moved: Array
    weights: Array
    side: Array
    calls: Array
    """Of the kernel, in forward and backward."""
    count: Array
    in_float32: Array

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Kernels":
        entries: list[tuple[Any, ...]] = []
        starts = []
        for index, row in enumerate(rows):
            starts.append(len(entries))
            entries += [_entry(index, row, *pair) for pair in kernels_of(row.net)]
        columns = [np.array(column) for column in zip(*entries, strict=True)]
        return cls(columns[0], np.array(starts), *columns[1:])


def _entry(index: int, row: Row, kernel: Kernel, count: int) -> tuple[Any, ...]:
    side = min(kernel.side, kernel.rows * row.batch) if kernel.rows else kernel.side
    multiplies = kernel.kind in MULTIPLIES
    return (
        index,
        KINDS.index(kernel.kind),
        kernel.flops * row.batch,
        kernel.moved * row.batch,
        kernel.weights,
        max(1.0, side),
        2.0 + kernel.has_input_gradient if multiplies else 2.0,
        float(count),
        kernel.in_float32,
    )


def groups_of(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The tables that rows need: arithmetic and library."""
    return sorted({(row.arithmetic, row.library) for row in rows})


def is_tensor(arithmetic: str) -> bool:
    return arithmetic != FLOAT32
