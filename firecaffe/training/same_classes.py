"""Other data than a run's own, whose classes are to be the run's: matched by name."""

import torch
from torch import Tensor

from firecaffe.data import Data, DataConfig, Dataset, is_images, num_classes
from firecaffe.errors import DataError
from firecaffe.training.about import About

MOST_NAMED = 5
"""Classes that a line names."""


def labels_of_run(about: About, data: Data, config: DataConfig) -> Tensor | None:
    """The run's label of each label of the test data, int64 of (classes,); None if they are the
    same, or if either side does not name its classes.

    Raises: DataError if the run does not know a class, or the data have more of them than the run
    had.
    """
    where = config.path or config.name
    names, known = _names(data), about.class_names
    if not names or not known:
        found = num_classes(data.train)
        if found is not None and about.num_classes is not None and found > about.num_classes:
            raise DataError(
                f"{where}: the data have {found} classes, the run was trained on "
                f"{about.num_classes}; expected no more"
            )
        return None
    if names == known[: len(names)]:
        return None
    if unknown := [name for name in names if name not in known]:
        raise DataError(
            f"{where}: the run does not know {_listed(unknown)}; its "
            f"{len(known)} classes are {_listed(known)}"
        )
    if not is_images(data.test):
        raise DataError(
            f"{where}: the classes are {_listed(names)}, the run's {_listed(known)}; "
            "expected them in the same order, as the targets are not one class for each sample"
        )
    return torch.tensor([known.index(name) for name in names])


def _names(data: Data) -> tuple[str, ...]:
    """Those of the test data, by label; empty if not each class has one."""
    names = _named(data.test) or _named(data.train)
    return names if len(names) >= (num_classes(data.train) or 0) else ()


def _named(dataset: Dataset) -> tuple[str, ...]:
    return tuple(map(str, getattr(dataset, "class_names", ())))


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more
