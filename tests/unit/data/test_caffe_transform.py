"""Images as a real Caffe's data layers make them, and what is drawn in training."""

from pathlib import Path

import numpy as np
import pytest
import torch

from firecaffe.data import open_data
from firecaffe.data.augment import random_crop_mirror
from firecaffe.data.dataset import ask
from firecaffe.data.hold_out import hold_out
from tests.golden.caffe.data_cases import (
    CASES,
    COUNT,
    RECORDED,
    data,
    mean_image,
    pixels,
    raw,
    write_lmdb,
)
from tests.unit.data.caffe_net import net


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


def test_a_sample_is_the_same_in_any_batch(files: Path) -> None:
    train = open_data(net(files, data("color", "crop_size: 5 mirror: true"))).train
    together, _ = ask(train, torch.tensor([0, 1, 2]), 7, 1)
    for sample in range(COUNT):
        alone, _ = ask(train, torch.tensor([sample]), 7, 1)
        assert torch.equal(alone[0], together[sample])


def test_a_test_is_cut_from_the_middle_and_mirrored_as_the_net_says(files: Path) -> None:
    """Caffe mirrors in TEST too; here once and for all."""
    write_lmdb(files / "many", [raw(pixels((1, 4, 4), each), 0) for each in range(40)])
    nets = data("color", "", "TRAIN") + data("many", "mirror: true", "TEST")
    test = open_data(net(files, nets)).test
    images_BCHW, _ = test.batch(torch.arange(40))
    assert torch.equal(images_BCHW, test.batch(torch.arange(40))[0])
    given_BCHW = torch.stack([torch.from_numpy(pixels((1, 4, 4), each)) for each in range(40)])
    is_plain = [torch.equal(*pair) for pair in zip(images_BCHW, given_BCHW.float(), strict=True)]
    is_flipped = [
        torch.equal(*pair) for pair in zip(images_BCHW, given_BCHW.flip(3).float(), strict=True)
    ]
    assert all(one != other for one, other in zip(is_plain, is_flipped, strict=True))
    assert 10 < sum(is_flipped) < 30


def test_what_is_held_out_is_seen_as_in_a_test(files: Path) -> None:
    train = open_data(net(files, data("color", "crop_size: 5 mirror: true"))).train
    rest, held_out = hold_out(train, 1 / 3)
    assert (len(rest), len(held_out)) == (2, 1)
    (image_CHW,), (label,) = held_out.batch(torch.tensor([0]))
    sample = 2 - int(label)
    assert np.array_equal(image_CHW, pixels((3, 9, 12), sample)[:, 2:7, 3:8])


def test_many_images_are_read_when_they_are_asked_for(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "crop_size: 5 mirror: true mean_value: 3"
    held = open_data(net(files, data("color", words))).train
    monkeypatch.setattr("firecaffe.data.caffe_tops.HELD_BYTES", 0)
    read = open_data(net(files, data("color", words))).train
    samples_B = torch.tensor([1, 1, 0, 2])
    for one, other in zip(ask(held, samples_B, 1, 2), ask(read, samples_B, 1, 2), strict=True):
        assert torch.equal(one, other)
