"""Caffe's LMDBs of Datum messages as a source (BVLC/caffe, tools/convert_imageset.cpp)."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from firecaffe.data.caffe_records import check_protobuf, parse_datum
from firecaffe.data.dataset import BrokenSampleError
from firecaffe.data.lmdb_file import FILE, LmdbFile
from firecaffe.data.packing.part import MOST_CLASSES, Part, Source
from firecaffe.errors import DataError


def is_lmdb(path: Path) -> bool:
    return (path / FILE).is_file()


def open_lmdbs(by_part: Mapping[str, Path], about: Path, bgr: bool) -> Source:
    """Open databases. Raises DataError if one is damaged, or images differ in kind or shape."""
    check_protobuf(about)
    from google.protobuf.message import DecodeError

    kinds: set[tuple[str, tuple[int, ...]]] = set()
    parts = {}
    largest = 0
    for name, path in by_part.items():
        database = LmdbFile(path)
        labels, sizes = [], []
        for number in range(len(database)):
            try:
                datum = parse_datum(database.value(number))
            except DecodeError as error:
                raise DataError(f"{path}: not a whole LMDB of Datums, {error}") from error
            raw = (datum.channels, datum.height, datum.width)
            kinds.add(("jpeg", ()) if datum.encoded else ("raw", raw))
            labels.append(int(datum.label))
            sizes.append(len(datum.data))
        if not labels:
            raise DataError(f"{path}: holds no images")
        if min(labels) < 0 or max(labels) >= MOST_CLASSES:
            wrong = min(labels) if min(labels) < 0 else max(labels)
            raise DataError(f"{path}: has label {wrong}, expected 0 to {MOST_CLASSES - 1:,}")
        largest = max(largest, *labels)
        parts[name] = Part(
            [
                f"{path.name}:{database.key(number).decode('ascii', 'replace')}"
                for number in range(len(database))
            ],
            labels,
            sizes,
            _reader(database, bgr),
        )
    if len(kinds) > 1:
        shown = ", ".join(f"{kind} {'x'.join(map(str, shape))}" for kind, shape in sorted(kinds))
        raise DataError(f"{about}: its images are not alike ({shown[:200]})")
    kind, shape = kinds.pop()
    order = ", blue first" if kind == "raw" and bgr and shape[0] == 3 else ""
    classes = list(map(str, range(largest + 1)))
    return Source(kind, shape, classes, parts, f"the LMDBs of {about.name}{order}")


def _reader(database: LmdbFile, bgr: bool) -> Callable[[int], bytes]:
    def read(number: int) -> bytes:
        datum = parse_datum(database.value(number))
        content = bytes(datum.data)
        if datum.encoded:
            return content
        size = datum.channels * datum.height * datum.width
        if len(content) != size:
            raise BrokenSampleError(f"{len(content)} bytes of pixels, expected {size}")
        if bgr and datum.channels == 3:
            planes = np.frombuffer(content, np.uint8).reshape(3, -1)
            return planes[::-1].tobytes()
        return content

    return read
