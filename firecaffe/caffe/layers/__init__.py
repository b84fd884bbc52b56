"""The layers of Caffe's nets: one file per family, one row of `LAYERS` per type."""

from firecaffe.caffe.layers import (
    batch_norm,
    combine,
    convolution,
    data_layers,
    detection,
    elementwise,
    inner_product,
    loss,
    loss_of_values,
    pooling,
    recurrent,
    roi,
    shape,
)
from firecaffe.caffe.layers.spec import Kind

LAYERS: dict[str, Kind] = {
    **batch_norm.LAYERS,
    **combine.LAYERS,
    **convolution.LAYERS,
    **data_layers.LAYERS,
    **detection.LAYERS,
    **elementwise.LAYERS,
    **inner_product.LAYERS,
    **loss.LAYERS,
    **loss_of_values.LAYERS,
    **pooling.LAYERS,
    **roi.LAYERS,
    **recurrent.LAYERS,
    **shape.LAYERS,
}
