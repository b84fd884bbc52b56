"""Nets of Caffe's as data: what they open, bits beside a real Caffe's, each way to be wrong."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.text import parse
from firecaffe.data import DataConfig, Dataset, check_data, open_data, open_test
from firecaffe.data.augment import random_crop_mirror
from firecaffe.data.caffe_layers import data_layers
from firecaffe.data.dataset import ask, same_bits
from firecaffe.data.datasets import hold_out
from firecaffe.errors import FirecaffeError
from firecaffe.training.shared_facts import describe
from tools.caffe_goldens.data_cases import (
    CASES,
    COUNT,
    RECORDED,
    data,
    datum,
    images,
    mean_image,
    pixels,
    png,
    raw,
    write_all,
    write_lmdb,
)


def net(folder: Path, text: str) -> DataConfig:
    """The net of that text, in the current folder."""
    (folder / "net.prototxt").write_text(text)
    return DataConfig(name="caffe:net.prototxt")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has the cases' files."""
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
        (layer("Python"), "Python is a separate program"),
        (layer("DummyData"), "DummyData holds no samples"),
        (layer("WindowData"), "WindowData cuts windows"),
    ],
)
def test_what_cannot_be_names_its_line(text: str, expected: str) -> None:
    with pytest.raises(CaffeError, match=expected) as raised:
        data_layers(parse(f"\n\n{text}").messages("layer"))
    assert str(raised.value).startswith("prototxt:3: ")


def test_words_of_data_layers() -> None:
    text = layer("Data", 'data_param { source: "x" }')
    text += layer(
        "Data",
        'data_param { source: "x" backend: LMDB batch_size: 9 prefetch: 3 shuffle: 1 cache: 1 }'
        "transform_param { scale: 2 mirror: true crop_size: 3 mean_value: 1 force_gray: 0 }",
    )
    text += images("rand_skip: 3 shuffle: true is_color: false new_height: 4 new_width: 5")
    for other in ("Python", "ReLU"):  # which are none of ours
        text += layer(other, 'bottom: "x"')
    message = parse(text + layer("Parameter"))
    plain, data_layer, listed = data_layers(message.messages("layer"))
    assert (plain.backend, plain.is_in_order) == ("LEVELDB", True)
    unread = message.messages("layer")[1].unread()
    assert {name.partition(".")[0] for name, _ in unread} <= {"name"}
    assert (data_layer.backend, data_layer.is_in_order) == ("LMDB", False)
    assert (data_layer.batch_size, data_layer.words) == (9, "crop 3, mirror, mean 1, scale 2")
    assert (listed.words, listed.is_in_order) == ("no transform, gray, resized to (4, 5)", False)


@pytest.mark.parametrize("case", CASES)
def test_a_test_sees_the_bits_of_a_real_caffe(case: str, files: Path) -> None:
    images_BCHW, labels_B = open_data(net(files, CASES[case])).test.batch(torch.arange(COUNT))
    with np.load(RECORDED) as recorded:
        assert np.array_equal(images_BCHW.numpy(), recorded[f"{case}:data"])
        assert labels_B.tolist() == recorded[f"{case}:label"].tolist()
    assert labels_B.dtype == torch.int64


def test_training_draws_a_crop_and_a_mirror_by_seed_epoch_and_sample(files: Path) -> None:
    words = 'mean_file: "mean.binaryproto" crop_size: 5 mirror: true scale: 0.3'
    train = open_data(net(files, data("color", words))).train
    samples_B = torch.tensor([2, 0, 1])
    given = [pixels((3, 9, 12), int(each)).astype(np.float32) for each in samples_B]
    cases = set()
    for epoch in range(20):
        images_BChw, _ = ask(train, samples_B, 3, epoch)
        wanted_BCHW = torch.from_numpy((np.stack(given) - mean_image()) * np.float32(0.3))
        wanted_BChw = random_crop_mirror(
            wanted_BCHW, samples_B, seed=3, epoch=epoch, crop=5, mirror=True
        )
        # The mean is cut where the image is, and mirrored with it.
        assert torch.equal(images_BChw, wanted_BChw)
        cases.add(images_BChw[0].numpy().tobytes())
    assert len(cases) > 15


def test_a_test_is_mirrored_as_the_net_says(files: Path) -> None:
    """Caffe mirrors in TEST too; here once and for all."""
    write_lmdb(files / "many", [raw(pixels((1, 4, 4), number), 0) for number in range(40)])
    nets = data("color", "", "TRAIN") + data("many", "mirror: true", "TEST")
    test = open_data(net(files, nets)).test
    images_BCHW, _ = test.batch(torch.arange(40))
    assert torch.equal(images_BCHW, test.batch(torch.arange(40))[0])
    given_BCHW = torch.from_numpy(np.stack([pixels((1, 4, 4), each) for each in range(40)])).float()
    is_flipped = (images_BCHW == given_BCHW.flip(3)).flatten(1).all(1)
    assert torch.equal((images_BCHW == given_BCHW).flatten(1).all(1), ~is_flipped)
    assert 10 < is_flipped.sum() < 30


