"""A safetensors file that is written and read one tensor at a time.

The format is 8 bytes with the header's length, a header of JSON with each tensor's type, shape and
place, and then the tensors. The library writes a file from tensors that are all there at once.

Source: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from firecaffe.errors import CheckpointError
from firecaffe.transport.collect import Held

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
OF_WORD = {word: dtype for dtype, word in DTYPES.items()}


def write_tensors(path: Path, listed: Sequence[Held], tensors: Iterable[Tensor]) -> OSError | None:
    """Writes tensors as they come, in the order of `listed`. Goes through all of them also where
    the disk does not take one, for other ranks send them; then returns why.
    """
    coming = iter(tensors)
    problem = None
    try:
        with open(path, "wb") as file:
            file.write(_header(listed))
            for tensor in coming:
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        problem = error
    for _ in coming:
        pass
    return problem


class TensorFile(Mapping[str, Tensor]):
    """A file's tensors, each read when it is asked for, into memory of its own."""

    def __init__(self, path: Path) -> None:
        """Raises: CheckpointError where it is no such file."""
        self._path = path
        try:
            with safe_open(path, framework="pt"):
                pass  # the library has looked the header over, and the file's length
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._places: dict[str, dict[str, Any]] = json.loads(file.read(length))
            self._places.pop("__metadata__", None)
            self._dtypes = {name: OF_WORD[row["dtype"]] for name, row in self._places.items()}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        self._start = 8 + length

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        tensor = torch.empty(place["shape"], dtype=self._dtypes[name])
        # Not through a map of the file, whose pages would count as this process's memory.
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(self._start + place["data_offsets"][0])
                rest = tensor.reshape(-1).view(torch.uint8).numpy().data
                while len(rest) and (count := file.readinto(rest)):
                    rest = rest[count:]
        except OSError as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read ({error})") from error
        if len(rest):
            raise CheckpointError(f"{self._path}: {name} is cut short")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _header(listed: Sequence[Held]) -> bytes:
    places = {}
    start = 0
    for each in listed:
        stop = start + prod(each.shape) * each.dtype.itemsize
        places[each.name] = {
            "dtype": DTYPES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(places).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text
