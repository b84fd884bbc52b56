"""Which data layers are read, and which are refused."""

import pytest

from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import parse
from firecaffe.data.caffe_layers import DataLayer, data_layers
from tests.golden.caffe.data_cases import data, images


def layers_of(text: str) -> list[DataLayer]:
    return data_layers(parse(text).messages("layer"))


def layer(kind: str, words: str = "", top: str = 'top: "data"') -> str:
    return f'layer {{ name: "d" type: "{kind}" {top} {words} }}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (layer("Data", "data_param { backend: LMDB }"), "without a source"),
        (layer("Data", 'data_param { source: "x" backend: LMDB batch_size: 0 }'), "batch_size"),
        (layer("Data", 'data_param { source: "x" backend: 1 }', ""), "has 0 tops; expected 1 to 2"),
        (data("x", "force_color: true force_gray: true"), "force_color and force_gray"),
        (data("x", 'mean_value: 1 mean_file: "x"'), "mean_file and mean_value"),
        (data("x", "crop_size: -1"), "crop_size is -1"),
        (images("new_height: 3"), "new_height is 3 with new_width 0"),
        (layer("HDF5Data", "transform_param { }"), "takes no transform_param"),
        (layer("MemoryData"), "MemoryData is filled by a program; expected Data, ImageData or"),
        (layer("Python"), "Python is a program of its own"),
        (layer("DummyData"), "DummyData holds no samples"),
        (layer("WindowData"), "WindowData cuts windows"),
    ],
)
def test_what_cannot_be_names_its_line(text: str, expected: str) -> None:
    with pytest.raises(CaffeError, match=expected) as raised:
        layers_of(f"\n\n{text}")
    assert str(raised.value).startswith("prototxt:3: ")


def test_other_layers_are_none_of_ours() -> None:
    text = layer("Python", 'bottom: "x"') + layer("ReLU", 'bottom: "x"') + layer("Parameter")
    assert layers_of(text) == []


def test_order_and_backend_of_a_data_layer() -> None:
    plain, other = layers_of(
        layer("Data", 'data_param { source: "x" }')
        + layer("Data", 'data_param { source: "x" backend: LMDB shuffle: true }')
    )
    assert (plain.backend, plain.is_in_order) == ("LEVELDB", True)
    assert (other.backend, other.is_in_order) == ("LMDB", False)


def test_all_words_of_a_data_layer_are_read() -> None:
    net = parse(
        layer(
            "Data",
            'data_param { source: "x" backend: LMDB batch_size: 9 prefetch: 3 shuffle: 1 cache: 1 }'
            "transform_param { scale: 2 mirror: true crop_size: 3 mean_value: 1 force_gray: 0 }",
        )
        + images("rand_skip: 3 shuffle: true is_color: false new_height: 4 new_width: 5")
    )
    first, second = data_layers(net.messages("layer"))
    assert {name.partition(".")[0] for name, _ in net.messages("layer")[0].unread()} <= {"name"}
    assert (first.batch_size, first.words) == (9, "crop 3, mirror, mean 1, scale 2")
    assert (second.words, second.is_in_order) == ("no transform, gray, resized to (4, 5)", False)
