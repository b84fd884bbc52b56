"""What an import says of a net: understood, needed, left out. Nothing but the net is there."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from firecaffe.from_caffe.recipe import Asked, read
from firecaffe.from_caffe.report import Report

SHAPE = "shape { dim: 2 dim: 3 dim: 8 dim: 8 }"
INPUT = f'layer {{ name: "data" type: "Input" top: "data" input_param {{ {SHAPE} }} }}\n'
CONV = (
    'layer { name: "conv" type: "Convolution" bottom: "data" top: "conv" '
    "convolution_param { num_output: 4 kernel_size: 3 } %s }\n"
)


def report_of(text: str, folder: Path) -> Report:
    path = folder / "net.prototxt"
    path.write_text(text)
    return read(path, Asked(folder=str(folder / "out"))).report


def lines(notes: Sequence[tuple[str, str]]) -> str:
    return "\n".join(": ".join(each) for each in notes)


def data(words: str, kind: str = "Data", more: str = "") -> str:
    return (
        f'layer {{ name: "data" type: "{kind}" top: "data" {more} {words} '
        "transform_param { crop_size: 8 } }\n"
    )


def test_messages_for_layers_of_other_types_change_nothing(tmp_path: Path) -> None:
    words = "softmax_param { axis: 2 } loss_param { ignore_label: 255 } data_param { source: 'x' }"
    assert report_of(INPUT + CONV % words, tmp_path).left_out == []


@pytest.mark.parametrize(
    "words", ["quantization_param { bw: 8 }", "convolution_param { algorithm: 3 }"]
)
def test_messages_of_forks_are_left_out(words: str, tmp_path: Path) -> None:
    report = report_of(INPUT + CONV % words, tmp_path)
    assert "is not understood" in lines(report.left_out)


def test_a_leveldb_is_to_be_converted(tmp_path: Path) -> None:
    text = data('data_param { source: "x" batch_size: 2 backend: LEVELDB }') + CONV % ""
    report = report_of(text, tmp_path)
    assert report.left_out == []
    assert "convert it to an LMDB" in lines(report.needed)


def test_dummies_stand_for_what_comes(tmp_path: Path) -> None:
    words = f'dummy_data_param {{ {SHAPE} data_filler {{ type: "gaussian" }} }}'
    report = report_of(data(words, "DummyData") + CONV % "", tmp_path)
    assert report.left_out == []
    assert "holds no samples" in lines(report.needed)
    text = data("window_data_param { batch_size: 2 }", "WindowData") + CONV % ""
    assert "WindowData" in lines(report_of(text, tmp_path).left_out)


def test_inputs_keep_the_batches_that_the_net_says(tmp_path: Path) -> None:
    second = INPUT.replace('"data"', '"other"').replace("dim: 2", "dim: 1", 1)
    crop = 'layer { name: "crop" type: "Crop" bottom: "data" bottom: "other" top: "crop" %s }'
    report = report_of(INPUT + second + crop % "crop_param { axis: 0 offset: 0 }", tmp_path)
    assert report.left_out == []


def test_a_phase_without_data_is_not_looked_at(tmp_path: Path) -> None:
    words = 'data_param { source: "x" batch_size: 2 backend: LMDB }'
    report = report_of(data(words, more="include { phase: TEST }") + CONV % "", tmp_path)
    assert report.left_out == []
    assert "TRAIN has no data layer" in lines(report.needed)
