"""Torch's map-style data sets as data sets of ours: item by item, each under its own key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from firecaffe.by_value import packed
from firecaffe.data.hash import EVALUATION, Key, Stream, keyed, seed_by
from firecaffe.data.layout import Batch, kind_of
from firecaffe.errors import DataError, FirecaffeError, RecipeError
from firecaffe.generators import generators_kept
from firecaffe.reference import failed, shown
from firecaffe.words import MOST_THREADS

Collate = Callable[[list[Any]], Any]
"""Items to a batch, as a DataLoader's `collate_fn`."""

Make = Callable[[Sequence[int], int, int], Batch]
"""(samples, seed, epoch) to their batch."""

NUMBERS = range(MOST_THREADS + 1)
"""How many workers there may be."""


def from_torch(dataset: Any, workers: int = 0, collate: Collate = default_collate) -> "TorchSet":
    """A map-style torch Dataset (`__getitem__` and `__len__`), as firecaffe takes data sets.

    Its items are pairs (inputs, targets); `collate` makes a batch of a list of them, torch's own by
    default. Around each item python's `random`, numpy's global generator and torch's are seeded by
    (seed, epoch, sample), so that random transforms give the same bits on any number of ranks and
    workers; `firecaffe.data.current_key()` is that key. What has a generator of its own must draw
    by the key, or it changes from run to run, which the run says.

    Args:
        dataset: The data set.
        workers: Processes of each rank that make items, each with a copy of the data set. With 0
            they are made in the training's own thread.
        collate: A function of a list of items, as a DataLoader's `collate_fn`: gives (inputs,
            targets), each a tensor or a tree of tensors with a row for each item.

    Raises: DataError if it is no such data set; RecipeError if workers is no number, or collate no
    function.
    """
    if not is_map_style(dataset):
        raise DataError(f"from_torch was given {_what(dataset)}; expected a map-style Dataset")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers not in NUMBERS:
        raise RecipeError(f"from_torch: workers is {workers!r}; expected 0 to {NUMBERS[-1]}")
    if not callable(collate):
        raise RecipeError(f"from_torch: collate is {shown(collate)}; expected a function")
    return TorchSet(Items(dataset, collate), workers)


def is_map_style(dataset: Any) -> bool:
    """Whether items can be asked for by number, as those of a torch Dataset."""
    if isinstance(
        dataset, IterableDataset | DataLoader | type | tuple | list | dict | str | Tensor
    ):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _what(dataset: Any) -> str:
    if isinstance(dataset, IterableDataset):
        return f"an IterableDataset ({type(dataset).__name__}), whose samples have no numbers"
    if isinstance(dataset, DataLoader):
        return "a DataLoader, whose batches come in an order of their own"
    return shown(dataset)


@dataclass(frozen=True)
class Items:
    """Makes batches of a torch data set: all that a process needs that does it."""

    dataset: Any
    collate: Collate
    name: str = "from_torch"
    """What errors call it."""

    def make(self, samples: Sequence[int], seed: int, epoch: int) -> Batch:
        """The batch of these samples. The generators are as before afterwards.

        Raises: OwnCodeError for what the data set or `collate` raises; DataError if items cannot be
        put together.
        """
        with generators_kept():
            items = [self._item(Key(seed, epoch, sample)) for sample in samples]
            seed_by(Stream.COLLATE, Key(seed, epoch, samples[0]))
            return self._collated(items, samples)

    def pickled(self) -> bytes:
        """For another process. Raises: DataError if that cannot be."""
        try:
            return packed(self)
        except Exception as error:
            raise DataError(
                f"{self.name} cannot be sent to data workers ({type(error).__name__}: {error}); "
                "expected no open files, locks or generators in it; or workers=0"
            ) from error

    def _item(self, key: Key) -> Any:
        with keyed(Stream.ITEM, key):
            try:
                return self.dataset[key.sample]
            except FirecaffeError:
                raise
            except Exception as error:
                raise failed(f"{self.name}[{key.sample}]", error) from error

    def _collated(self, items: list[Any], samples: Sequence[int]) -> Batch:
        try:
            batch: Batch = self.collate(items)
        except Exception as error:
            if self.collate is not default_collate:
                raise failed(f"collate of {self.name}", error) from error
            raise DataError(self._why_not(items, samples, error)) from error
        return batch

    def _why_not(self, items: list[Any], samples: Sequence[int], error: Exception) -> str:
        """Why torch's collate does not take the items."""
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


def _item_layout(item: Any) -> str:
    """What an item is, in words."""
    if isinstance(item, dict):
        return f"{{{', '.join(f'{key}: {_item_layout(each)}' for key, each in item.items())}}}"
    if isinstance(item, tuple | list):
        return f"({', '.join(map(_item_layout, item))})"
    shape, dtype = getattr(item, "shape", None), getattr(item, "dtype", None)
    if shape is None or dtype is None:
        return type(item).__name__
    return " ".join([kind_of(dtype) if isinstance(item, Tensor) else str(dtype), str([*shape])])


@dataclass
class TorchSet:
    """A torch data set as a data set of ours; made by `from_torch`."""

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
        """Threads that may ask it at once. None if it makes items itself: the generators that they
        may draw from are the training's too.
        """
        return self.workers if self._elsewhere else 0

    @property
    def is_uniform(self) -> bool:
        """Whether all samples have the same shapes, as torch's own collate wants them."""
        return self.items.collate is default_collate

    def make_elsewhere(self, make: Make) -> None:
        """From now on, has batches made by a training's workers instead of this process."""
        self._elsewhere = make

    def batch(self, indices_B: Tensor) -> Batch:
        return self.keyed_batch(indices_B, 0, EVALUATION)

    def keyed_batch(self, indices_B: Tensor, seed: int, epoch: int) -> Batch:
        make = self._elsewhere or self.items.make
        return make(indices_B.tolist(), seed, epoch)


def said_by(dataset: Any) -> dict[str, Any]:
    """What a torch data set says of itself, in our words; torchvision's have `classes` (names) and
    `targets` (the class of each sample). A Subset says what the set that it is of does.
    """
    if isinstance(dataset, Subset):
        of_all = said_by(dataset.dataset)
        of_samples: dict[str, Any] = {
            name: [of_all.get(name, ())[index] for index in dataset.indices]
            for name in ("targets", "sample_weights")
            if name in of_all
        }
        return of_all | of_samples
    said = {
        name: getattr(dataset, name, None)
        for name in ("num_classes", "class_names", "targets", "sample_weights")
    }
    names = said["class_names"] or getattr(dataset, "classes", None)
    said["class_names"] = None
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        said["class_names"] = tuple(names)
    if said["num_classes"] is None and said["class_names"] is not None:
        said["num_classes"] = len(said["class_names"])
    return {name: value for name, value in said.items() if value is not None}
