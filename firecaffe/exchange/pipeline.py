"""Pipelining: the vector is cut into segments, and one follows the other through the same rounds.

A tree alone leaves most links idle: below, nobody sends any more; above, nobody does yet. Cut
into s segments, the next goes up while the last is still on its way. The shorter a segment, the
sooner the pipeline is full; but each is a message, which costs whatever its length.

Source: Pjesivac-Grbovic et al. 2007 (segmentation); Sanders, Speck, Träff 2009.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from firecaffe.exchange.schedule import Transfer

SEGMENT_ELEMENTS = 32_768
"""128 kB of float32: 1 ms of a 1 Gbit/s line, several times what sending a message costs."""


def num_segments(num_elements: int, segment_elements: int) -> int:
    """As many as keep a segment to `segment_elements`, and at least one.

    Raises: ValueError where a segment is to hold nothing.
    """
    if segment_elements < 1:
        raise ValueError(f"segment_elements is {segment_elements}; it must be at least 1")
    return max(1, -(-num_elements // segment_elements))


def overlay(
    rounds_by_segment: Iterable[Sequence[Sequence[Transfer]]], stride: int
) -> list[list[Transfer]]:
    """Segment c does its round r in round r + c · stride of the whole."""
    whole: dict[int, list[Transfer]] = defaultdict(list)
    for segment, rounds in enumerate(rounds_by_segment):
        for index, round_ in enumerate(rounds):
            whole[index + segment * stride] += round_
    return [whole[index] for index in sorted(whole)]
