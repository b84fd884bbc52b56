"""Dropout, scaled while training, or with scale_train: false while not."""

import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


class DropoutScaledInTest(nn.Module):
    """Drops a share p; what is left keeps its size, and without dropping all is times 1 - p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training) * (1 - self.p)


def dropout(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    ratio = spec.param.number("dropout_ratio", 0.5)
    if not 0 <= ratio < 1:
        raise spec.layer.error(
            f"Dropout {spec.name!r}: dropout_ratio is {ratio:g}; expected 0 to below 1",
            spec.param.line_of("dropout_ratio"),
        )
    is_scaled = spec.param.flag("scale_train", True)
    return nn.Dropout(ratio) if is_scaled else DropoutScaledInTest(ratio)


LAYERS = {"Dropout": Kind(dropout, "dropout_param")}
