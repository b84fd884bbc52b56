"""Buffers such as BatchNorm's running statistics, made equal for every number of workers.

Every micro-batch starts from the buffers of the step's start. Its changes are weighted by its
samples and summed by the same tree as the gradients; the step ends with start + mean change.
Integer buffers (BatchNorm's count of batches) change once a step, as micro-batch 0 changes them.
Untrained parameters that forward changes (an averaged teacher's) are treated like buffers.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError


class BufferEntry(NamedTuple):
    """The place of a tensor: a module's dictionary of buffers or parameters, and a name in it."""

    tensors: MutableMapping[str, Any]
    name: str
    path: str
    """The name in the network."""


@dataclass
class _FlatBuffers:
    # One flat vector costs a few operations per micro-batch; a hundred separate buffers would cost
    # hundreds. A module may replace a tensor in its dictionary, or the tensor's memory (`.data`).
    flat: Tensor
    start: Tensor
    views: list[tuple[Tensor, Tensor, list[BufferEntry]]]
    """The tensor of each buffer, its part of `flat`, and its places."""

    def put_back(self) -> None:
        self.flat.copy_(self.start)
        for view, memory, places in self.views:
            if not _is_same(view, memory):
                view.data = memory
            for buffers, name, _ in places:
                buffers[name] = view

    @property
    def paths(self) -> list[str]:
        return [places[0].path for _, _, places in self.views]

    def now(self) -> Tensor:
        """Return the current values. Write nothing, because backward may still need them."""
        pairs = [(buffers[name], memory) for _, memory, ((buffers, name, _), *_) in self.views]
        if all(now is not None and _is_same(now, memory) for now, memory in pairs):
            return self.flat
        return torch.cat([now.reshape(-1) for now, _ in pairs if now is not None])


