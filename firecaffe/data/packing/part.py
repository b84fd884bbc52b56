"""The description of a source of images to pack."""

from collections.abc import Callable
from dataclasses import dataclass, field

MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class Part:
    names: list[str]
    labels: list[int]
    sizes: list[int]
    """The approximate size of each image in bytes."""
    read: Callable[[int], bytes]
    """Reads one image. Several threads call it at once. Raises DataError if it cannot be read."""

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Source:
    kind: str
    """The kind of images: jpeg (encoded images), or raw (pixels of one shape)."""
    shape: tuple[int, ...]
    classes: list[str]
    parts: dict[str, Part]
    about: str
    notes: list[str] = field(default_factory=list)
