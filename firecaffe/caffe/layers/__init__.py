"""The layers of Caffe's nets: one file per family, one row of `LAYERS` per type."""

from firecaffe.caffe.layers import (
    batch_norm,
    combine,
    detection,
    elementwise,
    linear,
    loss,
    pooling,
    recurrent,
    roi,
    shape,
)
from firecaffe.caffe.layers.spec import Kind

LAYERS: dict[str, Kind] = {
    **batch_norm.LAYERS,
    **combine.LAYERS,
    **detection.LAYERS,
    **elementwise.LAYERS,
    **linear.LAYERS,
    **loss.LAYERS,
    **pooling.LAYERS,
    **roi.LAYERS,
    **recurrent.LAYERS,
    **shape.LAYERS,
}
