"""What several layers ask of their bottoms and of the axes that they name."""

from firecaffe.caffe.layers.spec import Shape, Spec


def check_bottoms(spec: Spec, *counts: int) -> None:
    """Raises: CaffeError if the layer has another number of bottoms."""
    if len(spec.bottoms) not in counts:
        expected = " or ".join(map(str, counts))
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} has {len(spec.bottoms)} bottoms; expected {expected}"
        )


def want_tops(spec: Spec, count: int) -> None:
    """Raises: CaffeError if the layer has another number of tops."""
    if spec.num_tops != count:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} has {spec.num_tops} tops; expected {count}"
        )


def want_axes(spec: Spec, count: int, bottom: int = 0) -> None:
    """Raises: CaffeError if that bottom has not so many axes."""
    shape = tuple(spec.bottoms[bottom])
    if len(shape) != count:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} takes a bottom of {count} axes; found {shape}"
        )


def axis_of(spec: Spec, word: str, default: int, bottom: Shape) -> int:
    """The axis of a bottom that `word` names; negative ones count from the end.

    Raises: CaffeError if the bottom has no such axis.
    """
    axis, count = spec.param.integer(word, default), len(bottom)
    if not -count <= axis < count:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r}: {word} is {axis}, but its bottom has {count} axes",
            spec.param.line_of(word) or spec.layer.line,
        )
    return axis % count


def positive(spec: Spec, name: str, default: int | None = None) -> int:
    """A whole number above 0. Raises: CaffeError if it is not, or not there without a default."""
    if default is None and not spec.param.has(name):
        raise spec.layer.error(f"{spec.type} {spec.name!r} has no {name}; expected one")
    value = spec.param.integer(name, default or 0)
    if value < 1:
        raise spec.param.error(f"{name} is {value}; expected 1 or more", spec.param.line_of(name))
    return value
