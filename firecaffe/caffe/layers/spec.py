"""The description of a layer, which reads its fields, and a row of the table of layers.

Messages for layers of other types are ignored, as in Caffe: copied layers often keep some, such as
`softmax_param` in a Normalize. Source: BVLC/caffe, src/caffe/proto/caffe.proto (LayerParameter).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from firecaffe.caffe.fillers import filler
from firecaffe.caffe.message import CaffeError, Message

Shape = tuple[int, ...]
"""The shape of a blob, with the batch first."""


@dataclass(frozen=True)
class Spec:
    name: str
    type: str
    layer: Message
    param: Message
    """The message of the layer's type, as convolution_param; empty if the layer has none."""
    bottoms: Sequence[Shape]
    num_tops: int
    phase: str

    def error(self, what: str, word: str = "") -> CaffeError:
        """Return an error that begins with type and name. `word`: a field, for its line."""
        where = self.param if word else self.layer
        return where.error(f"{self.type} {self.name!r}{what}", word or None)

    def axis(self, word: str, default: int, end: int = 0) -> int:
        """Return the first bottom's axis that a field names; with end=1, perhaps one after all."""
        axis, axes = self.param.integer(word, default), len(self.bottoms[0])
        count = axes + end
        if not -count <= axis < count:
            raise self.error(f": {word} is {axis}, but its bottom has {axes} axes", word)
        return axis % count

    def height_width(self, word: str, default: int | None, one: str = "") -> tuple[int, int]:
        """Read rows and columns: `word`, or `one`_h and `one`_w. Required if `default` is None."""
        one = one or word
        sizes = self.param.integers(word)
        rows, columns = self.param.integers(f"{one}_h"), self.param.integers(f"{one}_w")
        if sizes and (rows or columns):
            raise self.error(f" has {word} and {one}_h, {one}_w; expected one of them", word)
        if rows or columns:
            if not (rows and columns) and default is None:
                raise self.error(f": expected both {one}_h and {one}_w")
            other = 0 if default is None else default
            return (rows or [other])[-1], (columns or [other])[-1]
        if not sizes:
            if default is None:
                raise self.error(f" has no {word}")
            return default, default
        if len(sizes) > 2:
            raise self.error(f" has {len(sizes)} of {word}; expected one for both, or two", word)
        return sizes[0], sizes[-1]

    def positive(self, name: str, default: int | None = None) -> int:
        if default is None and not self.param.has(name):
            raise self.error(f" has no {name}; expected one")
        value = self.param.integer(name, default or 0)
        if value < 1:
            raise self.param.error(f"{name} is {value}; expected 1 or more", name)
        return value

    def fill(self, word: str, blob: Tensor | None, default: float = 0.0) -> None:
        """Fill a blob by the filler that a field describes; without the blob, only read it."""
        fill = filler(self.param.message(word), default)
        if blob is not None:
            fill(blob)

    def check_bottoms(self, *counts: int) -> None:
        if len(self.bottoms) not in counts:
            expected = " or ".join(map(str, counts))
            raise self.error(f" has {len(self.bottoms)} bottoms; expected {expected}")

    def check_tops(self, count: int) -> None:
        if self.num_tops != count:
            raise self.error(f" has {self.num_tops} tops; expected {count}")

    def check_axes(self, count: int, bottom: int = 0) -> None:
        shape = tuple(self.bottoms[bottom])
        if len(shape) != count:
            raise self.error(f" takes a bottom of {count} axes; found {shape}")


class Function(nn.Module):
    """A layer without weights: a function of its bottoms, with settings."""

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.function, self.settings = function, settings

    def forward(self, *bottoms: Tensor) -> Any:
        return self.function(*bottoms, **self.settings)

    def _get_name(self) -> str:  # for torch's repr, and a profile
        return self.function.__name__.strip("_")

    def extra_repr(self) -> str:
        return ", ".join(f"{word}={value}" for word, value in self.settings.items())


ENGINE = ("engine",)
"""The choice between implementations of a layer in Caffe."""


@dataclass(frozen=True)
class Kind:
    make: Callable[[Spec], nn.Module]
    """Function that makes the module, which maps the bottoms to a top or a tuple of tops."""
    param: str = ""
    """The name of the type's own message; empty if it has none."""
    blobs: tuple[str, ...] = ("weight", "bias")
    """The module's parameters and buffers in the order of Caffe's blobs. A layer may lack some."""
    is_loss: bool = False
    """Whether its first top has a loss weight of 1 by default."""
    takes_targets: bool = False
    """Whether its last bottom is a target, such as labels."""
    bottoms: tuple[int, ...] = (1,)
    """The allowed numbers of bottoms. Empty: `make` checks them."""
    ignored: tuple[str, ...] = ()
    """Fields of its message that have no effect here."""


def shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"


PARAMS = frozenset(
    f"{name}_param"
    for name in """
    accuracy argmax batch_norm bias clip concat contrastive_loss convolution crop data dropout
    dummy_data eltwise elu embed exp flatten hdf5_data hdf5_output hinge_loss image_data
    infogain_loss inner_product input log loss lrn memory_data mvn parameter pooling power prelu
    python recurrent reduction relu reshape scale sigmoid slice softmax spp swish tanh threshold
    tile transform window_data
    """.split()
)
"""The messages of Caffe's types. Forks' messages are left out: a fork may read them anywhere."""


def ignore_other_types(layer: Message) -> None:
    """Mark messages of other types as read. Call it after the layer's own type has read all."""
    layer.ignore(*(PARAMS - layer.asked))