class BufferChanges:
    def __init__(
        self, model: nn.Module, parameters: Sequence[str] = (), outline: nn.Module | None = None
    ) -> None:
        """Raise RecipeError for a complex buffer. `parameters`: untrained, changed by forward.

        outline: the whole network, if this rank has a part of it.
        """
        places: dict[Tensor, list[BufferEntry]] = {}
        kept = {id(model.get_parameter(name)) for name in parameters}
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    path = f"{prefix}.{name}" if prefix else name
                    places.setdefault(buffer, []).append(BufferEntry(module._buffers, name, path))
                    if buffer.is_complex():
                        raise RecipeError(f"buffer {name} is complex; keep it as real numbers")
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in kept:
                    entry = BufferEntry(module._parameters, name, "")
                    places.setdefault(parameter, []).append(entry)
        self.together = _together(places)
        """The names of buffers that overlapped in memory, as pairs both ways; none does now."""
        dtypes = dict.fromkeys(buffer.dtype for buffer in places)
        # All ranks sum changes in one dtype, or the bits would depend on how the network is split.
        of_all = {*dtypes, *(b.dtype for b in (model if outline is None else outline).buffers())}
        self.dtype = torch.float64 if torch.float64 in of_all else torch.float32
        self._by_dtype = [
            _make_flat({b: where for b, where in places.items() if b.dtype == dtype})
            for dtype in dtypes
        ]

    def begin_step(self) -> None:
        for buffers in self._by_dtype:
            buffers.start.copy_(buffers.now())
            buffers.put_back()

    def begin_micro_batch(self) -> None:
        for buffers in self._by_dtype:
            buffers.put_back()

    def zero_changes(self) -> list[Tensor]:
        return [torch.zeros_like(buffers.start, dtype=self.dtype) for buffers in self._by_dtype]

    @torch.no_grad()
    def take(self, micro_batch: int, weight: float) -> list[Tensor]:
        """Return the last micro-batch's changes times its weight, a flat vector for each dtype."""
        parts = []
        for buffers in self._by_dtype:
            now, start = buffers.now(), buffers.start
            if start.is_floating_point():
                # A start that is not finite (a running minimum begins at infinity) is replaced by
                # the new value, even if that is 0, or still infinite as in an attention mask.
                change = torch.where(start.isfinite(), now - start, now).to(self.dtype)
                parts.append(change if weight == 1 else change * weight)
            elif micro_batch == 0:
                parts.append((now.long() - start.long()).to(self.dtype))
            else:
                parts.append(torch.zeros(start.shape, dtype=self.dtype, device=start.device))
        return parts

    def names_that_differ(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> list[str]:
        """Return the buffers that differ between two answers of `take`."""
        differing = []
        for buffers, *changes in zip(self._by_dtype, one, other, strict=True):
            sizes = [memory.numel() for _, memory, _ in buffers.views]
            pairs = zip(*(change.split_with_sizes(sizes) for change in changes), strict=True)
            differing += [
                path
                for path, (before, after) in zip(buffers.paths, pairs, strict=True)
                if not torch.equal(before, after)
            ]
        return differing

    @torch.no_grad()
    def late(
        self,
        changes: Sequence[Tensor],
        pulled: Mapping[str, Tensor],
        weight: float,
        staleness: int,
        with_integers: bool,
    ) -> list[Tensor]:
        """Return changes from the present values towards a learner's, for `finish_step`.

        changes: what `take` returned, times `weight`, relative to `pulled`. `staleness`: updates by
        others since then. Full changes would overshoot: eight of BatchNorm's made a variance
        negative. So a float moves 1 / (1 + staleness) of the way to the learner's value. Integers,
        which may be indices or bytes, take the learner's value if the learner changed them.
        """
        parts = []
        for buffers, change in zip(self._by_dtype, changes, strict=True):
            now = buffers.now()
            begin = torch.cat([pulled[path].reshape(-1) for path in buffers.paths]).to(now.device)
            if now.is_floating_point():
                own = torch.where(begin.isfinite(), begin, 0).to(self.dtype) + change / weight
                share = torch.where(now.isfinite(), (own - now) / (1 + staleness), own)
                part = torch.where(own.isfinite() | ~now.isfinite(), share, 0) * weight
            elif with_integers:
                own = begin.long() + change.round().long()
                sizes = [memory.numel() for _, memory, _ in buffers.views]
                is_changed = torch.cat(
                    [some.any().expand(len(some)) for some in torch.split(change, sizes)]
                )
                part = torch.where(is_changed, own - now.long(), 0)
            else:
                part = torch.zeros_like(change)
            parts.append(part.to(self.dtype))
        return parts

    def finish_step(self, totals: Sequence[Tensor], total_weight: float) -> None:
        """Set the buffers from the sums over all micro-batches of what `take` returned."""
        for buffers, change in zip(self._by_dtype, totals, strict=True):
            buffers.put_back()
            start = buffers.start
            if start.is_floating_point():
                begin = torch.where(start.isfinite(), start, 0).to(self.dtype)
                moved = (begin + change / total_weight).to(start.dtype)
                moved = torch.where((change == 0) & start.isfinite(), start, moved)
            else:
                moved = (start.long() + change.round().long()).to(start.dtype)
                moved = torch.where(change == 0, start, moved)
            buffers.flat.copy_(moved)


class BufferSnapshot:
    """A copy of buffers, restored before each batch of an evaluation that may change them."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module._buffers, name, buffer, buffer.data, buffer.clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for buffers, name, buffer, memory, value in self._kept:
            if not _is_same(buffer, memory):
                buffer.data = memory
            memory.copy_(value)
            buffers[name] = buffer


def _is_same(one: Tensor, other: Tensor) -> bool:
    same = one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return same and one.stride() == other.stride()


def _together(places_of: Mapping[Tensor, Sequence[BufferEntry]]) -> dict[str, str]:
    spans: dict[int, list[tuple[range, str]]] = {}
    together: dict[str, str] = {}
    for buffer, places in places_of.items():
        steps = zip(buffer.shape, buffer.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps) if buffer.numel() else -1
        begin, path = buffer.storage_offset() * buffer.itemsize, places[0].path
        span = range(begin, begin + (int(last) + 1) * buffer.itemsize)
        others = spans.setdefault(buffer.untyped_storage().data_ptr(), [])
        for other_span, other in others:
            if max(span.start, other_span.start) < min(span.stop, other_span.stop):
                together |= {path: other, other: path}
        others.append((span, path))
    return together


def _make_flat(places_of: dict[Tensor, list[BufferEntry]]) -> _FlatBuffers:
    flat = torch.cat([buffer.detach().reshape(-1) for buffer in places_of])
    views: list[tuple[Tensor, Tensor, list[BufferEntry]]] = []
    offset = 0
    for buffer, places in places_of.items():
        # `.data` gives each view its own version counter; autograd would see one for all views.
        memory = flat[offset : offset + buffer.numel()].view(buffer.shape).data
        view = memory.data
        if isinstance(buffer, nn.Parameter):
            buffer.data = memory
            view = buffer
        views.append((view, memory, places))
        offset += buffer.numel()
    buffers = _FlatBuffers(flat, flat.clone(), views)
    buffers.put_back()
    return buffers
