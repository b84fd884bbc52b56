"""The layers of Caffe's nets: one file a family, one row a type."""

from firecaffe.caffe.layers import (
    accuracy,
    activation,
    batch_norm,
    combine,
    convolution,
    dropout,
    inner_product,
    loss,
    loss_of_values,
    lrn,
    pooling,
    scale,
    shape,
    softmax,
)
from firecaffe.caffe.layers.spec import Kind

LAYERS: dict[str, Kind] = {
    **accuracy.LAYERS,
    **activation.LAYERS,
    **batch_norm.LAYERS,
    **combine.LAYERS,
    **convolution.LAYERS,
    **dropout.LAYERS,
    **inner_product.LAYERS,
    **loss.LAYERS,
    **loss_of_values.LAYERS,
    **lrn.LAYERS,
    **pooling.LAYERS,
    **scale.LAYERS,
    **shape.LAYERS,
    **softmax.LAYERS,
}
"""By the name of the type."""
