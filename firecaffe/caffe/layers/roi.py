"""Pooling over regions of interest: ROIPooling (maximum) and PSROIPooling (average).

In PSROIPooling each bin has its own channels. A region is (image in the batch, x1, y1, x2, y2) in
the image's units. Sources: Fast R-CNN (arXiv 1504.08083, section 2.1; rounding as in
github.com/rbgirshick/caffe-fast-rcnn) and R-FCN (arXiv 1605.06409, section 2; rounding as in
github.com/daijifeng001/caffe-rfcn).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from firecaffe.caffe.layers.spec import Function, Kind, Spec

ROIS_AT_ONCE = 16
"""The number of regions whose values are in memory at the same time."""


class Bins(NamedTuple):
    """The bins of each region along one axis, (R, bins) of pixels; empty if `after` <= `first`."""

    first: Tensor
    after: Tensor

    def of(self, regions: slice) -> Bins:
        return Bins(self.first[regions], self.after[regions])

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the pixels (R, bins, longest), and whether they are in the bin."""
        longest = max(int((self.after - self.first).max()), 1)
        places = self.first.unsqueeze(-1) + torch.arange(longest, device=self.first.device)
        return places, places < self.after.unsqueeze(-1)


def rounded(values: Tensor) -> Tensor:
    """Round as C does: halves go away from 0."""
    return values.sign() * (values.abs() + 0.5).floor()


def bins_of(start: Tensor, length: Tensor, count: int, offset: Tensor, size: int) -> Bins:
    """Split `length` from `start` on into bins, rounded outward to whole pixels; add `offset`."""
    place = torch.arange(count, device=start.device, dtype=start.dtype)
    bin_size = (length / count).unsqueeze(-1)
    start, offset = start.unsqueeze(-1), offset.unsqueeze(-1)
    first = (place * bin_size + start).floor() + offset
    after = ((place + 1) * bin_size + start).ceil() + offset
    return Bins(first.clamp(0, size).long(), after.clamp(0, size).long())


def bins_between(low: Tensor, high: Tensor, count: int, size: int) -> Bins:
    return bins_of(torch.zeros_like(low), (high - low + 1).clamp_min(1), count, low, size)


def _roi_pool(
    planes: Tensor, regions: Tensor, pooled: tuple[int, int], spatial_scale: float
) -> Tensor:
    """Pool (B, C, H, W) over regions (R, 5) to (R, C, pooled_h, pooled_w); an empty bin is 0."""
    regions = regions.flatten(1)
    if planes.is_meta or len(regions) == 0:
        return planes.new_zeros(len(regions), planes.shape[1], *pooled)
    flat = planes.flatten(2)
    image = regions[:, 0].long()
    with torch.no_grad():
        corners = rounded(regions[:, 1:] * spatial_scale)
        rows = bins_between(corners[:, 1], corners[:, 3], pooled[0], planes.shape[2])
        columns = bins_between(corners[:, 0], corners[:, 2], pooled[1], planes.shape[3])
        parts = [
            slice(start, start + ROIS_AT_ONCE) for start in range(0, len(regions), ROIS_AT_ONCE)
        ]
        place = torch.cat(
            [
                largest(flat[image[part]], rows.of(part), columns.of(part), planes.shape[3])
                for part in parts
            ]
        )
    channel = torch.arange(planes.shape[1], device=planes.device).view(-1, 1, 1)
    values = flat[image.view(-1, 1, 1, 1), channel, place.clamp_min(0)]
    return values.masked_fill(place < 0, 0)


def largest(flat: Tensor, rows: Bins, columns: Bins, width: int) -> Tensor:
    """Return the first place of each bin's maximum in (R, C, H · W), or -1 for an empty bin."""
    row, row_counts = rows.places()
    column, column_counts = columns.places()
    index = (row[:, :, None, :, None] * width + column[:, None, :, None, :]).flatten(3)
    counts = (row_counts[:, :, None, :, None] & column_counts[:, None, :, None, :]).flatten(3)
    index = index.where(counts, 0).unsqueeze(1).expand(-1, flat.shape[1], -1, -1, -1)
    values = flat.gather(2, index.flatten(2)).view(index.shape)
    best = values.masked_fill(~counts.unsqueeze(1), -math.inf).argmax(-1, keepdim=True)
    place = index.gather(-1, best).squeeze(-1)
    return place.masked_fill(~counts.any(-1).unsqueeze(1), -1)


def _psroi_pool(
    planes: Tensor, regions: Tensor, output_dim: int, group_size: int, spatial_scale: float
) -> Tensor:
    """Pool (B, output_dim · group_size², H, W) to (R, output_dim, group_size, group_size)."""
    regions = regions.flatten(1)
    high, wide = planes.shape[2:]
    start = rounded(regions[:, 1:3]) * spatial_scale
    length = ((rounded(regions[:, 3:5]) + 1) * spatial_scale - start).clamp_min(0.1)
    rows = covered(start[:, 1], length[:, 1], group_size, high, planes.dtype)
    columns = covered(start[:, 0], length[:, 0], group_size, wide, planes.dtype)
    grouped = planes.reshape(len(planes), output_dim, group_size, group_size, high, wide)
    image = regions[:, 0].long()
    total = torch.zeros((), dtype=planes.dtype, device=planes.device)
    for number in range(len(planes)):
        here = (image == number).to(planes.dtype).view(-1, 1, 1)
        by_row = torch.einsum("rqw,opqhw->ropqh", columns, grouped[number])
        total = total + torch.einsum("rph,ropqh->ropq", rows * here, by_row)
    area = rows.sum(-1)[:, :, None] * columns.sum(-1)[:, None, :]
    return total / area.clamp_min(1).unsqueeze(1)


def covered(start: Tensor, length: Tensor, count: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return (R, count, size): 1 where a bin covers the row or column, else 0."""
    bins = bins_of(start, length, count, torch.zeros_like(start), size)
    place = torch.arange(size, device=start.device)
    inside = (place >= bins.first.unsqueeze(-1)) & (place < bins.after.unsqueeze(-1))
    return inside.to(dtype)


def check_regions(spec: Spec) -> None:
    spec.check_axes(4)
    if math.prod(spec.bottoms[1][1:]) != 5:
        raise spec.error(
            f" has regions {tuple(spec.bottoms[1])}; expected (R, 5): image, x1, y1, x2, y2"
        )


def roi_pooling(spec: Spec) -> Function:
    check_regions(spec)
    pooled = (spec.positive("pooled_h"), spec.positive("pooled_w"))
    scale = spec.param.number("spatial_scale", 1.0)
    return Function(_roi_pool, pooled=pooled, spatial_scale=scale)


def psroi_pooling(spec: Spec) -> Function:
    check_regions(spec)
    output_dim, group_size = spec.positive("output_dim"), spec.positive("group_size")
    channels = spec.bottoms[0][1]
    if channels != output_dim * group_size**2:
        raise spec.error(
            f" has {channels} channels; expected output_dim · "
            f"group_size² = {output_dim * group_size**2}"
        )
    return Function(
        _psroi_pool,
        output_dim=output_dim,
        group_size=group_size,
        spatial_scale=spec.param.number("spatial_scale", 1.0),
    )


LAYERS = {
    "PSROIPooling": Kind(psroi_pooling, "psroi_pooling_param", (), bottoms=(2,)),
    "ROIPooling": Kind(roi_pooling, "roi_pooling_param", (), bottoms=(2,)),
}
