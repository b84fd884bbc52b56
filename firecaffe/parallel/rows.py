"""Images in parts of rows: what a kernel sees of them, and pools over them.

Output rows are cut anew, equally. Each part receives the rows that its own are made from, and the
padding beyond the image's edges. Columns stay whole. Source: Dryden et al. 2019, arXiv 1903.06681.
"""

from itertools import cycle, pairwise
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firecaffe.parallel.cut import Cut, cut
from firecaffe.parallel.halo import with_halos
from firecaffe.parallel.slide import Slide, pair, pool_slide, windows_of

if TYPE_CHECKING:
    from firecaffe.parallel.tensor import TensorInParts


def is_in_rows(x: "TensorInParts") -> bool:
    return x.ndim in (3, 4) and x.cut_dim == x.ndim - 2


def seen_of(x: "TensorInParts", slide: Slide, fill: float) -> tuple[Cut, list[Tensor]]:
    """Return the cut of the output rows and what own parts are made from, padded with `fill`."""
    rows = x.shape[x.cut_dim]
    ends = cut(slide.outputs(rows), x.group.num_parts)
    seen = [slide.seen(range(start, stop)) for start, stop in pairwise(ends)]
    windows = windows_of(seen, rows)
    given = with_halos(x.group, x.own, x.cut, windows, x.cut_dim)
    padded = []
    for number, part in zip(cycle(x.group.own), given, strict=False):
        most = len(seen[number])
        before = min(max(windows[number].start - seen[number].start, -1), most)
        after = min(max(seen[number].stop - windows[number].stop, -1), most)
        is_whole = before == after == 0
        padded.append(part if is_whole else F.pad(part, (0, 0, before, after), value=fill))
    return ends, padded


def max_pool(
    x: "TensorInParts",
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Apply `F.max_pool2d` in parts; NotImplemented if it needs the whole."""
    slide = pool_slide(kernel_size, stride, padding, dilation, ceil_mode)
    if return_indices or not _can_go_on(x, slide):
        return NotImplemented
    ends, seen = seen_of(x, slide, -inf)
    settings = kernel_size, stride, (0, pair(padding)[1]), dilation, ceil_mode
    return x.with_parts([F.max_pool2d(part, *settings) for part in seen], ends)


def average_pool(
    x: "TensorInParts",
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    slide = pool_slide(kernel_size, stride, padding, 1, ceil_mode)
    if not _can_go_on(x, slide):
        return NotImplemented
    ends, seen = seen_of(x, slide, 0.0)
    settings = kernel_size, stride, (0, pair(padding)[1]), ceil_mode, count_include_pad
    averages = [F.avg_pool2d(part, *settings, divisor_override) for part in seen]
    if divisor_override is None:
        low, high = -slide.before, x.shape[x.cut_dim] + slide.after
        if not count_include_pad:
            low, high = low + slide.before, high - slide.after
        averages = [
            _divided_anew(part, slide, range(ends[number], ends[number + 1]), low, high)
            for number, part in zip(cycle(x.group.own), averages, strict=False)
        ]
    return x.with_parts(averages, ends)


def _divided_anew(means: Tensor, slide: Slide, outputs: range, low: int, high: int) -> Tensor:
    # Divides by the number of rows that count, which are those of [low, high), instead of all.
    counts = []
    for output in outputs:
        seen = slide.seen(range(output, output + 1))
        counts.append(min(seen.stop, high) - max(seen.start, low))
    if all(count == slide.kernel for count in counts):
        return means
    by = [slide.kernel / count for count in counts]
    return means * torch.tensor(by, dtype=means.dtype, device=means.device).view(-1, 1)


def _can_go_on(x: "TensorInParts", slide: Slide) -> bool:
    return is_in_rows(x) and slide.outputs(x.shape[x.cut_dim]) >= x.group.num_parts
