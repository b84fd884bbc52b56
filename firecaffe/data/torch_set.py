"""Torch's map-style data sets as data sets of firecaffe. Each item is made with its own key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from firecaffe.data.dataset import Batch, fact_of, kind_of
from firecaffe.data.hash import EVALUATION, Key, Stream, keyed, seed_by
from firecaffe.errors import DataError, RecipeError
from firecaffe.generators import generators_kept
from firecaffe.user_code import failed, failing_as, packed, shown
from firecaffe.value_checks import MAX_THREADS

Collate = Callable[[list[Any]], Any]

Make = Callable[[Sequence[int], int, int], Batch]
"""A function from (samples, seed, epoch) to their batch."""

NUMBERS = range(MAX_THREADS + 1)


def from_torch(dataset: Any, workers: int = 0, collate: Collate = default_collate) -> "TorchSet":
    """Convert a map-style torch Dataset (`__getitem__` and `__len__`) to a data set of firecaffe.

    Its items are pairs (inputs, targets). Before each item, python's `random`, numpy's global
    generator and torch's are seeded by (seed, epoch, sample), so that random transforms give the
    same bits on any number of ranks and workers. `firecaffe.data.current_key()` returns this key.
    Code with another generator must seed it by the key. Otherwise its results change from run to
    run, and the run reports this.

    Args:
        dataset: The data set.
        workers: Processes of each rank that make items, each with a copy of the data set. 0: the
            training's own thread makes them.
        collate: A function of a list of items, as a DataLoader's `collate_fn`. It returns (inputs,
            targets), each a tensor or a tree of tensors with a row for each item. The default is
            torch's.

    Raises DataError for another kind of data set, RecipeError for invalid workers or collate.
    """
    if not is_map_style(dataset):
        raise DataError(f"from_torch was given {_what(dataset)}; expected a map-style Dataset")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers not in NUMBERS:
        raise RecipeError(f"from_torch: workers is {workers!r}; expected 0 to {NUMBERS[-1]}")
    if not callable(collate):
        raise RecipeError(f"from_torch: collate is {shown(collate)}; expected a function")
    return TorchSet(Items(dataset, collate), workers)


def is_map_style(dataset: Any) -> bool:
    if isinstance(
        dataset, IterableDataset | DataLoader | type | tuple | list | dict | str | Tensor
    ):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _what(dataset: Any) -> str:
    if isinstance(dataset, IterableDataset):
        return f"an IterableDataset ({type(dataset).__name__}), whose samples have no numbers"
    if isinstance(dataset, DataLoader):
        return "a DataLoader, whose batches come in its own order"
    return shown(dataset)


@dataclass(frozen=True)
class Items:
    dataset: Any
    collate: Collate
    name: str = "from_torch"

    def make(self, samples: Sequence[int], seed: int, epoch: int) -> Batch:
        """Make a batch, and restore the generators. Raises OwnCodeError or DataError."""
        with generators_kept():
            items = [self._item(Key(seed, epoch, sample)) for sample in samples]
            seed_by(Stream.COLLATE, Key(seed, epoch, samples[0]))
            return self._collated(items, samples)

    def pickled(self) -> bytes:
        """Pickle this for another process. Raises DataError if that fails."""
        try:
            return packed(self)
        except Exception as error:
            raise DataError(
                f"{self.name} cannot be sent to data workers ({type(error).__name__}: {error}); "
                "expected no open files, locks or generators in it; or workers=0"
            ) from error

    def _item(self, key: Key) -> Any:
        with keyed(Stream.ITEM, key), failing_as(f"{self.name}[{key.sample}]"):
            return self.dataset[key.sample]

    def _collated(self, items: list[Any], samples: Sequence[int]) -> Batch:
        try:
            batch: Batch = self.collate(items)
        except Exception as error:
            if self.collate is not default_collate:
                raise failed(f"collate of {self.name}", error) from error
            raise DataError(self._explain_error(items, samples, error)) from error
        whole: Batch = tree_map_only(Tensor, _dense, batch)
        return whole

    def _explain_error(self, items: list[Any], samples: Sequence[int], error: Exception) -> str:
        first, *others = zip(samples, map(_item_layout, items), strict=True)
        for sample, layout in others:
            if layout != first[1]:
                return (
                    f"{self.name}[{sample}] is {layout}, {self.name}[{first[0]}] {first[1]}; "
                    "expected items that are alike, or from_torch(dataset, collate=…)"
                )
        said = " ".join(str(error).split())
        return (
            f"{self.name}[{first[0]}] is {first[1]}; expected a pair (inputs, targets) of tensors, "
            f"arrays, numbers, or dicts and tuples of them, or from_torch(dataset, collate=…) "
            f"({said:.120})"
        )


def _dense(tensor: Tensor) -> Tensor:
    # So that a data worker can send it as it is, with its strides.
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.layout != torch.strided or torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor
    return tensor.contiguous()


def _item_layout(item: Any) -> str:
    if isinstance(item, dict):
        return f"{{{', '.join(f'{key}: {_item_layout(value)}' for key, value in item.items())}}}"
    if isinstance(item, tuple | list):
        return f"({', '.join(map(_item_layout, item))})"
    shape, dtype = getattr(item, "shape", None), getattr(item, "dtype", None)
    if shape is None or dtype is None:
        return type(item).__name__
    return " ".join([kind_of(dtype) if isinstance(item, Tensor) else str(dtype), str([*shape])])


@dataclass
class TorchSet:
    items: Items
    workers: int = 0
    _elsewhere: Make | None = field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in said_by(self.items.dataset).items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.items.dataset)

    @property
    def fetchers(self) -> int:
        """Fetching threads that may call this at once; 0 if items use this process's generators."""
        return self.workers if self._elsewhere else 0

    @property
    def is_uniform(self) -> bool:
        """Whether all samples have the same shapes, as torch's own collate requires."""
        return self.items.collate is default_collate

    def make_elsewhere(self, make: Make) -> None:
        """Let a training's data workers make the batches from now on."""
        self._elsewhere = make

    def batch(self, indices_B: Tensor) -> Batch:
        return self.keyed_batch(indices_B, 0, EVALUATION)

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> Batch:
        make = self._elsewhere or self.items.make
        return make(indices_B.tolist(), seed, epoch)


def said_by(dataset: Any) -> dict[str, Any]:
    """Return the optional members of a torch data set; torchvision's `classes` are class names."""
    if isinstance(dataset, Subset):
        of_all = said_by(dataset.dataset)
        of_samples: dict[str, Any] = {
            name: [of_all.get(name, ())[index] for index in dataset.indices]
            for name in ("targets", "sample_weights")
            if name in of_all
        }
        return of_all | of_samples
    said = {
        name: fact_of(dataset, name)
        for name in ("num_classes", "class_names", "targets", "sample_weights")
    }
    names = said["class_names"] or fact_of(dataset, "classes")
    said["class_names"] = None
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        said["class_names"] = tuple(names)
    if said["num_classes"] is None and said["class_names"] is not None:
        said["num_classes"] = len(said["class_names"])
    return {name: value for name, value in said.items() if value is not None}
