"""How a dimension is cut into parts."""

from firecaffe.exchange.schedule import shards

Cut = tuple[int, ...]
"""The ends of the parts of a dimension: part p is the elements [cut[p], cut[p + 1])."""


def cut(size: int, num_parts: int, grain: int = 1) -> Cut:
    """Cuts a dimension into parts that differ by at most one grain. size: in elements. grain: the
    elements that stay together, as the filters of one group.

    Raises: ValueError if a part would be empty.
    """
    if num_parts > size // grain:
        raise ValueError(f"{size // grain} cannot be cut into {num_parts} parts")
    return (0, *(stop * grain for _, stop in shards(size // grain, num_parts)))


def scaled(cut: Cut, by: int) -> Cut:
    """The cut of a dimension in which each element has become so many."""
    return tuple(end * by for end in cut)
