"""The tensors that a server keeps in addition to the weights.

    version/V/NAME             parameters and buffers at version V, while a learner computes with
                               them, or a gradient of that version waits to be applied
    gradient/STEP.PLACE/NAME   a gradient that waits for others of its update
    tail/STEP.PLACE/I          its loss and its changes to buffers
    mean_square/NAME           the gradients' mean square, for delay compensation

There are no more versions than works under way, so the staleness bounds their number. On a CPU,
versions beyond MAX_BYTES are in mapped files, whose pages the system writes out and reads again. A
file is in the folder for temporary files (TMPDIR) and has no name, so nothing is left of it however
the process ends.
"""

import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firecaffe.errors import CheckpointError, RunError
from firecaffe.synchrony.server_policies import Leaf
from firecaffe.training.tensor_file import Stored
from firecaffe.transport.collect import HeldPart

ALIGNMENT = 64
"""Bytes. Each tensor begins at a multiple of it."""


class Parcel:
    """Host memory for tensors of known dtypes and shapes. Both ends of a lane lay it out alike."""

    def __init__(self, examples: Mapping[str, Tensor], data: Tensor | None = None) -> None:
        """Use `data`, of `parcel_bytes` bytes, or allocate memory."""
        self.places: dict[str, int] = {}
        places, end = self.places, 0
        for name, example in examples.items():
            places[name] = end
            end += _aligned(example)
        self.data = torch.zeros(end, dtype=torch.uint8) if data is None else data
        self.views = {
            name: self.data[places[name] : places[name] + example.numel() * example.dtype.itemsize]
            .view(example.dtype)
            .view(example.shape)
            for name, example in examples.items()
        }

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self.views[name].copy_(tensor.detach())


def parcel_bytes(examples: Mapping[str, Tensor]) -> int:
    return sum(map(_aligned, examples.values()))


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def copy_in_file(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy dense tensors on the host into a mapped file. Raises: RunError if there is no room.

    The copies have the tensors' strides, on which the bits of a convolution may depend.
    """
    parcel = Parcel(tensors, bytes_in_file(parcel_bytes(tensors)))
    runs = {name: view.view(-1) for name, view in parcel.views.items()}
    return {n: runs[n].as_strided(t.shape, t.stride()).copy_(t) for n, t in tensors.items()}


def bytes_in_file(size: int) -> Tensor:
    """Return `size` zero bytes in a mapped file. Raises: RunError if there is no room."""
    return torch.frombuffer(_mapped(max(size, 1)), dtype=torch.uint8)[:size]


def size_of(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _mapped(size: int) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile() as file:
            if sys.platform.startswith("linux"):  # else a full disk would kill the process
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise RunError(
            f"{tempfile.gettempdir()}: no room for a version of the weights, {size:,} bytes "
            f"({error.strerror}); another folder for temporary files is set by TMPDIR, and fewer "
            "learners have fewer versions"
        ) from error


MAX_BYTES = 2 << 30
"""The bytes of versions that may be in memory."""


@dataclass
class Gradient:
    tensors: dict[str, Tensor]
    """Gradients of used parameters: the sum over the leaf's samples / a full leaf's samples."""
    tail: list[Tensor]
    """The loss, and the changes to buffers; see `training.forward`."""


class ServerMemory:
    held_by_all = True
    is_result = True

    def __init__(
        self,
        model: nn.Module,
        named: Mapping[str, nn.Parameter],
        squares: bool,
        more: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        """Keep versions of `named`, of the model's buffers, and of what `more` returns."""
        self._model, self._named, self._more = model, named, more
        self.versions: dict[int, dict[str, Tensor]] = {}
        self.gradients: dict[Leaf, Gradient] = {}
        self.mean_square = {n: torch.zeros_like(p) for n, p in named.items()} if squares else {}

    def keep(self, version: int) -> None:
        if version in self.versions:
            return
        now = self._now()
        in_file = self.is_full(size_of(now)) and all(tensor.is_cpu for tensor in now.values())
        copies = copy_in_file(now) if in_file else {n: tensor.clone() for n, tensor in now.items()}
        self.versions[version] = copies

    def is_full(self, size: int) -> bool:
        return sum(map(size_of, self.versions.values())) + size > MAX_BYTES

    def release(self, needed: set[int]) -> None:
        for version in self.versions.keys() - needed:
            del self.versions[version]

    def _now(self) -> dict[str, Tensor]:
        buffers = dict(self._model.named_buffers())
        of_all = {**self._named, **buffers, **self._more()}
        return {name: tensor.detach() for name, tensor in of_all.items()}

    def parts(self) -> dict[str, HeldPart]:
        by_path: dict[str, Tensor] = {}
        for version, tensors in sorted(self.versions.items()):
            by_path |= {f"version/{version}/{name}": tensor for name, tensor in tensors.items()}
        for leaf, gradient in sorted(self.gradients.items()):
            where = f"{leaf.step}.{leaf.place}"
            by_path |= {f"gradient/{where}/{n}": t for n, t in gradient.tensors.items()}
            by_path |= {f"tail/{where}/{i}": t for i, t in enumerate(gradient.tail)}
        by_path |= {f"mean_square/{name}": tensor for name, tensor in self.mean_square.items()}
        return {name: HeldPart(tensor) for name, tensor in by_path.items()}

    @torch.no_grad()
    def load(self, stored: Stored) -> None:
        now = self._now()
        device = next((tensor.device for tensor in now.values()), None)
        for path in stored:
            try:
                kind, where, *rest = path.split("/")
                name = rest[0] if rest else ""
                if kind == "version":
                    self.versions.setdefault(int(where), {})[name] = _like(now[name], stored[path])
                elif kind == "mean_square":
                    self.mean_square[where].copy_(stored[path])
                else:
                    step, place = map(int, where.split("."))
                    gradient = self.gradients.setdefault(Leaf(step, place), Gradient({}, []))
                    if kind == "gradient":
                        gradient.tensors[name] = _like(now[name], stored[path])
                    else:
                        _put(gradient.tail, int(name), stored[path].to(device))
            except (KeyError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"checkpoint holds {stored.full_name(path)}, which this training does not have"
                ) from error
        for kept in self.versions.values():
            if kept.keys() != now.keys():
                raise CheckpointError("checkpoint lacks tensors of a version of the weights")


def _like(example: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(example, dtype=value.dtype).copy_(value)


def _put(tail: list[Tensor], place: int, value: Tensor) -> None:
    # The parts of a checkpoint's tail come in any order.
    tail += [value.new_empty(0)] * (place + 1 - len(tail))
    tail[place] = value.clone()
