"""Initialization of a network without memory for all its weights.

Random numbers are drawn in the order of the constructor's calls. So the constructor runs as usual,
and the memory of a tensor that is not kept is freed after its last read. To find that read, an
earlier run on the meta device, where tensors use no memory, records the calls. If calls depend on
values (a truncated normal redraws large ones), the network has to be built in full.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from firecaffe.cluster.process_settings import give_back_freed_memory
from firecaffe.generators import generators_kept

MIN_BYTES = 1024
"""Smaller tensors are ignored, since the meta device makes them by other calls."""

MUCH_BYTES = 2**20
"""Freed memory of at least this size is returned to the system at once."""

OVERWRITES = {f"aten::{name}_" for name in ("copy", "fill", "normal", "uniform", "zero")}
"""Functions that overwrite a tensor without reading it."""


Tensors = list[Tensor]
Ints = tuple[int, ...]


class RecordedCall(NamedTuple):
    """One call of the constructor that involves large tensors."""

    function: str
    takes: Ints
    """The storages of its arguments, by number."""
    makes: Ints
    sets: int | None
    """The storage that it overwrites completely without reading it, if any."""
    is_view: bool

    @property
    def storages(self) -> set[int]:
        return {*self.takes, *self.makes}


class KeptTensor(NamedTuple):
    """A named tensor of the network after construction. `storage` is None for a small one."""

    storage: int | None
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, storage: UntypedStorage) -> Tensor:
        """Build the tensor in an alias of its storage, since numpy makes a storage unresizable."""
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        alias = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        whole = torch.empty(0, dtype=self.dtype)
        return whole.set_(alias, self.offset, self.shape, self.strides)


@dataclass(frozen=True)
class Drawing:
    make: Callable[[], nn.Module]
    outline: nn.Module
    calls: Sequence[RecordedCall]
    kept: dict[str, KeptTensor]
    """The network's tensors by name, parameters first."""

    def draw(self, whole: Collection[str], take: Callable[[str, Tensor], None]) -> nn.Module | None:
        """Make the network on the CPU. Tensors not in `whole` become zeros of one shared element.

        `take` receives each tensor once, by name, when its values are final, and must not keep it.
        Returns None if the calls differ from the recorded ones, so that the network has to be built
        in full. Raises what `take` or `make` raises.
        """
        drawer = _Replayer(self, whole, take)
        try:
            with drawer:
                network = self.make()
        except Exception:
            if drawer.error is not None:
                raise drawer.error from None
            if drawer.is_other:
                return None
            raise
        if drawer.number != len(self.calls) or drawer.is_other:
            return None
        tensors = dict(named_tensors(network))
        if drawer.kept_in(tensors) != self.kept:
            return None
        for name, kept in self.kept.items():
            if kept.storage is None:
                take(name, tensors[name].detach())
        for name, tensor in tensors.items():
            if name not in whole:
                tensor.data = tensor.new_zeros(()).expand(tensor.shape)
        return network

    @property
    def order(self) -> list[str]:
        """Names in the order in which `take` receives the tensors."""
        large = [name for number in sorted(self.last) for name in self.last[number]]
        return large + [name for name, kept in self.kept.items() if kept.storage is None]

    @cached_property
    def last(self) -> dict[int, list[str]]:
        """The tensors whose values are final after a call, by the call's number."""
        names_by_call: dict[int, list[str]] = {}
        for name, kept in self.kept.items():
            if kept.storage is not None:
                numbers = (
                    number
                    for number, call in enumerate(self.calls)
                    if kept.storage in call.storages and not call.is_view
                )
                names_by_call.setdefault(max(numbers), []).append(name)
        return names_by_call

    @cached_property
    def unread(self) -> list[set[int]]:
        """For each call, the storages of named tensors whose elements are not read after it."""
        named = {kept.storage for kept in self.kept.values()}
        sets_next: dict[int, bool] = {}
        unread = []
        for call in reversed(self.calls):
            storages = call.storages & named
            unread.append({storage for storage in storages if sets_next.get(storage, True)})
            if not call.is_view:
                sets_next |= {storage: storage == call.sets for storage in storages}
        return unread[::-1]


