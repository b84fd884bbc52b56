"""The description of a layer, a row of the table of layers, and checks that several layers need.

Messages for layers of other types are ignored, as in Caffe: a copied layer keeps some, as
`softmax_param` in a Normalize. Source: BVLC/caffe, src/caffe/proto/caffe.proto (LayerParameter).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from firecaffe.caffe.message import Message

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


@dataclass(frozen=True)
class Kind:
    make: Callable[[Spec], nn.Module]
    """A function that makes the module, which maps the bottoms to a top or a tuple of tops."""
    param: str = ""
    """The name of the type's own message; empty if it has none."""
    blobs: tuple[str, ...] = ("weight", "bias")
    """The module's parameters and buffers in the order of Caffe's blobs. A layer may lack some."""
    is_loss: bool = False
    """Whether its first top has a loss weight of 1 if no loss_weight is given."""
    takes_targets: bool = False
    """Whether its last bottom is a target, as a label."""


def want_tops(spec: Spec, count: int) -> None:
    if spec.num_tops != count:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} has {spec.num_tops} tops; expected {count}"
        )


def want_axes(spec: Spec, count: int, bottom: int = 0) -> None:
    shape = tuple(spec.bottoms[bottom])
    if len(shape) != count:
        raise spec.layer.error(
            f"{spec.type} {spec.name!r} takes a bottom of {count} axes; found {shape}"
        )


def positive(spec: Spec, name: str, default: int | None = None) -> int:
    """Read a whole number above 0. Raises CaffeError if it is another one or missing."""
    if default is None and not spec.param.has(name):
        raise spec.layer.error(f"{spec.type} {spec.name!r} has no {name}; expected one")
    value = spec.param.integer(name, default or 0)
    if value < 1:
        raise spec.param.error(f"{name} is {value}; expected 1 or more", spec.param.line_of(name))
    return value


PARAMS = frozenset(
    [
        "accuracy_param",
        "argmax_param",
        "batch_norm_param",
        "bias_param",
        "clip_param",
        "concat_param",
        "contrastive_loss_param",
        "convolution_param",
        "crop_param",
        "data_param",
        "dropout_param",
        "dummy_data_param",
        "eltwise_param",
        "elu_param",
        "embed_param",
        "exp_param",
        "flatten_param",
        "hdf5_data_param",
        "hdf5_output_param",
        "hinge_loss_param",
        "image_data_param",
        "infogain_loss_param",
        "inner_product_param",
        "input_param",
        "log_param",
        "loss_param",
        "lrn_param",
        "memory_data_param",
        "mvn_param",
        "parameter_param",
        "pooling_param",
        "power_param",
        "prelu_param",
        "python_param",
        "recurrent_param",
        "reduction_param",
        "relu_param",
        "reshape_param",
        "scale_param",
        "sigmoid_param",
        "slice_param",
        "softmax_param",
        "spp_param",
        "swish_param",
        "tanh_param",
        "threshold_param",
        "tile_param",
        "transform_param",
        "window_data_param",
    ]
)
"""The message of each type. Those of forks are missing, as a fork may read them anywhere."""


def ignore_other_types(layer: Message) -> None:
    """Mark messages of other types as read. Call it after the layer's own type has read all."""
    layer.ignore(*(PARAMS - layer.asked))
