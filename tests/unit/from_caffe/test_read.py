"""What an import says of a net: understood, needed, left out. Nothing but the net is there."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from firecaffe.caffe.message import CaffeError
from firecaffe.from_caffe.import_report import Report
from firecaffe.from_caffe.net_settings import micro_batch_of
from firecaffe.from_caffe.recipe import Asked, read

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
    text = data('data_param { source: "no/such" batch_size: 2 backend: LEVELDB }') + CONV % ""
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
    words = 'data_param { source: "no/such" batch_size: 2 backend: LMDB }'
    report = report_of(data(words, more="include { phase: TEST }") + CONV % "", tmp_path)
    assert report.left_out == []
    assert "TRAIN has no data layer" in lines(report.needed)


def said(text: str, folder: Path) -> str:
    """The error's line."""
    with pytest.raises(CaffeError) as found:
        report_of(text, folder)
    return str(found.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "says nothing"), ("# a net\n", "says nothing"), ('name: "x" a { b: 1 }', "says name, a")],
)
def test_what_is_neither_a_solver_nor_a_net(text: str, found: str, tmp_path: Path) -> None:
    line = said(text, tmp_path)
    assert found in line
    assert "layer { … }" in line
    assert "base_lr" in line


def test_a_solver_that_lacks_a_word_is_told_as_one(tmp_path: Path) -> None:
    assert "lr_policy" in said('net: "net.prototxt"', tmp_path)


@pytest.mark.parametrize("name", ["no/such/list.txt", "x" * 5_000])
def test_a_list_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    words = f'image_data_param {{ source: "{name}" batch_size: 2 }}'
    layer = f'layer {{ name: "data" type: "ImageData" top: "data" top: "label" {words} }}\n'
    line = said(layer + CONV % "", tmp_path)
    assert f'"{name}" is not there' in line
    assert "--root" in line
    assert "--input-shape" in line


@pytest.mark.parametrize("word", ["sourc", "root_folder"])
def test_a_list_that_is_not_said_is_asked_for(word: str, tmp_path: Path) -> None:
    words = f'image_data_param {{ {word}: "list.txt" batch_size: 2 }}'
    layer = f'layer {{ name: "data" type: "ImageData" top: "data" top: "label" {words} }}\n'
    line = said(layer + CONV % "", tmp_path)
    assert f"without a source, with {word}, batch_size" in line


def test_data_of_the_test_alone_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    words = 'data_param { source: "there" batch_size: 2 backend: LMDB }'
    report = report_of(data(words, more="include { phase: TEST }") + CONV % "", tmp_path)
    assert "no data layer in its TRAIN phase" in lines(report.needed)


@pytest.mark.parametrize("batch", [200_000_000_000, 2**63 - 1])
def test_a_batch_beyond_what_a_blob_holds(batch: int, tmp_path: Path) -> None:
    text = data(f'data_param {{ source: "no/such" batch_size: {batch} backend: LMDB }}')
    assert "2,147,483,647" in said(text + CONV % "", tmp_path)


def test_a_large_batch_is_cut_without_trying_each_number() -> None:
    assert micro_batch_of(2**31 - 1, "") == 1
    assert micro_batch_of(2**30, "") == 2**28
    for batch in range(1, 200):
        most = max(1, batch // 4)
        assert micro_batch_of(batch, "") == max(n for n in range(1, most + 1) if batch % n == 0)
