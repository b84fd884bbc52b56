"""DetectionOutput against SSD's rules, box by box."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.caffe.layers.made import layer, module_of, on_meta, refusal

BOXES, CLASSES, BATCH = 40, 4, 3


def decode(code: str, offsets: Any, prior: Any, variance: Any) -> list[float]:
    x1, y1, x2, y2 = prior
    a, b, c, d = (o * v for o, v in zip(offsets, variance, strict=True))
    width, height = x2 - x1, y2 - y1
    if code == "CORNER":
        return [x1 + a, y1 + b, x2 + c, y2 + d]
    if code == "CORNER_SIZE":
        return [x1 + a * width, y1 + b * height, x2 + c * width, y2 + d * height]
    x, y = (x1 + x2) / 2 + a * width, (y1 + y2) / 2 + b * height
    half_width, half_height = math.exp(c) * width / 2, math.exp(d) * height / 2
    return [x - half_width, y - half_height, x + half_width, y + half_height]


def overlap(p: Any, q: Any) -> float:
    width = min(p[2], q[2]) - max(p[0], q[0])
    height = min(p[3], q[3]) - max(p[1], q[1])
    if width <= 0 or height <= 0:
        return 0.0
    one, two = (max(r[2] - r[0], 0) * max(r[3] - r[1], 0) for r in (p, q))
    return float(width * height / (one + two - width * height))


def expected_rows(values: dict[str, np.ndarray], words: dict[str, Any]) -> list[list[float]]:
    priors, variances = values["priors"].reshape(2, BOXES, 4)
    if words.get("encoded"):
        variances = np.ones_like(variances)
    coded = 1 if words.get("share", True) else CLASSES
    offsets = values["locations"].reshape(BATCH, BOXES, coded, 4)
    scores = values["confidences"].reshape(BATCH, BOXES, CLASSES)
    rows = []
    for image in range(BATCH):
        kept: list[tuple[float, int, list[float]]] = []
        for label in range(CLASSES):
            if label == words.get("background", 0):
                continue
            corners = [
                decode(words["code"], offsets[image, b, label % coded], priors[b], variances[b])
                for b in range(BOXES)
            ]
            order = [b for b in range(BOXES) if scores[image, b, label] > words["confidence"]]
            order.sort(key=lambda b: -scores[image, b, label])  # stable
            chosen: list[int] = []
            threshold = words["nms"]
            for b in order[: words.get("top_k", BOXES)]:
                if all(overlap(corners[b], corners[other]) <= threshold for other in chosen):
                    chosen.append(b)
                    if words.get("eta", 1) < 1 and threshold > 0.5:
                        threshold *= words["eta"]
            kept += [(float(scores[image, b, label]), label, corners[b]) for b in chosen]
        best = sorted(kept, key=lambda each: -each[0])[: words.get("keep", len(kept))]
        for label in range(CLASSES):
            rows += [[image, label, score, *box] for score, of, box in best if of == label]
    return rows


def drawn(share: bool, equal: bool = False) -> dict[str, np.ndarray]:
    random = np.random.RandomState(3)
    low = random.uniform(0, 0.6, (BOXES, 2))
    priors = np.concatenate([low, low + random.uniform(0.1, 0.4, (BOXES, 2))], 1)
    coded = 1 if share else CLASSES
    scores = random.uniform(0, 1, (BATCH, BOXES * CLASSES))
    if equal:  # many of one score
        scores = scores.round(1)
    return {
        "locations": random.standard_normal((BATCH, BOXES * coded * 4)),
        "confidences": scores,
        "priors": np.stack([priors.ravel(), np.full(BOXES * 4, 0.1)])[None],
    }


def text_of(words: dict[str, Any]) -> str:
    nms = f"nms_threshold: {words['nms']} eta: {words.get('eta', 1)} "
    if "top_k" in words:
        nms += f"top_k: {words['top_k']}"
    param = (
        f"num_classes: {CLASSES} code_type: {words['code']} nms_param {{ {nms} }} "
        f"share_location: {str(words.get('share', True)).lower()} "
        f"background_label_id: {words.get('background', 0)} "
        f"variance_encoded_in_target: {str(words.get('encoded', False)).lower()} "
        f"confidence_threshold: {words['confidence']} keep_top_k: {words.get('keep', -1)}"
    )
    return layer("DetectionOutput", f"detection_output_param {{ {param} }}")


PLAIN = {"code": "CENTER_SIZE", "nms": 0.4, "confidence": 0.3}
WORDS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "corner": {**PLAIN, "code": "CORNER"},
    "corner_size": {**PLAIN, "code": "CORNER_SIZE"},
    "per_class": {**PLAIN, "share": False},
    "encoded": {**PLAIN, "encoded": True},
    "background": {**PLAIN, "background": 2},
    "no_background": {**PLAIN, "background": -1},
    "top_k": {**PLAIN, "top_k": 9},
    "keep_top_k": {**PLAIN, "keep": 7},
    "both": {**PLAIN, "top_k": 12, "keep": 10, "nms": 0.6, "share": False},
    "eta": {**PLAIN, "nms": 0.8, "eta": 0.7, "confidence": 0.01},
}


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("name", WORDS)
def test_boxes_are_decoded_and_the_best_stay(name: str, equal: bool) -> None:
    words = WORDS[name]
    values = drawn(words.get("share", True), equal)
    bottoms = [torch.from_numpy(each) for each in values.values()]
    module = module_of(text_of(words), *(tuple(each.shape) for each in bottoms))
    found = module(*bottoms)
    expected = expected_rows(values, words)
    assert found.shape == (1, 1, len(expected), 7)
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-9, atol=1e-12)


def test_no_box_is_a_row_of_minus_one_for_each_image() -> None:
    values = drawn(True)
    bottoms = [torch.from_numpy(each).float() for each in values.values()]
    module = module_of(text_of({**PLAIN, "confidence": 2}), *(tuple(b.shape) for b in bottoms))
    found = module(*bottoms)
    assert found.tolist() == [[[[float(image), *[-1.0] * 6] for image in range(BATCH)]]]


def test_a_box_goes_if_it_overlaps_by_more_than_the_threshold() -> None:
    values = drawn(True)
    values["locations"][:] = 0
    values["priors"][0, 0] = np.tile([0.25, 0.25, 0.5, 0.5], BOXES)
    bottoms = [torch.from_numpy(each) for each in values.values()]
    shapes = [tuple(each.shape) for each in bottoms]
    for threshold, rows in ((1.0, BOXES), (0.99, 1)):
        text = text_of({**PLAIN, "confidence": 0, "nms": threshold})
        assert module_of(text, *shapes)(*bottoms).shape[2] == BATCH * (CLASSES - 1) * rows


def test_on_the_meta_device_there_are_as_many_as_there_can_be() -> None:
    shapes = [each.shape for each in drawn(True).values()]
    assert on_meta(text_of({**PLAIN, "keep": 7}), *shapes) == [(1, 1, BATCH * 7, 7)]
    assert on_meta(text_of({**PLAIN, "top_k": 5}), *shapes) == [(1, 1, BATCH * 3 * 5, 7)]
    assert on_meta(text_of({**PLAIN, "background": -1}), *shapes) == [(1, 1, BATCH * 160, 7)]


def test_files_that_are_asked_for_are_not_taken_in_silence() -> None:
    shapes = [each.shape for each in drawn(True).values()]
    text = text_of(PLAIN)[:-3]
    module_of(text + ' save_output_param { label_map_file: "labels" } } }', *shapes)
    with pytest.raises(AssertionError):
        module_of(
            text + ' save_output_param { output_directory: "out" output_format: "VOC" } } }',
            *shapes,
        )


def test_what_cannot_be_is_one_line() -> None:
    shapes = [each.shape for each in drawn(True).values()]
    assert "eta is 0" in refusal(text_of({**PLAIN, "eta": 0}), *shapes)
    assert "nms_threshold is -1" in refusal(text_of({**PLAIN, "nms": -1}), *shapes)
    assert "no num_classes" in refusal(layer("DetectionOutput"), *shapes)
    assert "40 priors" in refusal(text_of({**PLAIN, "share": False}), *shapes)
