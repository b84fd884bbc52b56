"""Pooling: the maximum, the average or a random element of windows; and SPP.

Caffe rounds the number of windows up: ceil((size + 2 pad - kernel) / stride) + 1. With padding, a
last window that would begin after the image is omitted. torch's `ceil_mode` has the same rule, but
allows padding up to half the kernel only; modules here add larger padding. An average is over the
part of the window in the padded image. Without padding and with a stride above the kernel, the last
window may be empty. Caffe then writes to wrong memory; here this is refused. SPP (He et al. 2014,
arXiv 1406.4729) pools into 1, 2 · 2, 4 · 4 … bins for any size of plane, with windows of ceil(size
/ bins); padding and divisor are those of Caffe's SPPLayer and PoolingLayer.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.layers.spec import ENGINE, Function, Kind, Spec, shown

POOLS = ("MAX", "AVE", "STOCHASTIC")


class MaxPoolWithPlaces(nn.MaxPool2d):
    """Return the maxima, and their indices in the image: row times columns plus column."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, places = F.max_pool2d(
            x, self.kernel_size, self.stride, self.padding, ceil_mode=self.ceil_mode,
            return_indices=True,
        )  # fmt: skip
        return y, places.to(x.dtype)


def _global_max_pool(x_BCHW: Tensor) -> Tensor:
    return F.max_pool2d(x_BCHW, x_BCHW.shape[2:])


