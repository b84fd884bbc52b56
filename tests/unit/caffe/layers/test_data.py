"""Shapes of what data layers give, as far as their words say them."""

import pytest

from firecaffe.caffe.layers.data_layers import SOURCES, shapes_of
from firecaffe.caffe.layers.spec import Shape
from firecaffe.caffe.text import parse

CROPPED = "transform_param { crop_size: 7 }"

# type, words, shapes of two tops
CASES: list[tuple[str, str, list[Shape | None]]] = [
    ("Data", f"data_param {{ batch_size: 4 }} {CROPPED}", [(4, 3, 7, 7), (4,)]),
    ("Data", "data_param { batch_size: 4 }", [None, (4,)]),
    ("Data", "transform_param { crop_size: 7 force_gray: true }", [(1, 1, 7, 7), (1,)]),
    ("ImageData", f"image_data_param {{ batch_size: 2 }} {CROPPED}", [(2, 3, 7, 7), (2,)]),
    (
        "ImageData",
        "image_data_param { new_height: 5 new_width: 6 is_color: false }",
        [(1, 1, 5, 6), (1,)],
    ),
    ("WindowData", "window_data_param { batch_size: 2 crop_size: 9 }", [(2, 3, 9, 9), (2,)]),
    (
        "AnnotatedData",
        "transform_param { resize_param { height: 3 width: 4 } } data_param { batch_size: 2 }",
        [(2, 3, 3, 4), (1, 1, 1, 8)],
    ),
    (
        "MemoryData",
        "memory_data_param { batch_size: 2 channels: 3 height: 4 width: 5 }",
        [(2, 3, 4, 5), (2,)],
    ),
    ("HDF5Data", "hdf5_data_param { batch_size: 2 }", [None, None]),
    ("Input", "input_param { shape { dim: 2 dim: 3 } }", [(2, 3), (2, 3)]),
    ("Input", "input_param { shape { dim: 2 } shape { } }", [(2,), ()]),
    ("Input", "", [None, None]),
    ("DummyData", "dummy_data_param { shape { dim: 2 } shape { dim: 4 } }", [(2,), (4,)]),
    (
        "DummyData",
        "dummy_data_param { num: 2 channels: 3 height: 4 width: 5 }",
        [(2, 3, 4, 5), (2, 3, 4, 5)],
    ),
    ("NobodyKnows", "", [None, None]),
]


@pytest.mark.parametrize(("type_", "words", "expected"), CASES)
def test_shapes(type_: str, words: str, expected: list[Shape | None]) -> None:
    assert shapes_of(parse(f'type: "{type_}" top: "a" top: "b" {words}')) == expected
    assert shapes_of(parse(f'type: "{type_}" top: "a" {words}')) == expected[:1]


def test_every_type_is_tried() -> None:
    assert {*SOURCES} < {each for each, _, _ in CASES}
