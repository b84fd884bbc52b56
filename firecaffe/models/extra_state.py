"""The extra state of modules (`get_extra_state`), stored in byte buffers during training.

The state must be the same on any number of workers. It is set in the modules before a forward, and
read from them after it. Like other integer buffers, it changes once a step, by the first
micro-batch. So checkpoints, digests, other ranks and exported weights contain it.
"""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import tensor_bytes
from firecaffe.errors import CheckpointError, RecipeError
from firecaffe.inventory.network_state import EXTRA_STATE_BYTES, modules_with_extra_state

LENGTH_BYTES = 4
GROWTH = 4
"""The largest growth of the state, as a factor of its initial length."""
MIN_BYTES = 1024

TUPLE, TENSOR, ARRAY = range(1, 4)
"""Kinds of values that MessagePack lacks."""


class ExtraState:
    def __init__(self, network: nn.Module, named: dict[str, nn.Module]) -> None:
        self._network, self._named = network, named
        self._in_modules: dict[str, bytes] = {}
        for name, module in named.items():
            if any(parameter.is_meta for parameter in network.parameters()):
                raise RecipeError(
                    f"module {_shown(name)} has an extra state (get_extra_state), and a network "
                    "whose layers or stages are shared out among ranks has no place for it; leave "
                    "[parallel] out"
                )
            content = self._content(name)
            size = max(MIN_BYTES, GROWTH * len(content))
            bytes_N = torch.zeros(LENGTH_BYTES + size, dtype=torch.uint8)
            module.register_buffer(EXTRA_STATE_BYTES, bytes_N)
            self._store(name, content)
        self._hooks = (
            network.register_forward_pre_hook(self.to_modules),
            network.register_forward_hook(self.from_modules),
        )

    # Both are methods, so that a copy of the network has hooks bound to a copy of this object.
    def to_modules(self, *_: Any) -> None:
        for name, module in self._named.items():
            content = _content_of(getattr(module, EXTRA_STATE_BYTES), name)
            if content != self._in_modules[name]:
                module.set_extra_state(_decoded(content, name))
                self._in_modules[name] = content

    def from_modules(self, *_: Any) -> None:
        for name in self._named:
            content = self._content(name)
            if content != self._in_modules[name]:
                self._store(name, content)

    def uninstall(self) -> None:
        """Remove the buffers and hooks; the modules receive the state of the buffers."""
        self.to_modules()
        for hook in self._hooks:
            hook.remove()
        for module in self._named.values():
            delattr(module, EXTRA_STATE_BYTES)
        delattr(self._network, HELD)

    def _content(self, name: str) -> bytes:
        state = self._named[name].get_extra_state()
        try:
            return msgspec.msgpack.encode(_plain(state))
        except (TypeError, OverflowError, ValueError) as error:
            raise RecipeError(
                f"the extra state of module {_shown(name)} cannot be kept ({error}); expected "
                "numbers, texts, tensors, and lists, tuples and dicts of them"
            ) from error

    @torch.no_grad()
    def _store(self, name: str, content: bytes) -> None:
        buffer: Tensor = getattr(self._named[name], EXTRA_STATE_BYTES)
        room = len(buffer) - LENGTH_BYTES
        if len(content) > room:
            raise RecipeError(
                f"the extra state of module {_shown(name)} grows: {len(content)} bytes, and at "
                f"the start it had room for {room}; expected one that stays about as long"
            )
        row = len(content).to_bytes(LENGTH_BYTES, "little") + content
        filled = np.frombuffer(row.ljust(len(buffer), b"\0"), dtype=np.uint8)
        buffer.copy_(torch.from_numpy(filled.copy()))
        self._in_modules[name] = content


HELD = "_firecaffe_extra_state"


def hold_extra_state(network: nn.Module) -> None:
    """Put the extra state of modules into buffers. Raises RecipeError if it cannot be stored."""
    named = dict(modules_with_extra_state(network))
    if named and not hasattr(network, HELD):
        object.__setattr__(network, HELD, ExtraState(network, named))


def release_extra_state(network: nn.Module) -> None:
    """Undo `hold_extra_state`; the modules have their latest state."""
    held: ExtraState | None = getattr(network, HELD, None)
    if held is not None:
        held.uninstall()


def _content_of(buffer: Tensor, name: str) -> bytes:
    row = buffer.cpu().numpy().tobytes()
    length = int.from_bytes(row[:LENGTH_BYTES], "little")
    if length > len(row) - LENGTH_BYTES:
        raise CheckpointError(f"the extra state of module {_shown(name)} is damaged")
    return row[LENGTH_BYTES : LENGTH_BYTES + length]


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return _extension(TENSOR, [dtype, list(value.shape), bytes(tensor_bytes(value))])
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return _extension(ARRAY, [value.dtype.str, list(value.shape), value.tobytes()])
    if isinstance(value, tuple):
        return _extension(TUPLE, [_plain(item) for item in value])
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    raise TypeError(f"found {type(value).__name__}")


def _extension(kind: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(kind, msgspec.msgpack.encode(content))


def _decoded(content: bytes, name: str) -> Any:
    try:
        return _DECODER.decode(content)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the extra state of module {_shown(name)} is damaged ({error!s:.100})"
        ) from error


def _value(kind: int, content: memoryview) -> Any:
    parts = _DECODER.decode(content)
    if kind == TUPLE:
        return tuple(parts)
    dtype, shape, row = parts
    if kind == ARRAY:
        array = np.frombuffer(bytearray(row), np.dtype(dtype)).reshape(shape)
        return array if shape else array[()]
    of_torch = getattr(torch, dtype)
    if not isinstance(of_torch, torch.dtype):
        raise ValueError(f"{dtype} is no type of tensors")
    if not row:
        return torch.zeros(shape, dtype=of_torch)
    return torch.frombuffer(bytearray(row), dtype=of_torch).reshape(shape)


_DECODER = msgspec.msgpack.Decoder(ext_hook=_value)


def _shown(name: str) -> str:
    return name or "network"
