"""DetectionOutput: from SSD's predictions to boxes: decoded, and the best of those that overlap.

Source: SSD (arXiv 1512.02325); codes, order and thresholds as in its fork
(github.com/weiliu89/caffe). Of equal scores the first box, then the first label, comes first.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firecaffe.caffe.layers.axis import check_bottoms
from firecaffe.caffe.layers.checks import positive, want_axes
from firecaffe.caffe.layers.spec import Kind, Spec

CODES = ("", "CORNER", "CENTER_SIZE", "CORNER_SIZE")


@dataclass(frozen=True)
class Rules:
    """What is kept, and how a box is coded."""

    num_classes: int
    share_location: bool
    background_label_id: int
    code_type: str
    variance_encoded_in_target: bool
    confidence_threshold: float
    nms_threshold: float
    eta: float
    """What the threshold is multiplied by after each box that is kept, while it is above 0.5."""
    top_k: int
    """So many of a class at most, before overlaps go; below 0, all."""
    keep_top_k: int
    """So many of an image at most, behind that; below 0, all."""


class DetectionOutput(nn.Module):
    """forward(locations, confidences, priors): (1, 1, N, 7), a row of image, label, confidence, x1,
    y1, x2, y2 for each box: by image, label, and falling confidence.

    N depends on the numbers. If there is none, a row of -1 for each image, which is its first
    entry. On the meta device N is the most that there can be: with keep_top_k, that for each image.

    locations (B, boxes · 4), or · classes if not shared; confidences (B, boxes · classes), each as
    Flatten leaves them; priors (1, 2, boxes · 4) as of PriorBox.
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self.rules = rules

    @torch.no_grad()
    def forward(self, locations: Tensor, confidences: Tensor, priors: Tensor) -> Tensor:
        rules = self.rules
        batch, boxes = len(locations), priors.shape[2] // 4
        labels = [each for each in range(rules.num_classes) if each != rules.background_label_id]
        if locations.is_meta:
            most = rules.top_k if 0 <= rules.top_k < boxes else boxes
            most *= len(labels)
            most = min(most, rules.keep_top_k) if rules.keep_top_k >= 0 else most
            return locations.new_empty(1, 1, batch * most, 7)
        label = torch.tensor(labels, device=locations.device)
        corners = decoded(locations.reshape(batch, boxes, -1, 4), priors, rules)
        scores = confidences.reshape(batch, boxes, -1)[..., label].transpose(1, 2)
        found = candidates(scores, rules)
        per_label = corners.transpose(1, 2)
        per_label = per_label if rules.share_location else per_label[:, label]
        per_label = per_label.expand(-1, len(labels), -1, -1)
        best = per_label.gather(2, found.box.unsqueeze(-1).expand(-1, -1, -1, 4))
        kept = best_apart(best, found.counts, rules)
        if rules.keep_top_k >= 0:
            kept = best_of_image(found.score, kept, rules.keep_top_k)
        if not kept.any():
            rows = locations.new_full((batch, 7), -1)
            rows[:, 0] = torch.arange(batch, device=locations.device)
        else:
            image, row, _ = kept.nonzero(as_tuple=True)
            heads = torch.stack([image.to(best.dtype), label[row].to(best.dtype)], 1)
            rows = torch.cat([heads, found.score[kept].unsqueeze(1), best[kept]], 1)
        return rows.view(1, 1, -1, 7)


def decoded(codes: Tensor, priors: Tensor, rules: Rules) -> Tensor:
    """(B, boxes, labels, 4) of codes to corners."""
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
    """(B, labels, K): the boxes of each label by falling score, and which of them count."""

    box: Tensor
    score: Tensor
    counts: Tensor


def candidates(scores: Tensor, rules: Rules) -> Candidates:
    """scores: (B, labels, boxes)."""
    counts = scores > rules.confidence_threshold
    most = int(counts.sum(-1).max())
    most = min(most, rules.top_k) if rules.top_k >= 0 else most
    score, box = scores.where(counts, -math.inf).sort(dim=-1, descending=True, stable=True)
    score, box = score[..., :most], box[..., :most]
    return Candidates(box, score, counts.gather(-1, box))


def best_apart(boxes: Tensor, counts: Tensor, rules: Rules) -> Tensor:
    """Which of (B, labels, K, 4), best first, overlap no better one that is kept by more than the
    threshold. Every label of every image at once.
    """
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
    """Intersection over union of corners; 0 where nothing is in both."""
    side = torch.minimum(one[..., 2:], others[..., 2:]) - torch.maximum(
        one[..., :2], others[..., :2]
    )
    common = side.clamp_min(0).prod(-1)
    union = area(one) + area(others) - common
    return torch.where(common > 0, common / union, 0.0)


def area(corners: Tensor) -> Tensor:
    return (corners[..., 2:] - corners[..., :2]).clamp_min(0).prod(-1)


def best_of_image(scores: Tensor, kept: Tensor, most: int) -> Tensor:
    """kept (B, labels, K), with the `most` best of each image alone."""
    order = scores.where(kept, -math.inf).flatten(1).sort(dim=1, descending=True, stable=True)
    chosen = torch.zeros_like(kept).flatten(1).scatter(1, order.indices[:, :most], True)
    return chosen.view_as(kept) & kept


def detection_output(spec: Spec) -> DetectionOutput:
    check_bottoms(spec, 3)
    want_axes(spec, 3, bottom=2)
    param, nms = spec.param, spec.param.message("nms_param")
    nms_threshold, eta = nms.number("nms_threshold", 0.3), nms.number("eta", 1.0)
    if not 0 < eta <= 1:
        raise nms.error(f"eta is {eta:g}; expected above 0, at most 1", nms.line_of("eta"))
    if nms_threshold < 0:
        raise nms.error(
            f"nms_threshold is {nms_threshold:g}; expected 0 or more", nms.line_of("nms_threshold")
        )
    files = param.message("save_output_param")
    if not files.text("output_directory"):
        files.ignore(*(each.name for each in files.fields))  # no file is asked for
    if not param.flag("visualize"):
        param.ignore("visualize_threshold", "save_file")
    rules = Rules(
        positive(spec, "num_classes"),
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
        found = math.prod(spec.bottoms[bottom][1:])
        if found != boxes * per_box:
            raise spec.layer.error(
                f"DetectionOutput {spec.name!r} has {found} {what} for {boxes} priors; "
                f"expected {boxes * per_box}"
            )
    return DetectionOutput(rules)


LAYERS = {"DetectionOutput": Kind(detection_output, "detection_output_param", ())}
