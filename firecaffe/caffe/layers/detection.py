"""SSD's layers (arXiv 1512.02325): PriorBox (section 2.2) and DetectionOutput.

Codes, thresholds and order are those of SSD's fork (github.com/weiliu89/caffe). For each min_size,
PriorBox makes its square, then the square of sqrt(min · max), then the aspect ratios in the file's
order, each followed by its inverse if `flip`. DetectionOutput keeps the best of the boxes that
overlap; equal scores are ordered by box, then by label.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from firecaffe.caffe.layers.spec import Function, Kind, Spec

EQUAL = 1e-6
"""Aspect ratios that differ by less count as equal."""


def _priors(
    planes: Tensor,
    images: Tensor,
    sizes: Sequence[tuple[float, float]],
    variances: Sequence[float],
    image: tuple[float, float],
    step: tuple[float, float],
    offset: float,
    clip: bool,
) -> Tensor:
    """Make (1, 2, H · W · boxes · 4): x1, y1, x2, y2 as shares of the image, and their variances.

    `sizes` are (width, height) of each box, `image` and `step` are (height, width), all in pixels.
    `image` 0: the size of the images. `step` 0: the image's size over that of the planes.
    """
    rows, columns = planes.shape[2:]
    height, width = (
        given or float(size) for given, size in zip(image, images.shape[2:], strict=True)
    )
    y_step, x_step = step[0] or height / rows, step[1] or width / columns
    tensor = partial(torch.tensor, dtype=torch.float32, device=planes.device)
    place = partial(torch.arange, dtype=torch.float32, device=planes.device)
    sides = tensor(sizes)
    half = torch.cat([-sides, sides], 1) / 2
    y = (place(rows) + offset) * y_step
    x = (place(columns) + offset) * x_step
    center = torch.stack([x.expand(rows, -1), y.unsqueeze(1).expand(-1, columns)], -1)
    scale = tensor([width, height, width, height])
    corners = (center.repeat(1, 1, 2).unsqueeze(2) + half) / scale
    if clip:
        corners = corners.clamp(0, 1)
    spread = tensor(variances).expand_as(corners)
    return torch.stack([corners.flatten(), spread.flatten()]).unsqueeze(0)


def prior_box(spec: Spec) -> Function:
    spec.check_axes(4)
    spec.check_axes(4, bottom=1)
    param = spec.param
    variances = param.numbers("variance") or [0.1]
    if len(variances) not in (1, 4) or min(variances) <= 0:
        raise param.error(
            f"variance is {', '.join(map(str, variances))}; expected 1 or 4 numbers above 0",
            "variance",
        )
    return Function(
        _priors,
        sizes=box_sizes(spec),
        variances=variances * (4 // len(variances)),
        image=pair(spec, "img_size", "img_h", "img_w"),
        step=pair(spec, "step", "step_h", "step_w"),
        offset=param.number("offset", 0.5),
        clip=param.flag("clip"),
    )


def box_sizes(spec: Spec) -> list[tuple[float, float]]:
    param = spec.param
    smallest, largest = param.numbers("min_size"), param.numbers("max_size")
    if not smallest or min(smallest) <= 0:
        raise spec.error(" needs min_size, above 0", "min_size")
    if largest and len(largest) != len(smallest):
        raise param.error(
            f"{len(largest)} max_size for {len(smallest)} min_size; expected as many, or none",
            "max_size",
        )
    ratios = aspect_ratios(spec)
    sizes = []
    for place, low in enumerate(smallest):
        sizes.append((low, low))
        if largest:
            if largest[place] <= low:
                raise param.error(
                    f"max_size is {largest[place]:g}; expected more than the min_size {low:g}",
                    "max_size",
                )
            middle = math.sqrt(low * largest[place])
            sizes.append((middle, middle))
        sizes += [(low * math.sqrt(ratio), low / math.sqrt(ratio)) for ratio in ratios]
    return sizes


def aspect_ratios(spec: Spec) -> list[float]:
    """Return the aspect ratios except 1, the ratio of min_size itself."""
    ratios = [1.0]
    flip = spec.param.flag("flip", True)
    for ratio in spec.param.numbers("aspect_ratio"):
        if ratio <= 0:
            raise spec.param.error(
                f"aspect_ratio is {ratio:g}; expected more than 0", "aspect_ratio"
            )
        if all(abs(ratio - other) >= EQUAL for other in ratios):
            ratios += [ratio, 1 / ratio] if flip else [ratio]
    return ratios[1:]


def pair(spec: Spec, both: str, high: str, wide: str) -> tuple[float, float]:
    """Return height and width, given as one number or as two; (0, 0) if not given."""
    param = spec.param
    if not any(map(param.has, (both, high, wide))):
        return 0.0, 0.0
    values = (param.number(high), param.number(wide))
    if param.has(both):
        if any(values):
            raise param.error(f"{both} is given beside {high} or {wide}; expected one way", both)
        values = (param.number(both), param.number(both))
    if min(values) <= 0:
        raise param.error(f"{both}, or {high} and {wide}, of {spec.name!r} must be above 0")
    return values


CODES = ("", "CORNER", "CENTER_SIZE", "CORNER_SIZE")


@dataclass(frozen=True)
class Rules:
    num_classes: int
    share_location: bool
    background_label_id: int
    code_type: str
    variance_encoded_in_target: bool
    confidence_threshold: float
    nms_threshold: float
    eta: float
    """Factor applied to the threshold after each kept box, while the threshold is above 0.5."""
    top_k: int
    """The maximum boxes of a class before overlaps are removed; below 0: all."""
    keep_top_k: int
    """The maximum boxes of an image after overlaps are removed; below 0: all."""


@torch.no_grad()
def _detected(locations: Tensor, confidences: Tensor, priors: Tensor, rules: Rules) -> Tensor:
    """Return (1, 1, N, 7): image, label, confidence, x1, y1, x2, y2 for each box.

    Rows are sorted by image, label and descending confidence. N depends on the values. If there is
    no box, each image has one row: its number and -1s. On the meta device, N is the maximum, which
    keep_top_k limits per image. The bottoms are locations (B, boxes · 4), or times classes if not
    shared; confidences (B, boxes · classes), as from Flatten; priors (1, 2, boxes · 4).
    """
    batch, boxes = len(locations), priors.shape[2] // 4
    labels = [number for number in range(rules.num_classes) if number != rules.background_label_id]
    if locations.is_meta:
        most = rules.top_k if 0 <= rules.top_k < boxes else boxes
        most *= len(labels)
        most = min(most, rules.keep_top_k) if rules.keep_top_k >= 0 else most
        return locations.new_empty(1, 1, batch * most, 7)
    label = torch.tensor(labels, device=locations.device)
    corners = decoded(locations.reshape(batch, boxes, -1, 4), priors, rules)
    scores = confidences.reshape(batch, boxes, -1)[..., label].transpose(1, 2)
    chosen = candidates(scores, rules)
    per_label = corners.transpose(1, 2)
    per_label = per_label if rules.share_location else per_label[:, label]
    per_label = per_label.expand(-1, len(labels), -1, -1)
    best = per_label.gather(2, chosen.box.unsqueeze(-1).expand(-1, -1, -1, 4))
    kept = non_max_suppress(best, chosen.counts, rules)
    if rules.keep_top_k >= 0:
        kept = best_of_image(chosen.score, kept, rules.keep_top_k)
    if not kept.any():
        rows = locations.new_full((batch, 7), -1)
        rows[:, 0] = torch.arange(batch, device=locations.device)
    else:
        image, row, _ = kept.nonzero(as_tuple=True)
        heads = torch.stack([image.to(best.dtype), label[row].to(best.dtype)], 1)
        rows = torch.cat([heads, chosen.score[kept].unsqueeze(1), best[kept]], 1)
    return rows.view(1, 1, -1, 7)


def decoded(codes: Tensor, priors: Tensor, rules: Rules) -> Tensor:
    low, high = priors[0, 0].view(-1, 1, 4).chunk(2, -1)
    variance = priors[0, 1].view(-1, 1, 4)
    if not rules.variance_encoded_in_target:
        codes = codes * variance
    first, second = codes.chunk(2, -1)
    size = high - low
    if rules.code_type == "CORNER":
        return torch.cat([low + first, high + second], -1)
    if rules.code_type == "CORNER_SIZE":
        return torch.cat([low + first * size, high + second * size], -1)
    center, half = (low + high) / 2 + first * size, second.exp() * size / 2
    return torch.cat([center - half, center + half], -1)


@dataclass(frozen=True)
class Candidates:
    """The boxes of each label by descending score, and whether they count: (B, labels, K) each."""

    box: Tensor
    score: Tensor
    counts: Tensor


def candidates(scores: Tensor, rules: Rules) -> Candidates:
    counts = scores > rules.confidence_threshold
    most = int(counts.sum(-1).max())
    most = min(most, rules.top_k) if rules.top_k >= 0 else most
    score, box = scores.where(counts, -math.inf).sort(dim=-1, descending=True, stable=True)
    score, box = score[..., :most], box[..., :most]
    return Candidates(box, score, counts.gather(-1, box))


def non_max_suppress(boxes: Tensor, counts: Tensor, rules: Rules) -> Tensor:
    """Select boxes, sorted best first, that overlap no earlier selected box above the threshold."""
    kept = torch.zeros_like(counts)
    threshold = boxes.new_full(counts.shape[:2], rules.nms_threshold)
    for place in range(counts.shape[-1]):
        over = overlap(boxes[:, :, place : place + 1], boxes[:, :, :place])
        blocked = (kept[..., :place] & (over > threshold.unsqueeze(-1))).any(-1)
        keep = counts[..., place] & ~blocked
        kept[..., place] = keep
        if rules.eta < 1:
            threshold = threshold.where(~(keep & (threshold > 0.5)), threshold * rules.eta)
    return kept


def overlap(one: Tensor, others: Tensor) -> Tensor:
    """Return the intersection over union of boxes given by corners; 0 if they are disjoint."""
    side = torch.minimum(one[..., 2:], others[..., 2:]) - torch.maximum(
        one[..., :2], others[..., :2]
    )
    common = side.clamp_min(0).prod(-1)
    union = area(one) + area(others) - common
    return torch.where(common > 0, common / union, 0.0)


def area(corners: Tensor) -> Tensor:
    return (corners[..., 2:] - corners[..., :2]).clamp_min(0).prod(-1)


def best_of_image(scores: Tensor, kept: Tensor, most: int) -> Tensor:
    """Reduce `kept` (B, labels, K) to the `most` best boxes of each image."""
    order = scores.where(kept, -math.inf).flatten(1).sort(dim=1, descending=True, stable=True)
    chosen = torch.zeros_like(kept).flatten(1).scatter(1, order.indices[:, :most], True)
    return chosen.view_as(kept) & kept


def detection_output(spec: Spec) -> Function:
    spec.check_axes(3, bottom=2)
    param, nms = spec.param, spec.param.message("nms_param")
    nms_threshold, eta = nms.number("nms_threshold", 0.3), nms.number("eta", 1.0)
    if not 0 < eta <= 1:
        raise nms.error(f"eta is {eta:g}; expected above 0, at most 1", "eta")
    if nms_threshold < 0:
        raise nms.error(f"nms_threshold is {nms_threshold:g}; expected 0 or more", "nms_threshold")
    files = param.message("save_output_param")
    if not files.text("output_directory"):
        files.ignore(*(field.name for field in files.fields))  # no file is written
    if not param.flag("visualize"):
        param.ignore("visualize_threshold", "save_file")
    rules = Rules(
        spec.positive("num_classes"),
        param.flag("share_location", True),
        param.integer("background_label_id"),
        param.choice("code_type", CODES, "CORNER"),
        param.flag("variance_encoded_in_target"),
        param.number("confidence_threshold", -math.inf),
        nms_threshold,
        eta,
        nms.integer("top_k", -1),
        param.integer("keep_top_k", -1),
    )
    boxes = spec.bottoms[2][2] // 4
    coded = 1 if rules.share_location else rules.num_classes
    for bottom, per_box, what in ((0, coded * 4, "locations"), (1, rules.num_classes, "scores")):
        count = math.prod(spec.bottoms[bottom][1:])
        if count != boxes * per_box:
            raise spec.error(f" has {count} {what} for {boxes} priors; expected {boxes * per_box}")
    return Function(_detected, rules=rules)


LAYERS = {
    "PriorBox": Kind(prior_box, "prior_box_param", (), bottoms=(2,)),
    "DetectionOutput": Kind(detection_output, "detection_output_param", (), bottoms=(3,)),
}
