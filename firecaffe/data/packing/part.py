"""What a source of images is made of."""

from collections.abc import Callable
from dataclasses import dataclass, field

MOST_CLASSES = 1_000_000


@dataclass(frozen=True)
class Part:
    """Images of one part, by number."""

    names: list[str]
    labels: list[int]
    sizes: list[int]
    """Bytes of each, about."""
    read: Callable[[int], bytes]
    """Called by several threads at once. Raises: DataError if the image cannot be had."""

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Source:
    """What is packed."""

    kind: str
    """jpeg (encoded images), or raw (pixels of one shape)."""
    shape: tuple[int, ...]
    """Shape of raw images."""
    classes: list[str]
    parts: dict[str, Part]
    about: str
    """What the source is, for people."""
    notes: list[str] = field(default_factory=list)
    """What is to be said of it besides, in lines."""