def follow(make: Callable[[], nn.Module]) -> Drawing | None:
    """Record on the meta device how a network is made; None if `make` fails or needs values."""
    recorder = _Recorder()
    try:
        with generators_kept(), torch.device("meta"), recorder:
            network = make()
    except Exception:
        return None
    tensors = dict(named_tensors(network))
    kept = recorder.kept_in(tensors)
    made = {None}.union(*(call.makes for call in recorder.calls if not call.is_view))
    if not all(tensor.is_meta for tensor in tensors.values()) or any(
        view.storage not in made for view in kept.values()
    ):
        return None
    return Drawing(make, network, recorder.calls, kept)


class _StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The numbers of large storages, in the order in which calls use them.
        self._numbers: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        takes = self._numbers_of(given)
        self.before(func, given, takes)
        made = func(*args, **kwargs)
        results = list(_tensors(made))
        self.after(func, given, takes, results, self._numbers_of(results))
        return made

    def before(self, func: Any, given: Tensors, takes: Ints) -> None: ...

    def after(
        self, func: Any, given: Tensors, takes: Ints, results: Tensors, makes: Ints
    ) -> None: ...

    def kept_in(self, named: dict[str, Tensor]) -> dict[str, KeptTensor]:
        return {
            name: KeptTensor(
                self._numbers.get(_known(tensor.untyped_storage())),
                int(tensor.storage_offset()),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            for name, tensor in named.items()
        }

    def _numbers_of(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        numbers = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = _known(storage)
            if known in self._numbers or storage.nbytes() >= MIN_BYTES:
                numbers.append(self._numbers.setdefault(known, len(self._numbers)))
        return tuple(numbers)


class _Recorder(_StorageTracker):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []

    def after(self, func: Any, given: Tensors, takes: Ints, results: Tensors, makes: Ints) -> None:
        if takes or makes:
            sets = takes[0] if _overwrites(func, given, takes) else None
            self.calls.append(RecordedCall(str(func), takes, makes, sets, func.is_view))


class _Replayer(_StorageTracker):  # type: ignore[no-untyped-call]
    def __init__(
        self, drawing: Drawing, whole: Collection[str], take: Callable[[str, Tensor], None]
    ) -> None:
        super().__init__()
        self._drawing, self._take = drawing, take
        self._staying = {drawing.kept[name].storage for name in whole} - {None}
        self._gone: dict[int, int] = {}  # the bytes of freed storages, by number
        self.number = 0  # of the next call
        self.is_other = False  # whether a call differed from the recorded one
        self.error: Exception | None = None  # raised by `take`

    def before(self, func: Any, given: Tensors, takes: Ints) -> None:
        for number, storage in self._storages(given):
            if number in self._gone:
                storage.resize_(self._gone.pop(number))

    def after(self, func: Any, given: Tensors, takes: Ints, results: Tensors, makes: Ints) -> None:
        if not takes and not makes:
            return
        calls, number = self._drawing.calls, self.number
        self.number += 1
        expected = calls[number] if number < len(calls) else None
        if expected is None or expected[:3] != (str(func), takes, makes):
            self.is_other = True
            raise RuntimeError("the constructor calls something else than on the meta device")
        storages = dict(self._storages([*given, *results]))
        for name in self._drawing.last.get(number, ()):
            kept = self._drawing.kept[name]
            assert kept.storage is not None
            try:
                self._take(name, kept.of(storages[kept.storage]))
            except Exception as error:
                self.error = error
                raise
        for storage in self._drawing.unread[number] - self._staying:
            if storages[storage].resizable():
                self._gone[storage] = storages[storage].nbytes()
                storages[storage].resize_(0)
                if self._gone[storage] >= MUCH_BYTES:
                    give_back_freed_memory()

    def _storages(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, UntypedStorage]]:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = self._numbers.get(_known(storage))
            if number is not None:
                yield number, storage


def _known(storage: UntypedStorage) -> StorageWeakRef:
    # A weak reference reserves the address, so no later storage equals one that was freed.
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _overwrites(func: Any, given: Sequence[Tensor], takes: Sequence[int]) -> bool:
    if func._schema.name not in OVERWRITES or not takes or takes.count(takes[0]) > 1:
        return False
    first = given[0]
    return first.is_contiguous() and first.nbytes == first.untyped_storage().nbytes()


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def named_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from network.named_parameters()
    yield from network.named_buffers()
