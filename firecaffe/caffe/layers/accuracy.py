"""Accuracy (the share of labels among the highest values) and Softmax along one axis."""

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.loss import ignored_label, in_rows
from firecaffe.caffe.layers.shape import axis_of, check_bottoms
from firecaffe.caffe.layers.spec import Kind, Spec


class Accuracy(nn.Module):
    """The share of labels whose value fewer than top_k other classes reach.

    An equal value reaches it, and so does a NaN (in Caffe a NaN is lower). The second top, if asked
    for, is the share for each class; 0 if it does not occur.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        check_bottoms(spec, 2)
        self.spec = spec
        self.axis = axis_of(spec, "axis", 1, spec.bottoms[0])
        self.top_k = spec.param.integer("top_k", 1)
        self.ignore_label = ignored_label(spec.param)
        if not 1 <= self.top_k <= max(1, spec.bottoms[0][self.axis]):
            raise spec.param.error(
                f"top_k is {self.top_k}; expected 1 to the number of classes, "
                f"{spec.bottoms[0][self.axis]}",
                spec.param.line_of("top_k"),
            )

    def forward(self, values: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        correct, counted, classes = self.of_places(values, labels)
        share = correct.sum() / counted.sum().clamp(min=1)
        if self.spec.num_tops < 2:
            return share
        number = values.shape[self.axis]
        hits = torch.zeros(number, device=values.device)
        hits = hits.index_add(0, classes.flatten(), correct.flatten().float())
        all_of = torch.zeros(number, device=values.device)
        all_of = all_of.index_add(0, classes.flatten(), counted.flatten().float())
        return share, hits / all_of.clamp(min=1)

    def sums(self, values: Tensor, labels: Tensor) -> Tensor:
        correct, counted, _ = self.of_places(values, labels)
        return torch.stack([correct.sum(), counted.sum()])

    def of_places(self, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (outer, inner) each: which labels are correct, which count, the labels (or 0)."""
        rows, classes = in_rows(self.spec, values.detach(), labels, self.axis)
        counted = torch.ones_like(classes, dtype=torch.bool)
        if self.ignore_label is not None:
            counted = classes != self.ignore_label
            classes = classes.where(counted, 0)
        own = rows.gather(1, classes[:, None])
        as_high = (~(rows < own)).sum(1)  # includes the label itself
        return (as_high <= self.top_k) & counted, counted, classes


def softmax(spec: Spec) -> nn.Module:
    check_bottoms(spec, 1)
    spec.param.ignore("engine")
    return nn.Softmax(dim=axis_of(spec, "axis", 1, spec.bottoms[0]))


LAYERS = {
    "Accuracy": Kind(Accuracy, "accuracy_param", (), takes_targets=True),
    "Softmax": Kind(softmax, "softmax_param"),
}