def test_what_is_held_out_is_seen_as_in_a_test(files: Path) -> None:
    """And so are the training samples where the net has no data for TEST."""
    opened = open_data(net(files, data("color", "crop_size: 5 mirror: true", "TRAIN")))
    assert opened.validation is None
    assert any("no data for TEST" in note for note in opened.notes)
    (image_CHW,), _ = opened.test.batch(torch.tensor([0]))
    assert np.array_equal(image_CHW, pixels((3, 9, 12), 0)[:, 2:7, 3:8])
    rest, held_out = hold_out(opened.train, 1 / 3)
    assert (len(rest), len(held_out)) == (2, 1)
    (image_CHW,), (label,) = held_out.batch(torch.tensor([0]))
    sample = 2 - int(label)
    assert np.array_equal(image_CHW, pixels((3, 9, 12), sample)[:, 2:7, 3:8])


def error_of(config: DataConfig) -> str:
    with pytest.raises(FirecaffeError) as raised:
        check_data(config)
    line = str(raised.value)
    assert "\n" not in line
    return line


def label_layer(source: str, top: str = "mask") -> str:
    return (
        f'layer {{ name: "{top}" type: "Data" top: "{top}" data_param {{ source: "{source}"'
        f" batch_size: 1 backend: LMDB }} }}\n"
    )


def test_train_and_test_are_the_phases_of_the_net(files: Path) -> None:
    write_lmdb(files / "more", [raw(pixels((3, 9, 12), each), each) for each in range(5)])
    found = open_data(net(files, data("color", "", "TRAIN") + data("more", "", "TEST")))
    assert [len(each) for each in found.parts.values()] == [COUNT, 5, 5]
    assert found.validation is found.test
    assert str(found.layout) == "float32 3x9x12 with targets int64"
    assert any("TEST" in note for note in found.notes)


def test_the_old_form_of_a_net(files: Path) -> None:
    text = (
        'layers { name: "d" type: DATA top: "data" top: "label"'
        ' data_param { source: "color" backend: LMDB batch_size: 1 scale: 0.5 crop_size: 4 } }'
    )
    (image_CHW,), _ = open_data(net(files, text)).test.batch(torch.tensor([1]))
    assert np.array_equal(image_CHW, pixels((3, 9, 12), 1)[:, 2:6, 4:8] * np.float32(0.5))


def test_two_layers_with_sources_of_their_own(files: Path) -> None:
    write_lmdb(files / "masks", [raw(pixels((1, 9, 12), each) % 4, 0) for each in range(COUNT)])
    found = open_data(net(files, label_layer("color", "data") + label_layer("masks")))
    images_BCHW, masks_B1HW = found.train.batch(torch.tensor([2, 0]))
    assert np.array_equal(images_BCHW[0], pixels((3, 9, 12), 2))
    assert np.array_equal(masks_B1HW[1], pixels((1, 9, 12), 0) % 4)

    write_lmdb(files / "few", [raw(pixels((1, 9, 12), 0), 0)])
    line = error_of(net(files, label_layer("color", "data") + label_layer("few")))
    assert "3 for data, 1 for mask" in line


def test_further_tops_are_targets_in_their_order(files: Path) -> None:
    found = open_data(net(files, data("color") + label_layer("gray")))
    _, (labels_B, masks_B1HW) = found.train.batch(torch.tensor([0, 2]))
    assert labels_B.tolist() == [2, 0]
    assert masks_B1HW.shape == (2, 1, 9, 12)


def test_images_of_several_sizes_go_one_at_a_time(files: Path) -> None:
    train = open_data(net(files, images())).train
    assert [tuple(train.batch(torch.tensor([each]))[0].shape) for each in range(COUNT)] == [
        (1, 3, 11 + each, 16) for each in range(COUNT)
    ]
    with pytest.raises(FirecaffeError, match="one sample at a time"):
        train.batch(torch.arange(COUNT))


def test_a_change_of_the_transform_makes_other_data(files: Path) -> None:
    words = ("", "mirror: true", "crop_size: 4", "crop_size: 4 mirror: true", "scale: 0.5")
    found = {describe(open_data(net(files, data("color", each))).train) for each in words}
    assert len(found) == len(words)


