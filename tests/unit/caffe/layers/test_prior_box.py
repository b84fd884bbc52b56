"""PriorBox against the paper's boxes, one after the other."""

import math

import numpy as np
import torch

from tests.unit.caffe.layers.made import layer, module_of, on_meta, refusal

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


def test_what_cannot_be_is_one_line() -> None:
    for words, part in (
        ("", "needs min_size"),
        ("min_size: 5 max_size: 4", "max_size is 4"),
        ("min_size: 5 min_size: 6 max_size: 9", "expected as many"),
        ("min_size: 5 variance: 1 variance: 2", "expected 1 or 4"),
        ("min_size: 5 aspect_ratio: 0", "aspect_ratio is 0"),
        ("min_size: 5 step: 4 step_h: 3", "beside"),
        ("min_size: 5 img_h: 4", "img_size, or img_h and img_w"),
    ):
        line = refusal(layer("PriorBox", f"prior_box_param {{ {words} }}"), PLANES, IMAGES)
        assert part in line, words
