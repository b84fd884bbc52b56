"""The layers of Caffe's nets: one file a family, one row a type."""

from firecaffe.caffe.layers import accuracy, loss, loss_of_values
from firecaffe.caffe.layers.spec import Kind

LAYERS: dict[str, Kind] = {
    **accuracy.LAYERS,
    **loss.LAYERS,
    **loss_of_values.LAYERS,
}
"""By the name of the type."""
