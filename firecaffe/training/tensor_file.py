"""Safetensors files that are written and read one tensor at a time, and other stored tensors.

The format is 8 bytes with the header's length, a header of JSON with each tensor's type, shape and
place, and then the tensors. The library writes only tensors that are all in memory at once.
Source: https://github.com/huggingface/safetensors#format
"""

import json
import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from firecaffe.errors import CheckpointError
from firecaffe.files import create_empty, open_regular
from firecaffe.transport.collect import Whole


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors that are all in memory. Raises OSError, also where the library has its own."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error


class Stored(Mapping[str, Tensor]):
    """Stored tensors by name. A tensor, or some of its rows, is read when it is asked for."""

    @abstractmethod
    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor, without reading it."""

    def rows(self, name: str, rows: range, dim: int = 0) -> Tensor:
        """Return consecutive rows of a tensor, along one of its dimensions."""
        return self[name].narrow(dim, rows.start, len(rows))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self[name].dtype

    def full_name(self, name: str) -> str:
        return name

    def __len__(self) -> int:
        return sum(1 for _ in self)


class StoredByName(Stored):
    def __init__(self, by_name: Mapping[str, Any]) -> None:
        self._by_name = by_name

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


class InMemory(StoredByName):
    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._by_name[name]
        return tensor


class Under(Stored):
    """The tensors whose names begin with PREFIX/, by the rest of their names."""

    def __init__(self, stored: Stored, prefix: str) -> None:
        self._stored, self._prefix = stored, f"{prefix}/"

    def full_name(self, name: str) -> str:
        return self._stored.full_name(self._prefix + name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(self._prefix + name)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored.dtype(self._prefix + name)

    def rows(self, name: str, rows: range, dim: int = 0) -> Tensor:
        return self._stored.rows(self._prefix + name, rows, dim)

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._prefix + name in self._stored

    def __iter__(self) -> Iterator[str]:
        names = (name for name in self._stored if name.startswith(self._prefix))
        return (name.removeprefix(self._prefix) for name in names)


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
MAX_NUMBERS = torch.iinfo(torch.int64).max
DTYPE_BY_NAME = {word: dtype for dtype, word in DTYPES.items()}


class TensorPlace(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, listed: Sequence[Whole], tensors: Iterable[tuple[str, Tensor]]
) -> OSError | None:
    """Write tensors as they arrive, in the order of `listed`. Returns the disk's error, if any."""
    coming = iter(tensors)
    problem = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(create_empty(path), "wb") as file:
            file.write(_header(listed))
            for _, tensor in coming:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                del tensor  # free it before the next one comes
    except OSError as error:
        problem = error
    for _ in coming:  # other ranks send the rest anyway
        pass
    return problem


class TensorFile(StoredByName):
    """A file's tensors, each read into new memory.

    The library reads only the header, because it maps the file: mapped pages count as memory of
    this process, and if the disk fails or the file is cut short, a signal ends the process.
    """

    def __init__(self, path: Path) -> None:
        """Read the header. Raises: CheckpointError if the file is not in this format."""
        self._path, self._places = path, dict[str, TensorPlace]()
        super().__init__(self._places)
        try:
            with open_regular(path) as file:
                start = 8 + int.from_bytes(file.read(8), "little")
            with safe_open(path, framework="pt") as opened:
                for name in opened.offset_keys():  # contiguous, as the format requires
                    tensor = opened.get_slice(name)
                    dtype = DTYPE_BY_NAME[tensor.get_dtype()]
                    place = self._places[name] = TensorPlace(
                        dtype, tuple(tensor.get_shape()), start
                    )
                    start += place.nbytes
                    # An empty tensor may have sizes that torch cannot represent.
                    if prod(size or 1 for size in place.shape) > MAX_NUMBERS:
                        raise ValueError(f"{name} has the shape {list(place.shape)}")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._places[name].dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name, self.shape(name), 0)

    def rows(self, name: str, rows: range, dim: int = 0) -> Tensor:
        """Read consecutive rows, and no others if `dim` is 0. Raises: IndexError."""
        if dim:
            return super().rows(name, rows, dim)
        num_rows, *row = self.shape(name)
        if not 0 <= rows.start <= rows.stop <= num_rows:
            raise IndexError(f"{name} has {num_rows} rows, not {rows.start} to {rows.stop}")
        row_bytes = prod(row) * self.dtype(name).itemsize
        return self._read(name, (len(rows), *row), rows.start * row_bytes)

    def _read(self, name: str, shape: tuple[int, ...], offset: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype(name))
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(self._places[name].start + offset)
                rest = tensor.reshape(-1).view(torch.uint8).numpy().data
                while len(rest) and (count := file.readinto(rest)):
                    rest = rest[count:]
        except OSError as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read ({error})") from error
        if len(rest):
            raise CheckpointError(f"{self._path}: {name} is cut short")
        return tensor


def _header(listed: Sequence[Whole]) -> bytes:
    places = {}
    start = 0
    for whole in listed:
        stop = start + whole.nbytes
        places[whole.name] = {
            "dtype": DTYPES[whole.dtype],
            "shape": list(whole.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text
