"""Writes a network into a .fcz file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, get_args

import numpy as np
from numpy.typing import NDArray

from firecaffe.compression.fcz.format import (
    MOST_DIMENSIONS,
    MOST_NAME,
    MOST_TENSORS,
    BlockWriter,
    Outline,
    allowed_bytes,
    header_bytes,
)
from firecaffe.compression.fcz.gaps import bits_of_gaps, write_gaps
from firecaffe.compression.fcz.mask import TRIED, View, cheapest_view, write_mask
from firecaffe.compression.fcz.patterns import DTYPES, GAPS, MASK, patterns_of
from firecaffe.compression.fcz.report import FileReport, TensorReport, entropy_bytes
from firecaffe.compression.fcz.sequence import How
from firecaffe.compression.fcz.values import Kept, write_values
from firecaffe.errors import RecipeError
from firecaffe.files import written_aside

CODES: tuple[How, ...] = get_args(How)
"""The codings of a file: the best for each section, or one alone."""

CLEAR = 0.98
COPIED = 1 << 20


def write(
    path: str | Path,
    tensors: Mapping[str, NDArray[Any]],
    network: Mapping[str, Any],
    *,
    code: How = "best",
) -> FileReport:
    """Write tensors exactly. The file is never visible in part under its final name.

    The same tensors and network give the same bytes. Zeros and shared values are found in the
    tensors: pruned elements are 0, and a tensor of few distinct values has a codebook.

    Args:
        network: JSON that says how the network is made; `read` returns it.
        code: "huffman" codes distances and values as Deep Compression does; "range" by a range
            coder alone; "best" by the smallest in each section.

    Raises: RecipeError if a tensor's type cannot be written, the network is no JSON, or `read`
    would refuse the file because of its tensors' size; OSError.
    """
    if code not in CODES:
        raise RecipeError(f"code is {code!r}; expected one of {', '.join(CODES)}")
    outlines = [_outline(name, array) for name, array in tensors.items()]
    if len(outlines) > MOST_TENSORS:
        raise RecipeError(f"{len(outlines)} tensors; a .fcz file has at most {MOST_TENSORS}")
    path = Path(path)
    with TemporaryFile() as body:
        writer = BlockWriter(body)
        reports = [
            _write_tensor(writer, outline, array, code)
            for outline, array in zip(outlines, tensors.values(), strict=True)
        ]
        writer.flush()
        body_bytes = body.tell()
        try:
            header = header_bytes(network, outlines, body_bytes)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"the network of a .fcz file has to be JSON: {error}") from error
        file_bytes = len(header) + body_bytes
        needed, allowed = sum(outline.num_bytes for outline in outlines), allowed_bytes(file_bytes)
        if needed > allowed:
            raise RecipeError(
                f"{path}: tensors of {needed:,} bytes would be a file of {file_bytes:,}, of which "
                f"a reader allows {allowed:,}; expected a network that has weights"
            )
        body.seek(0)
        with _whole(path) as file:
            file.write(header)
            while part := body.read(COPIED):
                file.write(part)
    return FileReport(file_bytes, len(header), reports)


def _write_tensor(
    writer: BlockWriter, outline: Outline, array: NDArray[Any], code: How
) -> TensorReport:
    patterns = patterns_of(array)
    is_kept = patterns != 0
    size, kept = len(patterns), int(np.count_nonzero(is_kept))
    start = writer.bits
    writer.number(kept, size + 1)
    view = _write_positions(writer, is_kept, outline.shape, code) if 0 < kept < size else None
    mask_bits = writer.bits - start
    distinct, codebook_bits, symbol_bits, floor = 0, 0.0, 0.0, 0.0
    if kept:
        values = patterns if kept == size else patterns[is_kept]
        near = (view.matrix(patterns, outline.shape), view.distance) if view else ()
        cost = write_values(writer, Kept(values, outline.dtype == "float32", code, *near))
        distinct, codebook_bits, symbol_bits = cost.distinct, cost.codebook_bits, cost.symbol_bits
        floor = cost.floor_bits / 8
    return TensorReport(
        outline.name,
        outline.shape,
        outline.dtype,
        size,
        kept,
        distinct,
        mask_bits / 8,
        codebook_bits / 8,
        symbol_bits / 8,
        floor + entropy_bytes(np.array([kept, size - kept])),
    )


def _write_positions(
    writer: BlockWriter, is_kept: NDArray[np.bool_], shape: tuple[int, ...], code: How
) -> View | None:
    """Return the view of a mask that uses neighbors; None for others."""
    # A gain measured on a part has to be clear, because bits are slower than distances.
    clear = 1.0 if len(is_kept) <= TRIED else CLEAR
    enough = clear * bits_of_gaps(is_kept[:TRIED], code)
    cheapest = (
        None if code == "huffman" else cheapest_view(is_kept, shape, enough, writer.near_rows)
    )
    if cheapest is None or enough <= cheapest[1]:
        writer.number(GAPS, 2)
        write_gaps(writer, np.flatnonzero(is_kept), len(is_kept), code)
        return None
    view, _ = cheapest
    writer.number(MASK, 2)
    write_mask(writer, view, is_kept, shape)
    return view if view.distance else None


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    with written_aside(path) as aside, open(aside, "wb") as file:
        yield file


def _outline(name: str, array: NDArray[Any]) -> Outline:
    dtype = array.dtype.newbyteorder("=").name
    if dtype not in DTYPES:
        raise RecipeError(f"{name} is of {array.dtype}; a .fcz file has {', '.join(DTYPES)}")
    if array.ndim > MOST_DIMENSIONS or len(name.encode()) > MOST_NAME:
        raise RecipeError(
            f"{name:.80} has {array.ndim} dimensions and a name of {len(name.encode())} bytes; a "
            f".fcz file has at most {MOST_DIMENSIONS} and {MOST_NAME}"
        )
    return Outline(name, dtype, tuple(array.shape))
