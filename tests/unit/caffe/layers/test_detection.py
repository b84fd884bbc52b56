"""Boxes of detectors, one after the other: PriorBox, DetectionOutput, ROIPooling, PSROIPooling."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.caffe.layers.made import layer, module_of, on_meta

PLANES, IMAGES = (2, 5, 3, 4), (2, 3, 30, 60)


def found_of(words: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The corners and the variances, (rows, columns, boxes, 4)."""
    text = layer("PriorBox", f"prior_box_param {{ {words} }}")
    found = module_of(text, PLANES, IMAGES)(torch.zeros(PLANES), torch.zeros(IMAGES))
    assert on_meta(text, PLANES, IMAGES) == [tuple(found.shape)]
    corners, variances = found.view(2, 3, 4, -1, 4)
    return corners, variances


def boxes(
    sizes: list[tuple[float, float]],
    image: tuple[float, float] = (30, 60),
    step: tuple[float, float] = (10, 15),
    offset: float = 0.5,
) -> np.ndarray:
    out = np.zeros((3, 4, len(sizes), 4))
    for i in range(3):
        for j in range(4):
            x, y = (j + offset) * step[1], (i + offset) * step[0]
            for k, (width, height) in enumerate(sizes):
                out[i, j, k] = [
                    (x - width / 2) / image[1],
                    (y - height / 2) / image[0],
                    (x + width / 2) / image[1],
                    (y + height / 2) / image[0],
                ]
    return out


def test_a_place_has_the_small_square_the_middle_one_and_the_ratios() -> None:
    corners, variances = found_of("min_size: 6 max_size: 24 aspect_ratio: 2 aspect_ratio: 3")
    middle = math.sqrt(6 * 24)
    ratios = [(6 * math.sqrt(r), 6 / math.sqrt(r)) for r in (2, 1 / 2, 3, 1 / 3)]
    sizes = [(6, 6), (middle, middle), *ratios]
    np.testing.assert_allclose(corners, boxes(sizes), atol=1e-6)
    assert (variances == torch.tensor(0.1)).all()


def test_sizes_come_one_after_the_other_and_a_ratio_comes_once() -> None:
    corners, _ = found_of(
        "min_size: 6 min_size: 9 flip: false aspect_ratio: 1 aspect_ratio: 4 aspect_ratio: 4"
    )
    np.testing.assert_allclose(corners, boxes([(6, 6), (12, 3), (9, 9), (18, 4.5)]), atol=1e-6)


def test_image_step_offset_clip_and_variances() -> None:
    words = "min_size: 40 img_h: 50 img_w: 80 step: 20 offset: 0.25 variance: 0.1 variance: 0.2 "
    corners, variances = found_of(words + "variance: 0.3 variance: 0.4")
    expected = boxes([(40, 40)], (50, 80), (20, 20), 0.25)
    np.testing.assert_allclose(corners, expected, atol=1e-6)
    np.testing.assert_allclose(variances[1, 2, 0], [0.1, 0.2, 0.3, 0.4], rtol=1e-6)
    corners, variances = found_of(
        "min_size: 40 img_size: 50 step_h: 20 step_w: 9 clip: true variance: 2"
    )
    expected = boxes([(40, 40)], (50, 50), (20, 9)).clip(0, 1)
    np.testing.assert_allclose(corners, expected, atol=1e-6)
    assert (variances == 2).all()


BOXES, CLASSES, BATCH = 40, 4, 3


def decoded(code: str, offsets: Any, prior: Any, variance: Any) -> list[float]:
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
                decoded(words["code"], offsets[image, b, label % coded], priors[b], variances[b])
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


def detections(share: bool, equal: bool = False) -> dict[str, np.ndarray]:
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


def detected(words: dict[str, Any], values: dict[str, np.ndarray]) -> torch.Tensor:
    bottoms = [torch.from_numpy(each) for each in values.values()]
    found: torch.Tensor = module_of(text_of(words), *(tuple(b.shape) for b in bottoms))(*bottoms)
    return found


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
    values = detections(words.get("share", True), equal)
    found = detected(words, values)
    expected = expected_rows(values, words)
    assert found.shape == (1, 1, len(expected), 7)
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-9, atol=1e-12)


