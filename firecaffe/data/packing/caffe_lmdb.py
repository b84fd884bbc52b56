"""Caffe's LMDBs as a source: each value is a Datum message, encoded or raw.

Source: BVLC/caffe, tools/convert_imageset.cpp.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from firecaffe.data.caffe_datum import parse_datum
from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.packing.part import MOST_CLASSES, Part, Source
from firecaffe.errors import DataError


def is_lmdb(path: Path) -> bool:
    return (path / "data.mdb").is_file()


def open_lmdbs(by_part: Mapping[str, Path], about: Path, bgr: bool) -> Source:
    """Raises: DataError if a database is damaged, or its images are not alike."""
    try:
        import lmdb
        from google.protobuf.message import DecodeError
    except ImportError:
        raise DataError(
            f"{about}: Caffe's LMDBs need lmdb and protobuf; pip install 'firecaffe[lmdb]'"
        ) from None
    kinds: set[tuple[str, tuple[int, ...]]] = set()
    parts = {}
    largest = 0
    for name, path in by_part.items():
        try:
            database = lmdb.open(str(path), readonly=True, lock=False, readahead=False)
            with database.begin(buffers=True) as view:
                rows = []
                for key, value in view.cursor():
                    found = parse_datum(value)
                    raw = (found.channels, found.height, found.width)
                    kinds.add(("jpeg", ()) if found.encoded else ("raw", raw))
                    rows.append((bytes(key), int(found.label), len(found.data)))
        except (lmdb.Error, DecodeError) as error:
            raise DataError(f"{path}: not a whole LMDB of Datums, {error}") from error
        if not rows:
            raise DataError(f"{path}: holds no images")
        labels = [label for _, label, _ in rows]
        if min(labels) < 0 or max(labels) >= MOST_CLASSES:
            wrong = min(labels) if min(labels) < 0 else max(labels)
            raise DataError(f"{path}: has label {wrong}, expected 0 to {MOST_CLASSES - 1:,}")
        largest = max(largest, *labels)
        parts[name] = Part(
            [f"{path.name}:{key.decode('ascii', 'replace')}" for key, _, _ in rows],
            labels,
            [size for _, _, size in rows],
            _reader(database, [key for key, _, _ in rows], bgr),
        )
    if len(kinds) > 1:
        shown = ", ".join(f"{kind} {'x'.join(map(str, shape))}" for kind, shape in sorted(kinds))
        raise DataError(f"{about}: its images are not alike ({shown[:200]})")
    kind, shape = kinds.pop()
    order = ", blue first" if kind == "raw" and bgr and shape[0] == 3 else ""
    classes = list(map(str, range(largest + 1)))
    return Source(kind, shape, classes, parts, f"the LMDBs of {about.name}{order}")


def _reader(database: Any, keys: list[bytes], bgr: bool) -> Any:
    def read(number: int) -> bytes:
        with database.begin(buffers=True) as view:
            found = parse_datum(view.get(keys[number]))
        content = bytes(found.data)
        if found.encoded:
            return content
        size = found.channels * found.height * found.width
        if len(content) != size:
            raise BrokenSampleError(f"{len(content)} bytes of pixels, expected {size}")
        if bgr and found.channels == 3:
            planes = np.frombuffer(content, np.uint8).reshape(3, -1)
            return planes[::-1].tobytes()
        return content

    return read