class _Windows(nn.Module):
    def __init__(
        self,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        pad: tuple[int, int],
        rounds_up: bool = True,
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.pad, self.rounds_up = kernel, stride, pad, rounds_up

    def extra_repr(self) -> str:
        return f"{self.kernel}, stride={self.stride}, pad={self.pad}"

    def count(self, size: int, axis: int) -> int:
        """Count the windows over `size` rows (axis 0) or columns (axis 1)."""
        kernel, stride, pad = self.kernel[axis], self.stride[axis], self.pad[axis]
        left = size + 2 * pad - kernel
        count = (-(-left // stride) if self.rounds_up else left // stride) + 1
        return count - (any(self.pad) and (count - 1) * stride >= size + pad)

    def fit(self, size: int, axis: int) -> bool:
        """Whether the windows end at the padded image's edge, so that rounding has no effect."""
        return (size + 2 * self.pad[axis] - self.kernel[axis]) % self.stride[axis] == 0

    def padded(self, x: Tensor, value: float) -> Tensor:
        around: list[int] = []
        for axis in (1, 0):
            size = x.shape[2 + axis]
            needed = (self.count(size, axis) - 1) * self.stride[axis] + self.kernel[axis]
            around += [self.pad[axis], needed - size - self.pad[axis]]
        return F.pad(x, around, value=value)


class MaxWindows(_Windows):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.padded(x, -math.inf), self.kernel, self.stride)


class AverageWindows(_Windows):
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self.inside(x, axis) for axis in (0, 1))
        means = F.avg_pool2d(self.padded(x, 0.0), self.kernel, self.stride)  # ONNX cannot sum
        return means * (math.prod(self.kernel) / (rows[:, None] * columns))

    def inside(self, x: Tensor, axis: int) -> Tensor:
        size, pad = x.shape[2 + axis], self.pad[axis]
        starts = [n * self.stride[axis] - pad for n in range(self.count(size, axis))]
        inside = [min(start + self.kernel[axis], size + pad) - start for start in starts]
        return torch.tensor(inside, dtype=x.dtype, device=x.device)


class AveragePool(nn.AvgPool2d):
    """Torch's average pool, with Caffe's windows at the lower and right edges if rounded up."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            return super().forward(x)
        # OpenCV divides by the whole window at the edges, so the exported file states the divisors.
        kernel, stride, pad = (
            _two(given) for given in (self.kernel_size, self.stride, self.padding)
        )
        windows = AverageWindows(kernel, stride, pad, self.ceil_mode)
        if not self.ceil_mode or all(
            windows.fit(size, axis) for axis, size in enumerate(x.shape[2:])
        ):
            return F.avg_pool2d(x, kernel, stride, pad)
        weighted: Tensor = windows(x)
        return weighted


class StochasticPool(_Windows):
    """Draw an element in proportion to its value (Zeiler and Fergus 2013, arXiv 1301.3557).

    In evaluation, it is the mean with these weights. Elements must not be negative.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            padded = self.padded(x, 0.0)
            means, squares = (
                F.avg_pool2d(values, self.kernel, self.stride)
                for values in (padded, padded.square())
            )
            return squares / (means + torch.finfo(x.dtype).tiny)
        rows, columns = (self.count(x.shape[2 + axis], axis) for axis in (0, 1))
        windows = F.unfold(self.padded(x, 0.0), self.kernel, stride=self.stride)
        windows_BCKN = windows.reshape(*x.shape[:2], -1, rows * columns)
        so_far_BCKN = windows_BCKN.detach().cumsum(2)
        limit_BC1N = torch.rand_like(so_far_BCKN[:, :, -1:]) * so_far_BCKN[:, :, -1:]
        # The first element whose cumulative sum reaches the limit.
        place_BC1N = (so_far_BCKN < limit_BC1N).sum(2, keepdim=True)
        chosen_BC1N = windows_BCKN.gather(2, place_BC1N.clamp(max=windows_BCKN.shape[2] - 1))
        return chosen_BC1N.reshape(*x.shape[:2], rows, columns)


def pooling(spec: Spec) -> nn.Module:
    param, bottom = spec.param, spec.bottoms[0]
    if len(bottom) != 4:
        raise spec.error(f" goes over {shown(bottom)}; expected batch x channels x rows x columns")
    method, places = param.choice("pool", POOLS, "MAX"), spec.num_tops > 1
    if places and method != "MAX":
        raise spec.error(": a second top, the places, is of MAX alone")
    pad, stride = spec.height_width("pad", 0), spec.height_width("stride", 1)
    if param.flag("global_pooling"):
        if pad != (0, 0) or stride != (1, 1):
            raise spec.error(": global_pooling has no pad and a stride of 1")
        if any(map(param.has, ("kernel_size", "kernel_h", "kernel_w"))):
            raise spec.error(": global_pooling takes the whole image, no kernel_size")
        if method == "AVE":
            return nn.AdaptiveAvgPool2d(1)
        if method == "MAX" and not places:
            return Function(_global_max_pool)
        kernel = (bottom[2], bottom[3])
    else:
        kernel = spec.height_width("kernel_size", None, "kernel")
    if min(*kernel, *stride) < 1 or any(p >= k for p, k in zip(pad, kernel, strict=True)):
        raise spec.error(
            f" has windows of {shown(kernel)}, a stride of {shown(stride)} and padding of "
            f"{shown(pad)}; expected sizes of at least 1, and padding below the window's"
        )
    up = param.choice("round_mode", ("CEIL", "FLOOR"), "CEIL") == "CEIL"
    up = param.flag("ceil_mode", up)  # another fork's name for it
    _check_windows(spec, _Windows(kernel, stride, pad, up))
    if method == "STOCHASTIC":
        if pad != (0, 0):
            raise spec.error(": STOCHASTIC has no padding", "pad")
        return StochasticPool(kernel, stride, pad, up)
    if all(2 * p <= k for p, k in zip(pad, kernel, strict=True)):  # torch has these
        sizes: list[Any] = [_one(pair) for pair in (kernel, stride, pad)]
        more: dict[str, Any] = {"ceil_mode": up}
        largest = MaxPoolWithPlaces if places else nn.MaxPool2d
        return (largest if method == "MAX" else AveragePool)(*sizes, **more)
    if places:
        raise spec.error(
            f": places with padding of {shown(pad)} for windows of {shown(kernel)} are not built; "
            "expected at most half"
        )
    return (MaxWindows if method == "MAX" else AverageWindows)(kernel, stride, pad, up)


def _check_windows(spec: Spec, windows: _Windows) -> None:
    kernel, stride, image = windows.kernel, windows.stride, spec.bottoms[0][2:]
    counts = [windows.count(size, axis) for axis, size in enumerate(image)]
    if min(counts) < 1:
        raise spec.error(f": no window of {shown(kernel)} fits {shown(image)}")
    last = [(n - 1) * s for n, s in zip(counts, stride, strict=True)]
    if any(start >= size + p for start, size, p in zip(last, image, windows.pad, strict=True)):
        raise spec.error(
            f": its last window of {shown(kernel)}, stride {shown(stride)}, lies behind the "
            f"{shown(image)} and holds nothing; round_mode: FLOOR leaves it out"
        )


def _two(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _one(size: tuple[int, int]) -> int | tuple[int, int]:
    return size[0] if size[0] == size[1] else size


def _pyramid(planes: Tensor, levels: int, pool: str) -> Tensor:
    """Pool (B, C, H, W) to (B, sum of C · bins over levels); (B, C, 1, 1) if there is one level."""
    pooled = [_level(planes, 2**level, pool) for level in range(levels)]
    return pooled[0] if levels == 1 else torch.cat([p.flatten(1) for p in pooled], 1)


def _level(planes: Tensor, bins: int, pool: str) -> Tensor:
    rows, columns = planes.shape[2:]
    high, above, below = windows(rows, bins)
    wide, left, right = windows(columns, bins)
    if pool == "MAX":
        padded = F.pad(planes, (left, right, above, below), value=-math.inf)
        return F.max_pool2d(padded, (high, wide))
    return F.avg_pool2d(F.pad(planes, (left, right, above, below)), (high, wide))


def windows(size: int, bins: int) -> tuple[int, int, int]:
    """Return the window length for `bins` windows, and the padding before and after the plane."""
    length = -(-size // bins)
    missing = length * bins - size
    return length, (missing + 1) // 2, missing // 2


def spp(spec: Spec) -> Function:
    spec.check_axes(4)
    param, levels = spec.param, spec.positive("pyramid_height")
    pool = param.choice("pool", POOLS, "MAX")
    if pool == "STOCHASTIC":
        raise param.error("pool is STOCHASTIC; expected MAX or AVE", "pool")
    for level in range(levels):
        for size in spec.bottoms[0][2:]:
            length, before, _ = windows(size, 2**level)
            if before >= length:
                raise param.error(
                    f"pyramid_height is {levels}; planes of {tuple(spec.bottoms[0][2:])} are too "
                    f"small for {2**level} bins a side, as the first would be padding alone",
                    "pyramid_height",
                )
    return Function(_pyramid, levels=levels, pool=pool)


LAYERS = {
    "Pooling": Kind(pooling, "pooling_param", ignored=ENGINE),
    "SPP": Kind(spp, "spp_param", (), ignored=ENGINE),
}