def test_no_box_is_a_row_of_minus_one_for_each_image() -> None:
    found = detected({**PLAIN, "confidence": 2}, detections(True))
    assert found.tolist() == [[[[float(image), *[-1.0] * 6] for image in range(BATCH)]]]


def test_a_box_goes_if_it_overlaps_by_more_than_the_threshold() -> None:
    values = detections(True)
    values["locations"][:] = 0
    values["priors"][0, 0] = np.tile([0.25, 0.25, 0.5, 0.5], BOXES)
    for threshold, rows in ((1.0, BOXES), (0.99, 1)):
        found = detected({**PLAIN, "confidence": 0, "nms": threshold}, values)
        assert found.shape[2] == BATCH * (CLASSES - 1) * rows


def test_on_the_meta_device_there_are_as_many_as_there_can_be() -> None:
    shapes = [each.shape for each in detections(True).values()]
    assert on_meta(text_of({**PLAIN, "keep": 7}), *shapes) == [(1, 1, BATCH * 7, 7)]
    assert on_meta(text_of({**PLAIN, "top_k": 5}), *shapes) == [(1, 1, BATCH * 3 * 5, 7)]
    assert on_meta(text_of({**PLAIN, "background": -1}), *shapes) == [(1, 1, BATCH * 160, 7)]


def test_files_that_are_asked_for_are_not_taken_in_silence() -> None:
    shapes = [each.shape for each in detections(True).values()]
    text = text_of(PLAIN)[:-3] + " save_output_param { %s } } }"
    module_of(text % 'label_map_file: "labels"', *shapes)
    with pytest.raises(AssertionError):
        module_of(text % 'output_directory: "out" output_format: "VOC"', *shapes)


ROI = layer("ROIPooling", "roi_pooling_param { pooled_h: 3 pooled_w: 2 spatial_scale: 0.5 }")
PSROI = layer(
    "PSROIPooling", "psroi_pooling_param { output_dim: 2 group_size: 3 spatial_scale: 0.25 }"
)
REGIONS = np.array(
    [
        [0, 0, 0, 13, 15],
        [1, 3, 1, 4, 9],  # 3 · 0.5 is rounded up
        [0, 5, 5, 5, 5],  # one pixel
        [1, 9, 7, 4, 2],  # ends before it begins
        [0, -5, -3, 6, 40],  # across the border
        [1, 60, 60, 70, 70],  # outside
        [0, -9, -7, -5, -5],
    ],
    np.float32,
)


