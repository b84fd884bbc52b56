"""Layers that resize planes: Interp (bilinear), Upsample (each value repeated, or by a mask).

Sources of the facts: Interp, the forks of DeepLab (github.com/gpapan/caffe) and PSPNet
(github.com/hszhao/PSPNet), of which the second takes shrink_factor and zoom_factor together. The
corners of both planes lie on each other. Upsample, the forks of MobileNet-YOLO
(github.com/eric612/MobileNet-YOLO: one bottom, scale) and of SegNet
(github.com/alexgkendall/caffe-segnet: a second bottom says where in the plane each value was the
largest).
"""

from torch import Tensor, nn
from torch.nn import functional

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.checks import positive, want_axes
from firecaffe.caffe.layers.spec import Kind, Spec


class Interp(nn.Module):
    """(B, C, H, W), cut at its border, to another height and width by bilinear interpolation."""

    def __init__(
        self, shrink: int, zoom: int, size: tuple[int, int] | None, cut: tuple[int, int]
    ) -> None:
        """size: the height and width; None takes what shrink and zoom make.
        cut: so many rows and columns go at the beginning and at the end.
        """
        super().__init__()
        self.shrink, self.zoom, self.size, self.cut = shrink, zoom, size, cut

    def forward(self, planes: Tensor) -> Tensor:
        begin, end = self.cut
        height, width = planes.shape[2] - begin - end, planes.shape[3] - begin - end
        planes = planes.narrow(2, begin, height).narrow(3, begin, width)
        size = self.size or (self.resized(height), self.resized(width))
        return functional.interpolate(planes, size, mode="bilinear", align_corners=True)

    def resized(self, length: int) -> int:
        shrunk = (length - 1) // self.shrink + 1
        return (shrunk - 1) * self.zoom + 1


class Upsample(nn.Module):
    """(B, C, H, W): each value as a square of scale times scale."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, planes: Tensor) -> Tensor:
        return functional.interpolate(planes, scale_factor=self.scale, mode="nearest")


class Unpool(nn.Module):
    """(B, C, H, W) and the places of its values in a larger plane, which is 0 elsewhere."""

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, planes: Tensor, places: Tensor) -> Tensor:
        height, width = self.size
        batch, channels = planes.shape[:2]
        larger = planes.new_zeros(batch, channels, height * width)
        larger = larger.scatter(2, places.flatten(2).long(), planes.flatten(2))
        return larger.view(batch, channels, height, width)


def interp(spec: Spec) -> Interp:
    check_bottoms(spec, 1)
    want_axes(spec, 4)
    param = spec.param
    cut = (-param.integer("pad_beg"), -param.integer("pad_end"))
    if min(cut) < 0:
        name = "pad_beg" if cut[0] < 0 else "pad_end"
        raise param.error(
            f"{name} is {-min(cut)}; expected 0, or less to cut the border", param.line_of(name)
        )
    height, width = spec.bottoms[0][2] - sum(cut), spec.bottoms[0][3] - sum(cut)
    if min(height, width) < 1:
        raise param.error(
            f"pad_beg and pad_end of {spec.name!r} leave nothing of {tuple(spec.bottoms[0])}"
        )
    size = None
    if param.has("height") or param.has("width"):
        size = (positive(spec, "height"), positive(spec, "width"))
    has_factor = param.has("shrink_factor") or param.has("zoom_factor")
    if has_factor == (size is not None):
        raise spec.layer.error(
            f"Interp {spec.name!r} needs height and width, or shrink_factor or zoom_factor; "
            f"found {'both' if has_factor else 'neither'}"
        )
    return Interp(positive(spec, "shrink_factor", 1), positive(spec, "zoom_factor", 1), size, cut)


def upsample(spec: Spec) -> Upsample | Unpool:
    check_bottoms(spec, 1, 2)
    want_axes(spec, 4)
    if len(spec.bottoms) == 1:
        return Upsample(positive(spec, "scale", 2))
    return Unpool(unpooled(spec))


def unpooled(spec: Spec) -> tuple[int, int]:
    """The height and width that SegNet's layer makes."""
    param = spec.param
    if tuple(spec.bottoms[0]) != tuple(spec.bottoms[1]):
        raise spec.layer.error(
            f"Upsample {spec.name!r} has values {tuple(spec.bottoms[0])} and places "
            f"{tuple(spec.bottoms[1])}; expected the same shape"
        )
    if param.has("upsample_h") or param.has("upsample_w"):
        param.ignore("scale", "scale_h", "scale_w", "pad_out_h", "pad_out_w")
        return positive(spec, "upsample_h"), positive(spec, "upsample_w")
    scale = positive(spec, "scale", 2)
    height = spec.bottoms[0][2] * positive(spec, "scale_h", scale)
    width = spec.bottoms[0][3] * positive(spec, "scale_w", scale)
    return height - param.flag("pad_out_h"), width - param.flag("pad_out_w")


LAYERS = {
    "Interp": Kind(interp, "interp_param", ()),
    "Upsample": Kind(upsample, "upsample_param", ()),
}
