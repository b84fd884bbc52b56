"""Photos that are to be turned: as Pillow turns them, where a recipe says so."""

import io
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps

from firecaffe.cli import main
from firecaffe.data import DataConfig, open_data
from firecaffe.data.decode import APPLY, IGNORE, decode, decoded, orientation, with_orientation
from firecaffe.errors import RecipeError
from firecaffe.training.prediction import read_image
from firecaffe.training.run_facts import About
from tests.unit.data.test_decode import encoded, picture


def turned(how: int, name: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = how
    return encoded(picture(24, 40), name, exif=exif)


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("how", range(1, 9))
def test_a_photo_is_turned_as_pillow_turns_it(how: int, name: str) -> None:
    content = turned(how, name)
    assert orientation(content) == how
    upright = encoded(ImageOps.exif_transpose(Image.open(io.BytesIO(content))), "PNG")
    assert torch.equal(decoded(content, APPLY), decode(upright))
    assert torch.equal(decoded(content, IGNORE), decode(content))


@pytest.mark.parametrize("how", [0, 9, 255])
def test_what_is_no_orientation_turns_nothing(how: int) -> None:
    content = turned(how)
    assert orientation(content) == 1
    assert orientation(content[:40]) == 1  # cut within its EXIF
    assert orientation(encoded(picture(8, 8), "JPEG")) == 1
    assert orientation(b"Exif\0\0 in what is no image") == 1


def test_an_orientation_is_written_into_a_jpeg() -> None:
    plain = encoded(picture(24, 40), "JPEG")
    for how in range(2, 9):
        assert orientation(with_orientation(plain, how)) == how
    assert torch.equal(decode(with_orientation(plain, 6)), decode(plain))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two of four training photos lie on their side, and no test photo."""
    for number in range(4):
        path = tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(turned(6 if number < 2 else 1))
    for name in "ab":
        path = tmp_path / "photos" / "test" / name / "0.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(turned(1))
    return tmp_path / "photos"


def test_they_are_counted_or_turned_and_predict_reads_them_so(photos: Path) -> None:
    as_stored = DataConfig("folder", str(photos), resize=24, hold_out=0.25)
    applied = DataConfig("folder", str(photos), resize=24, hold_out=0.25, exif=APPLY)
    (note,) = open_data(as_stored).notes
    assert all(part in note for part in ("train: 2 of 4 images", 'data.exif = "apply"'))
    assert open_data(applied).notes == ()
    about = About(2, 3, (), (3, 24, 24), True, (3, 24, 24), "float32", ())
    for config, is_alike in ((as_stored, True), (applied, False)):
        data = open_data(config)
        parts = [part for part in data.parts.values() if part is not data.test]
        seen = [each for part in parts for each in part.batch(torch.arange(len(part)))[0]]
        for photo in (photos / "train" / "a" / "0.jpg", photos / "train" / "a" / "2.jpg"):
            image = read_image(photo, about, config)
            assert any(torch.equal(image, each) for each in seen)
        found = {each.numpy().tobytes() for each in seen}
        assert (len(found) == 1) == is_alike  # all of one picture
    with pytest.raises(RecipeError, match=r"data\.exif is 'turn', expected one of ignore, apply"):
        open_data(DataConfig("folder", str(photos), exif="turn"))


def test_shards_keep_it(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("kept", []), ("small", ["--resize", "16"])):
        assert main(["pack", str(photos), str(tmp_path / name), *words]) == 0
        assert "EXIF" not in capsys.readouterr().out
        path = str(tmp_path / name)
        (note,) = open_data(DataConfig("packed", path, resize=16)).notes
        assert note.startswith("train: 2 of 4 images")
        images, _ = open_data(DataConfig("packed", path, resize=16, exif=APPLY)).train.batch(
            torch.arange(4)
        )
        assert len({each.numpy().tobytes() for each in images}) == 2
    assert main(["pack", str(photos), str(tmp_path / "raw"), "--raw", "--resize", "16"]) == 0
    assert "2 images say (EXIF)" in " ".join(capsys.readouterr().out.split())
