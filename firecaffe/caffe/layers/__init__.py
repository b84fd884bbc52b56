"""The layers of Caffe's nets: one file a family, one row a type."""

from firecaffe.caffe.layers import (
    axpy,
    crop,
    detection_output,
    interp,
    parameter,
    permute,
    prior_box,
    reduce,
    roi,
    samples,
    spp,
)
from firecaffe.caffe.layers.spec import Kind

LAYERS: dict[str, Kind] = {
    **axpy.LAYERS,
    **crop.LAYERS,
    **detection_output.LAYERS,
    **interp.LAYERS,
    **parameter.LAYERS,
    **permute.LAYERS,
    **prior_box.LAYERS,
    **reduce.LAYERS,
    **roi.LAYERS,
    **samples.LAYERS,
    **spp.LAYERS,
}
"""By the name of the type."""