def away(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def clipped(start: float, end: float, size: int) -> range:
    return range(min(max(math.floor(start), 0), size), min(max(math.ceil(end), 0), size))


def largest_of_bins(planes: np.ndarray, regions: np.ndarray) -> np.ndarray:
    high, wide = 3, 2
    out = np.zeros((len(regions), planes.shape[1], high, wide), planes.dtype)
    for r, (image, *corners) in enumerate(regions):
        x1, y1, x2, y2 = (away(float(each) * 0.5) for each in corners)
        bin_h = np.float32(max(y2 - y1 + 1, 1)) / np.float32(high)
        bin_w = np.float32(max(x2 - x1 + 1, 1)) / np.float32(wide)
        for i in range(high):
            rows = clipped(
                math.floor(i * bin_h) + y1, math.ceil((i + 1) * bin_h) + y1, planes.shape[2]
            )
            for j in range(wide):
                columns = clipped(
                    math.floor(j * bin_w) + x1, math.ceil((j + 1) * bin_w) + x1, planes.shape[3]
                )
                if rows and columns:
                    part = planes[int(image)][
                        :, rows.start : rows.stop, columns.start : columns.stop
                    ]
                    out[r, :, i, j] = part.max((1, 2))
    return out


def averages_of_bins(planes: np.ndarray, regions: np.ndarray) -> np.ndarray:
    size = 3
    outputs = planes.shape[1] // size**2
    out = np.zeros((len(regions), outputs, size, size), planes.dtype)
    for r, (image, *corners) in enumerate(regions):
        x1, y1 = (away(float(each)) * 0.25 for each in corners[:2])
        x2, y2 = ((away(float(each)) + 1) * 0.25 for each in corners[2:])
        bin_w, bin_h = max(x2 - x1, 0.1) / size, max(y2 - y1, 0.1) / size
        for i in range(size):
            rows = clipped(i * bin_h + y1, (i + 1) * bin_h + y1, planes.shape[2])
            for j in range(size):
                columns = clipped(j * bin_w + x1, (j + 1) * bin_w + x1, planes.shape[3])
                for c in range(outputs):
                    plane = planes[int(image), (c * size + i) * size + j]
                    part = [plane[y, x] for y in rows for x in columns]
                    out[r, c, i, j] = sum(part) / len(part) if part else 0
    return out


def planes_of(channels: int) -> np.ndarray:
    return np.random.RandomState(1).standard_normal((2, channels, 8, 7)).astype(np.float32)


def test_roi_pooling_takes_the_largest_of_each_bin() -> None:
    planes = planes_of(4)
    module = module_of(ROI, planes.shape, REGIONS.shape)
    found = module(torch.from_numpy(planes), torch.from_numpy(REGIONS))
    np.testing.assert_array_equal(found.numpy(), largest_of_bins(planes, REGIONS))
    assert not found[5:].any()  # outside, every bin is empty


def test_regions_of_four_axes_and_more_than_are_held_at_once() -> None:
    planes = planes_of(2)
    regions = np.tile(REGIONS, (6, 1))[:41, :, None, None]
    module = module_of(ROI, planes.shape, regions.shape)
    found = module(torch.from_numpy(planes), torch.from_numpy(regions))
    np.testing.assert_array_equal(found.numpy(), largest_of_bins(planes, regions[..., 0, 0]))


def test_psroi_pooling_averages_each_bin_in_channels_of_its_own() -> None:
    planes, regions = planes_of(18), REGIONS * np.array([1, 2, 2, 2, 2], np.float32)
    module = module_of(PSROI, planes.shape, regions.shape)
    found = module(torch.from_numpy(planes), torch.from_numpy(regions))
    np.testing.assert_allclose(
        found.numpy(), averages_of_bins(planes, regions), rtol=1e-5, atol=1e-6
    )
    assert found.abs().sum((1, 2, 3)).bool().tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize(("words", "channels"), [(ROI, 2), (PSROI, 18)])
def test_the_gradients_are_those_of_the_numbers(words: str, channels: int) -> None:
    planes = torch.from_numpy(planes_of(channels)).double().requires_grad_()
    regions = torch.from_numpy(REGIONS).double()
    module = module_of(words, tuple(planes.shape), REGIONS.shape)
    assert torch.autograd.gradcheck(lambda p: module(p, regions), (planes,), fast_mode=True)


def test_of_equal_values_the_first_has_the_gradient() -> None:
    planes = torch.zeros(2, 1, 8, 7, requires_grad=True)
    module = module_of(ROI, tuple(planes.shape), (1, 5))
    module(planes, torch.tensor([[0.0, 0, 0, 12, 14]])).sum().backward()
    assert planes.grad is not None
    # Bins of 8 / 3 rows overlap: they begin in rows 0, 2 and 5, and in columns 0 and 3.
    assert planes.grad[0, 0].nonzero().tolist() == [
        [row, column] for row in (0, 2, 5) for column in (0, 3)
    ]


def test_no_region_and_the_meta_device() -> None:
    module = module_of(ROI, (2, 4, 8, 7), (0, 5))
    assert module(torch.zeros(2, 4, 8, 7), torch.zeros(0, 5)).shape == (0, 4, 3, 2)
    assert on_meta(ROI, (2, 4, 8, 7), (9, 5)) == [(9, 4, 3, 2)]
    assert on_meta(PSROI, (2, 18, 8, 7), (9, 5)) == [(9, 2, 3, 3)]
