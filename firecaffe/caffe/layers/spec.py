"""What a layer is made from, and a row of the table of layers.

What several layers ask of their bottoms, their tops and their words.

Messages for layers of other types, which Caffe never looks at.

A copied layer keeps some: `softmax_param` in a Normalize, `loss_param` in a Softmax. A real Caffe
loads such nets, and they change no number.

Source: BVLC/caffe, src/caffe/proto/caffe.proto (LayerParameter).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from firecaffe.caffe.message import Message

Shape = tuple[int, ...]
"""Of a blob, with the batch first."""


@dataclass(frozen=True)
class Spec:
    """One layer of a net, in one phase, with the shapes of what goes into it."""

    name: str
    type: str
    layer: Message
    """The whole layer."""
    param: Message
    """What is its type's own, as convolution_param; empty if it is not there."""
    bottoms: Sequence[Shape]
    num_tops: int
    """How many blobs are asked of it."""
    phase: str
    """TRAIN or TEST."""


@dataclass(frozen=True)
class Kind:
    """A row of LAYERS."""

    make: Callable[[Spec], nn.Module]
    """The module: called with the bottoms, in their order, it returns the top, or a tuple of tops.
    Its parameters and buffers are filled as the fillers say. Raises: CaffeError.
    """
    param: str = ""
    """The name of the message with its own words; empty if it has none."""
    blobs: tuple[str, ...] = ("weight", "bias")
    """The names of the module's parameters and buffers, in the order of Caffe's blobs; those that a
    layer does not have are left out.
    """
    is_loss: bool = False
    """Whether its first top counts with a weight of 1 where no loss_weight is given."""
    takes_targets: bool = False
    """Whether its last bottom is what the samples should have given, as a label."""


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
"""A message for each type; those of forks are not here, for a fork may read them anywhere."""


def ignore_other_types(layer: Message) -> None:
    """Takes note that they change nothing. To be called when all that the layer's own type reads
    has been read.
    """
    layer.ignore(*(PARAMS - layer.asked))
