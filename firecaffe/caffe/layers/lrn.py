"""LRN: local response normalization, across channels or within one."""

from torch import nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec
from firecaffe.caffe.local_response_norm import LocalResponseNorm, LocalResponseNormWithinChannel


def lrn(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    param = spec.param
    param.ignore("engine")
    size, alpha = param.integer("local_size", 5), param.number("alpha", 1.0)
    beta, k = param.number("beta", 0.75), param.number("k", 1.0)
    if size < 1 or size % 2 == 0:
        raise spec.layer.error(
            f"LRN {spec.name!r}: local_size is {size}; expected an odd number",
            param.line_of("local_size"),
        )
    region = param.choice("norm_region", ("ACROSS_CHANNELS", "WITHIN_CHANNEL"), "ACROSS_CHANNELS")
    if region == "WITHIN_CHANNEL":  # where Caffe does not look at k
        return LocalResponseNormWithinChannel(size, alpha, beta)
    return LocalResponseNorm(size, alpha, beta, k)


LAYERS = {"LRN": Kind(lrn, "lrn_param")}
