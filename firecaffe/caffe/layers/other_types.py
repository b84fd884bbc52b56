"""Messages for layers of other types, which Caffe never looks at.

A copied layer keeps some: `softmax_param` in a Normalize, `loss_param` in a Softmax. A real Caffe
loads such nets, and they change no number.

Source: BVLC/caffe, src/caffe/proto/caffe.proto (LayerParameter).
"""

from firecaffe.caffe.message import Message

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
