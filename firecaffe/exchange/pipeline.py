"""Pipelining: the vector is cut into segments, and one follows the other through the same rounds.

A tree alone leaves most links idle: below, nobody sends any more; above, nobody does yet. Cut
into s segments, the next goes up while the last is still on its way. The shorter a segment, the
sooner the pipeline is full; but each is a message, which costs whatever its length.

Source: Pjesivac-Grbovic et al. 2007 (segmentation); Sanders, Speck, Träff 2009.
"""

from collections.abc import Iterator, Sequence

from firecaffe.exchange.schedule import OwnRound

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
    own: Sequence[OwnRound], segments: Sequence[tuple[int, int]], stride: int
) -> Iterator[OwnRound]:
    """A rank's rounds for all segments: segment c does its round r in round r + c · stride.

    own: the rank's rounds for one segment, whose slices do not matter.
    """
    if not own:
        return
    numbers = [number for number, _ in own]
    for number in range(min(numbers), max(numbers) + (len(segments) - 1) * stride + 1):
        active = []
        for first, transfers in own:
            segment, between = divmod(number - first, stride)
            if between == 0 and 0 <= segment < len(segments):
                start, stop = segments[segment]
                active += [t._replace(start=start, stop=stop) for t in transfers]
        if active:
            yield number, active
