"""Layers that choose samples by another bottom: BatchReindex and Filter.

Source: Caffe's API documentation (caffe.berkeleyvision.org/doxygen), BatchReindexLayer and
FilterLayer.
"""

from torch import Tensor, nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.checks import want_axes, want_tops
from firecaffe.caffe.layers.spec import Kind, Spec


class BatchReindex(nn.Module):
    """(B, …) and (N,) of places in the batch: (N, …). A sample may come several times."""

    def forward(self, values: Tensor, places: Tensor) -> Tensor:
        return values[places.long()]


class Filter(nn.Module):
    """The samples of each bottom for which the last bottom, (B, 1, …), is not 0.

    On the meta device, where nothing can be chosen, all of them.
    """

    def forward(self, *bottoms: Tensor) -> Tensor | tuple[Tensor, ...]:
        *values, selector = bottoms
        if not selector.is_meta:
            chosen = selector.flatten() != 0
            values = [each[chosen] for each in values]
        return values[0] if len(values) == 1 else tuple(values)


def batch_reindex(spec: Spec) -> BatchReindex:
    check_bottoms(spec, 2)
    want_axes(spec, 1, bottom=1)
    return BatchReindex()


def filtered(spec: Spec) -> Filter:
    want_tops(spec, len(spec.bottoms) - 1)
    *values, selector = spec.bottoms
    if not values or any(size != 1 for size in selector[1:]):
        raise spec.layer.error(
            f"Filter {spec.name!r} chooses by {tuple(selector)}; expected (B, 1, …) behind "
            "what is chosen from"
        )
    for each in values:
        if each[0] != selector[0]:
            raise spec.layer.error(
                f"Filter {spec.name!r} chooses among {each[0]} samples by {selector[0]}; "
                "expected as many"
            )
    return Filter()


LAYERS = {
    "BatchReindex": Kind(batch_reindex, "", ()),
    "Filter": Kind(filtered, "", ()),
}
