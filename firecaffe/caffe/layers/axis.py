"""Axes and sizes as Caffe's words give them."""

from collections.abc import Sequence

from firecaffe.caffe.layers.spec import Shape, Spec


def axis_of(spec: Spec, word: str, default: int, bottom: Shape, end: int = 0) -> int:
    """The axis of a bottom that `word` names; negative ones count from the end.

    end: 1 if the place behind the last axis will do too.

    Raises: CaffeError if the bottom has no such axis.
    """
    axis = spec.param.integer(word, default)
    count = len(bottom) + end
    if not -count <= axis < count:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r}: {word} is {axis}, but its bottom has {len(bottom)} axes",
            spec.param.line_of(word) or spec.layer.line,
        )
    return axis % count


def height_width(spec: Spec, word: str, default: int | None, one: str = "") -> tuple[int, int]:
    """A size for rows and columns: `word` (one number for both, or two), or one_h and one_w.

    default: if nothing is said; None if something must be.

    Raises: CaffeError.
    """
    one = one or word
    found = spec.param.integers(word)
    rows, columns = spec.param.integers(f"{one}_h"), spec.param.integers(f"{one}_w")
    if found and (rows or columns):
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} has {word} and {one}_h, {one}_w; expected one of them",
            spec.param.line_of(word),
        )
    if rows or columns:
        if not (rows and columns) and default is None:
            raise spec.layer.error(f"{spec.type} {spec.name!r}: expected both {one}_h and {one}_w")
        other = 0 if default is None else default
        return (rows or [other])[-1], (columns or [other])[-1]
    if not found:
        if default is None:
            raise spec.layer.error(f"{spec.type} {spec.name!r} has no {word}")
        return default, default
    if len(found) > 2:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} has {len(found)} of {word}; expected one for both, or two",
            spec.param.line_of(word),
        )
    return found[0], found[-1]


def check_bottoms(spec: Spec, *counts: int) -> None:
    """Raises: CaffeError if the layer has another number of bottoms."""
    if len(spec.bottoms) not in counts:
        expected = " or ".join(map(str, counts))
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} has {len(spec.bottoms)} bottoms; expected {expected}"
        )


def shown(shape: Sequence[int]) -> str:
    """A shape in a line about it."""
    return " x ".join(map(str, shape)) or "a number"