def test_files_are_looked_for_from_the_net_and_from_data_path(
    files: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = files / "models" / "small"
    folder.mkdir(parents=True)
    text = data("color", 'mean_file: "mean.binaryproto"') + images("new_height: 9 new_width: 12")
    config = replace(net(folder, text), name=f"caffe:{folder}/net.prototxt")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert len(open_data(config).train) == COUNT  # in a folder above the net's

    moved = tmp_path_factory.mktemp("moved")
    for each in (*files.glob("*.*"), files / "color"):
        each.rename(moved / each.name)
    line = error_of(config)
    assert str(folder / "color") in line
    assert "set data.path" in line
    assert len(open_data(replace(config, path=str(moved))).train) == COUNT
    text = text.replace('"color"', '"/no/such/place/color"')
    (folder / "net.prototxt").write_text(text)
    assert len(open_data(replace(config, path=str(moved))).train) == COUNT


def test_the_test_part_alone_needs_no_training_samples(files: Path) -> None:
    config = net(files, data("nowhere", "", "TRAIN") + data("color", "", "TEST"))
    assert '"nowhere" is not there' in error_of(config)
    assert len(open_test(config).test) == COUNT


def test_broken_records_are_named(files: Path) -> None:
    image = raw(pixels((1, 2, 2), 0), 1)
    broken = {
        "cut": (datum(channels=1, height=2, width=2, data=b"123"), "3 bytes of pixels for 1 x 2 x"),
        "none": (b"\xff\xff", "is no Datum"),
        "half": (datum(data=png(4, 4, 1)[:60], encoded=True), "not a whole image"),
        "alpha": (datum(data=png(4, 4, 1, "RGBA"), encoded=True), "alpha channel"),
    }
    for name, (value, found) in broken.items():
        write_lmdb(files / name, [image, value])
        with pytest.raises(FirecaffeError, match=found) as raised:
            open_data(net(files, data(name))).test.batch(torch.tensor([1]))
        assert f"{files / name}, key 00000001_name: " in str(raised.value)
    (files / "image 1.png").unlink()
    train = open_data(net(files, images("new_height: 3 new_width: 3"))).train
    with pytest.raises(FirecaffeError, match=r"image 1\.png: cannot be read, No such"):
        train.batch(torch.tensor([1]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (data("list.txt"), "list.txt: is no LMDB"),
        (data("color").replace("LMDB", "LEVELDB"), "backend is LEVELDB, which is not read"),
        (data("color", "crop_size: 10"), "is 9 x 12, and crop_size is 10"),
        (data("color", 'crop_size: 4 mean_file: "none"'), 'mean_file "none" is not there'),
        (data("gray", 'mean_file: "mean.binaryproto"'), "is 1 x 9 x 12, and the mean"),
        (data("color", "mean_value: 1 mean_value: 2"), "3 channels, and there are 2 mean_value"),
        (data("color", "resize_param { }"), "transform_param.resize_param is not understood"),
        ('layer { name: "d" type: "ReLU" bottom: "x" }', "has no data layer in its TRAIN phase"),
        (images().replace("list.txt", "labels.txt"), "labels.txt: has 2 labels for the first"),
        (images().replace("list.txt", "none.txt"), "none.txt:1: 'image'; expected a path, a"),
        (images().replace("list.txt", "huge.txt"), "which is a whole number, of 64 bits"),
        (images().replace("list.txt", "empty.txt"), "empty.txt: names no files"),
        (images('root_folder: "x/"'), 'image "x/image 0.png" is not there: looked for'),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, expected: str, files: Path) -> None:
    (files / "labels.txt").write_text("image.png 1 2\n")
    (files / "none.txt").write_text("image\n")
    (files / "huge.txt").write_text(f"image.png {2**63}\n")
    (files / "empty.txt").write_text("\n\n")
    assert expected in error_of(net(files, text))


def test_neither_threads_nor_memory_change_a_batch(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = [datum(data=png(5, 6, each), label=each, encoded=True) for each in range(20)]
    write_lmdb(files / "many", encoded)
    samples_B = torch.arange(20).flip(0)
    for words in ("crop_size: 4 mirror: true", "crop_size: 5 mirror: true mean_value: 3"):
        config = net(files, data("many", words))
        batches = [
            ask(open_data(replace(config, decode_threads=threads)).train, samples_B, 5, 2)
            for threads in (1, 4)
        ]
        with monkeypatch.context() as patch:
            patch.setattr("firecaffe.data.caffe_tops.HELD_BYTES", 0)
            batches.append(ask(open_data(config).train, samples_B, 5, 2))
        assert all(same_bits(batches[0], batch) for batch in batches[1:])
        assert batches[0][1].tolist() == samples_B.tolist()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_database_that_is_open_is_opened_again_and_read_by_a_child(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB itself lets a process open one once, and a child inherits what its parent has open."""
    monkeypatch.setattr("firecaffe.data.caffe_tops.HELD_BYTES", 0)
    config = net(files, data("gray"))

    def sum_of(train: Dataset) -> float:
        return float(train.batch(torch.arange(COUNT))[0].sum())

    first, again = open_data(config).train, open_data(config).train
    assert sum_of(first) == sum_of(again)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, repr((sum_of(open_data(config).train), sum_of(first))).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100).decode() == repr((sum_of(first), sum_of(first)))
    os.close(reading)
    os.close(writing)
