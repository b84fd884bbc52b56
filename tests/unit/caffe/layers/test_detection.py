"""Boxes of detectors, one after the other: PriorBox, DetectionOutput, ROIPooling, PSROIPooling."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.unit.caffe.layers.made import layer, module_of, on_meta

PLANES, IMAGES = (2, 5, 3, 4), (2, 3, 30, 60)


def boxes(
    sizes: list[tuple[float, float]],
    image: tuple[float, float] = (30, 60),
    step: tuple[float, float] = (10, 15),
    offset: float = 0.5,
) -> np.ndarray:
    """The corners, (rows, columns, sizes, 4), of boxes of these widths and heights."""
    (y, x) = ((place + offset) * size for place, size in zip(np.mgrid[:3, :4], step, strict=True))
    corners = [[x - w / 2, y - h / 2, x + w / 2, y + h / 2] for w, h in sizes]
    return np.moveaxis(np.array(corners), (0, 1), (2, 3)) / [*image[::-1], *image[::-1]]


SMALL, MIDDLE = (6, 6), (math.sqrt(6 * 24), math.sqrt(6 * 24))  # a place also has the middle one
RATIOS = [(6 * math.sqrt(r), 6 / math.sqrt(r)) for r in (2, 1 / 2, 3, 1 / 3)]
OTHER = "min_size: 40 img_h: 50 img_w: 80 step: 20 offset: 0.25 variance: 0.1 variance: 0.2"
SQUARE = "min_size: 40 img_size: 50 step_h: 20 step_w: 9 clip: true variance: 2"

# words, corners, variances
PRIORS: list[tuple[str, np.ndarray, Any]] = [
    (
        "min_size: 6 max_size: 24 aspect_ratio: 2 aspect_ratio: 3",
        boxes([SMALL, MIDDLE, *RATIOS]),
        0.1,
    ),
    (
        "min_size: 6 min_size: 9 flip: false aspect_ratio: 1 aspect_ratio: 4 aspect_ratio: 4",
        boxes([SMALL, (12, 3), (9, 9), (18, 4.5)]),  # a ratio comes once
        0.1,
    ),
    (
        f"{OTHER} variance: 0.3 variance: 0.4",
        boxes([(40, 40)], (50, 80), (20, 20), 0.25),
        [0.1, 0.2, 0.3, 0.4],
    ),
    (SQUARE, boxes([(40, 40)], (50, 50), (20, 9)).clip(0, 1), 2),
]


@pytest.mark.parametrize(("words", "expected", "variances"), PRIORS)
def test_prior_boxes(words: str, expected: np.ndarray, variances: Any) -> None:
    text = layer("PriorBox", f"prior_box_param {{ {words} }}")
    priors = module_of(text, PLANES, IMAGES)(torch.zeros(PLANES), torch.zeros(IMAGES))
    assert on_meta(text, PLANES, IMAGES) == [tuple(priors.shape)]
    corners, spread = priors.view(2, 3, 4, -1, 4)
    np.testing.assert_allclose(corners, expected, atol=1e-6)
    np.testing.assert_allclose(spread, np.broadcast_to(variances, spread.shape), rtol=1e-6)


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
    nms = (
        f"nms_threshold: {words['nms']} eta: {words.get('eta', 1)} top_k: {words.get('top_k', -1)}"
    )
    param = (
        f"num_classes: {CLASSES} code_type: {words['code']} nms_param {{ {nms} }} "
        f"share_location: {str(words.get('share', True)).lower()} "
        f"background_label_id: {words.get('background', 0)} "
        f"variance_encoded_in_target: {str(words.get('encoded', False)).lower()} "
        f"confidence_threshold: {words['confidence']} keep_top_k: {words.get('keep', -1)}"
    )
    return layer("DetectionOutput", f"detection_output_param {{ {param} }}")


def detected(words: dict[str, Any], values: dict[str, np.ndarray]) -> Tensor:
    bottoms = [torch.from_numpy(each) for each in values.values()]
    rows: Tensor = module_of(text_of(words), *(tuple(b.shape) for b in bottoms))(*bottoms)
    return rows


PLAIN: dict[str, Any] = {"code": "CENTER_SIZE", "nms": 0.4, "confidence": 0.3}
WORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "corner": {"code": "CORNER"},
    "corner_size": {"code": "CORNER_SIZE"},
    "per_class": {"share": False},
    "encoded": {"encoded": True},
    "background": {"background": 2},
    "no_background": {"background": -1},
    "top_k": {"top_k": 9},
    "keep_top_k": {"keep": 7},
    "both": {"top_k": 12, "keep": 10, "nms": 0.6, "share": False},
    "eta": {"nms": 0.8, "eta": 0.7, "confidence": 0.01},
}


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("name", WORDS)
def test_boxes_are_decoded_and_the_best_stay(name: str, equal: bool) -> None:
    words = PLAIN | WORDS[name]
    values = detections(words.get("share", True), equal)
    rows, expected = detected(words, values), expected_rows(values, words)
    assert rows.shape == (1, 1, len(expected), 7)
    np.testing.assert_allclose(rows[0, 0], expected, rtol=1e-9, atol=1e-12)


def test_no_box_is_a_row_of_minus_one_for_each_image() -> None:
    rows = detected(PLAIN | {"confidence": 2}, detections(True))
    assert rows.tolist() == [[[[float(image), *[-1.0] * 6] for image in range(BATCH)]]]


def test_a_box_goes_if_it_overlaps_by_more_than_the_threshold() -> None:
    values = detections(True)
    values["locations"][:] = 0
    values["priors"][0, 0] = np.tile([0.25, 0.25, 0.5, 0.5], BOXES)
    for threshold, rows in ((1.0, BOXES), (0.99, 1)):
        left = detected(PLAIN | {"confidence": 0, "nms": threshold}, values)
        assert left.shape[2] == BATCH * (CLASSES - 1) * rows


def test_on_the_meta_device_there_are_as_many_as_there_can_be() -> None:
    shapes = [each.shape for each in detections(True).values()]
    for words, most in (({"keep": 7}, 7), ({"top_k": 5}, 3 * 5), ({"background": -1}, 160)):
        assert on_meta(text_of(PLAIN | words), *shapes) == [(1, 1, BATCH * most, 7)]


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


def clipped(start: float, end: float, size: int) -> slice:
    return slice(min(max(math.floor(start), 0), size), min(max(math.ceil(end), 0), size))


def largest_of_bins(planes: np.ndarray, regions: np.ndarray) -> np.ndarray:
    high, wide = 3, 2
    out = np.zeros((len(regions), planes.shape[1], high, wide), planes.dtype)
    for r, (image, *corners) in enumerate(regions):
        x1, y1, x2, y2 = (away(float(each) * 0.5) for each in corners)
        bin_h = np.float32(max(y2 - y1 + 1, 1)) / np.float32(high)
        bin_w = np.float32(max(x2 - x1 + 1, 1)) / np.float32(wide)
        for i, j in np.ndindex(high, wide):
            top, bottom = math.floor(i * bin_h) + y1, math.ceil((i + 1) * bin_h) + y1
            left, right = math.floor(j * bin_w) + x1, math.ceil((j + 1) * bin_w) + x1
            rows, columns = clipped(top, bottom, 8), clipped(left, right, 7)
            part = planes[int(image), :, rows, columns]
            out[r, :, i, j] = part.max((1, 2)) if part.size else 0
    return out


def averages_of_bins(planes: np.ndarray, regions: np.ndarray) -> np.ndarray:
    size = 3
    outputs = planes.shape[1] // size**2
    out = np.zeros((len(regions), outputs, size, size), planes.dtype)
    for r, (image, *corners) in enumerate(regions):
        x1, y1 = (away(float(each)) * 0.25 for each in corners[:2])
        x2, y2 = ((away(float(each)) + 1) * 0.25 for each in corners[2:])
        bin_w, bin_h = max(x2 - x1, 0.1) / size, max(y2 - y1, 0.1) / size
        for c, i, j in np.ndindex(outputs, size, size):
            rows = clipped(i * bin_h + y1, (i + 1) * bin_h + y1, 8)
            columns = clipped(j * bin_w + x1, (j + 1) * bin_w + x1, 7)
            part = planes[int(image), (c * size + i) * size + j, rows, columns]
            out[r, c, i, j] = part.mean() if part.size else 0
    return out


def planes_of(channels: int) -> np.ndarray:
    return np.random.RandomState(1).standard_normal((2, channels, 8, 7)).astype(np.float32)


def pooled(text: str, planes: np.ndarray, regions: np.ndarray) -> np.ndarray:
    pool = module_of(text, planes.shape, regions.shape)
    result: Tensor = pool(torch.from_numpy(planes), torch.from_numpy(regions))
    return result.numpy()


def test_roi_pooling_takes_the_largest_of_each_bin() -> None:
    """Also of regions of four axes, and of more than are held at once."""
    planes, many = planes_of(4), np.tile(REGIONS, (6, 1))[:41]
    bins = pooled(ROI, planes, many[..., None, None])
    np.testing.assert_array_equal(bins, largest_of_bins(planes, many))
    np.testing.assert_array_equal(pooled(ROI, planes, REGIONS), bins[: len(REGIONS)])
    assert not bins[5:7].any()  # outside, every bin is empty


def test_psroi_pooling_averages_each_bin_in_channels_of_its_own() -> None:
    planes, regions = planes_of(18), REGIONS * np.array([1, 2, 2, 2, 2], np.float32)
    bins = pooled(PSROI, planes, regions)
    np.testing.assert_allclose(bins, averages_of_bins(planes, regions), rtol=1e-5, atol=1e-6)
    assert np.abs(bins).sum((1, 2, 3)).astype(bool).tolist() == [True] * 5 + [False] * 2


@pytest.mark.parametrize(("words", "channels"), [(ROI, 2), (PSROI, 18)])
def test_the_gradients_are_those_of_the_numbers(words: str, channels: int) -> None:
    planes = torch.from_numpy(planes_of(channels)).double().requires_grad_()
    regions = torch.from_numpy(REGIONS).double()
    module = module_of(words, tuple(planes.shape), REGIONS.shape)
    assert torch.autograd.gradcheck(lambda p: module(p, regions), (planes,), fast_mode=True)


def test_of_equal_values_the_first_has_the_gradient() -> None:
    planes = torch.zeros(2, 1, 8, 7, requires_grad=True)
    pool = module_of(ROI, tuple(planes.shape), (1, 5))
    (slopes,) = torch.autograd.grad(pool(planes, torch.tensor([[0.0, 0, 0, 12, 14]])).sum(), planes)
    # Bins of 8 / 3 rows overlap: they begin in rows 0, 2 and 5, and in columns 0 and 3.
    assert slopes[0, 0].nonzero().tolist() == [
        [row, column] for row in (0, 2, 5) for column in (0, 3)
    ]


def test_no_region_and_the_meta_device() -> None:
    module = module_of(ROI, (2, 4, 8, 7), (0, 5))
    assert module(torch.zeros(2, 4, 8, 7), torch.zeros(0, 5)).shape == (0, 4, 3, 2)
    assert on_meta(ROI, (2, 4, 8, 7), (9, 5)) == [(9, 4, 3, 2)]
    assert on_meta(PSROI, (2, 18, 8, 7), (9, 5)) == [(9, 2, 3, 3)]
