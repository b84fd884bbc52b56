"""A safetensors file that is written and read one tensor at a time.

The format is 8 bytes with the header's length, a header of JSON with each tensor's type, shape and
place, and then the tensors. The library writes a file from tensors that are all there at once.

Source: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from firecaffe.comm.collect import Held
from firecaffe.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


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
            self._file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        self._names = list(self._file.keys())  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read ({error})") from error
        return tensor.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
