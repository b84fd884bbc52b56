"""A first look at photos: of sixteen bits, and of nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from firecaffe.cli import main
from firecaffe.data import DataConfig, open_data
from firecaffe.data.look import LOOKED_AT, evenly
from firecaffe.errors import DataError


def write(folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    """Images by class, the same ones to train on and to test by."""
    for part in ("train", "test"):
        for name, pixels in arrays.items():
            for number in range(2):
                path = folder / part / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    return folder


def ramp(most: int) -> np.ndarray:
    return np.linspace(0, most, 64).astype(np.uint16).reshape(8, 8)


def test_sixteen_bits_are_scaled_to_eight_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "deep", {"a": ramp(65_535), "b": ramp(30_000)})
    data = open_data(DataConfig("folder", str(folder), resize=8))
    images, _ = data.train.batch(torch.tensor([0, 2]))
    assert (images.amin((1, 2, 3)).tolist(), images.amax((1, 2, 3)).tolist()) == (
        [0, 0],
        [255, 116],
    )
    assert [note.split(" images")[0] for note in data.notes] == ["train: 4 of 4", "test: 4 of 4"]
    assert all("16 bits" in note and "65,535" in note for note in data.notes)
    assert main(["pack", str(folder), str(tmp_path / "raw"), "--raw"]) == 0
    assert "8 images have 16 bits a value" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"dim": ramp(100), "bright": ramp(250)}, ["[0, 0, 0]", "16 bits", "scale them"]),
        ({"a": np.full((8, 8), 7, np.uint8), "b": np.full((9, 9), 7, np.uint8)}, ["[7, 7, 7]"]),
    ],
)
def test_images_in_which_nothing_is_to_be_seen_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], said: list[str]
) -> None:
    config = DataConfig("folder", str(write(tmp_path, arrays)), resize=8)
    with pytest.raises(DataError) as caught:
        open_data(config)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("train: all 4 images looked at have one color")
    assert all(each in line for each in said)


def test_one_that_is_not_blank_or_of_another_color_will_do(tmp_path: Path) -> None:
    plain, other = np.full((8, 8), 7, np.uint8), np.full((8, 8), 8, np.uint8)
    for name, arrays in (("a", {"a": plain, "b": ramp(200).astype(np.uint8)}), ("b", {"a": other})):
        folder = write(tmp_path / name, {"0": plain, **arrays})
        assert not open_data(DataConfig("folder", str(folder), resize=8)).notes


def test_those_looked_at_come_from_all_over() -> None:
    for count in (1, LOOKED_AT - 1, LOOKED_AT, LOOKED_AT + 1, 100 * LOOKED_AT + 7):
        samples = evenly(count)
        assert 1 <= len(samples) <= LOOKED_AT
        assert samples[0] == 0
        assert count - samples[-1] <= -(-count // LOOKED_AT)
