"""The layers of Caffe's nets: one file a family, one row a type."""

from firecaffe.caffe.layers.spec import Kind

LAYERS: dict[str, Kind] = {}
"""By the name of the type."""
