"""What several layers ask of their bottoms, their tops and their words."""

from firecaffe.caffe.layers.spec import Spec


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


def positive(spec: Spec, name: str, default: int | None = None) -> int:
    """A whole number above 0. Raises: CaffeError if it is not, or not there without a default."""
    if default is None and not spec.param.has(name):
        raise spec.layer.error(f"{spec.type} {spec.name!r} has no {name}; expected one")
    value = spec.param.integer(name, default or 0)
    if value < 1:
        raise spec.param.error(f"{name} is {value}; expected 1 or more", spec.param.line_of(name))
    return value
