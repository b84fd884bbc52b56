"""Random boxes: torchvision's rule, drawn by formula; the same for any batch they are drawn in."""

from math import exp, log, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firecaffe.data.augment import ATTEMPTS, box, draws, middle


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 2**40))
def test_a_box_lies_in_its_image(rows: int, columns: int, sample: int) -> None:
    drawn = draws(0, 0, torch.tensor([sample])).tolist()[0]
    top, left, height, width = box(drawn, rows, columns)
    assert 0 <= top <= top + height <= rows
    assert 0 <= left <= left + width <= columns
    assert height >= 1
    assert width >= 1


def test_areas_and_proportions_are_spread_as_they_should_be() -> None:
    """Evenly from 8 to 100 % and, in the logarithm, from 3/4 to 4/3, where it fits a square: of
    an area a above 3/4 the share -ln(a) / ln(4/3) does.
    """
    fitting = 0.75 - 0.08 + (1 - (0.75 - 0.75 * log(0.75))) / log(4 / 3)
    all_drawn = draws(3, 1, torch.arange(4000)).tolist()
    found = [box(drawn, 1000, 1000) for drawn in all_drawn]
    areas = [height * width / 1e6 for _, _, height, width in found]
    ratios = [width / height for _, _, height, width in found]
    assert min(areas) > 0.079
    assert max(areas) <= 1
    assert sum(area < 0.54 for area in areas) / 4000 == pytest.approx(0.46 / fitting, abs=0.025)
    assert min(ratios) > 0.74
    assert max(ratios) < 1.35
    assert sum(map(log, ratios)) / 4000 == pytest.approx(0, abs=0.02)


def test_one_box_by_the_formula() -> None:
    drawn = [[0.5, 0.25, 0.5, 0.999]] * ATTEMPTS
    area = 0.08 + 0.5 * 0.92
    ratio = exp(log(3 / 4) + 0.25 * (log(4 / 3) - log(3 / 4)))
    width, height = round(sqrt(400 * 300 * area * ratio)), round(sqrt(400 * 300 * area / ratio))
    expected = (int(0.5 * (300 - height + 1)), int(0.999 * (400 - width + 1)), height, width)
    assert box(drawn, 300, 400) == expected


def test_where_no_draw_fits_the_middle_is_taken() -> None:
    drawn = [[1.0, 0.5, 0.0, 0.0]] * ATTEMPTS  # the whole area in a square
    assert box(drawn, 100, 1000) == (0, 433, 100, 133)
    assert box(drawn, 1000, 100) == (433, 0, 133, 100)


def test_draws_belong_to_the_sample_and_not_to_its_batch() -> None:
    together = draws(7, 2, torch.tensor([5, 9, 100]))
    assert torch.equal(together[1], draws(7, 2, torch.tensor([9]))[0])
    assert not torch.equal(together, draws(7, 3, torch.tensor([5, 9, 100])))
    assert 0 <= float(together.min()) <= float(together.max()) < 1


@pytest.mark.parametrize("size", [(100, 150), (150, 100), (17, 400)])
def test_a_test_sees_the_middle(size: tuple[int, int]) -> None:
    image = torch.arange(3 * size[0] * size[1]).remainder(251).to(torch.uint8).view(3, *size)
    assert middle(image, 32, 28).shape == (3, 28, 28)
