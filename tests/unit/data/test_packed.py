"""Packed data sets: the same images as the source's, by number; near, remote, cached, damaged."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simplejpeg
import torch
from PIL import Image

from firecaffe.data import DataConfig, TensorDataset, open_data, sources
from firecaffe.data.decode import DecodedSet
from firecaffe.data.pack_images import Packing, PackOptions, verify
from firecaffe.data.pack_sources import open_source
from firecaffe.data.packed import RawPart, read_list
from firecaffe.data.shard import ShardInfo
from firecaffe.data.shard_files import LocalFiles
from firecaffe.errors import DataError, RecipeError
from firecaffe.models import ModelConfig
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe, TrainConfig
from tests.kit.data_photos import CLASSES, flip, make_folder, pack, part_of, photo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "photos")


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    pack(folder, tmp_path / "packed")
    return tmp_path / "packed"


def change_list(packed: Path, change: Callable[[Any], object]) -> None:
    words = json.loads((packed / "dataset.json").read_text())
    change(words)
    (packed / "dataset.json").write_text(json.dumps(words))


def test_every_image_is_there_once_with_its_label(folder: Path, packed: Path) -> None:
    part = part_of(packed)
    assert len(part.shard_counts) > 2
    found = {part.read(number): part.label(number) for number in range(len(part))}
    names = {path.read_bytes(): path.parent.name for path in folder.glob("train/*/*.jpg")}
    assert {content: CLASSES[label] for content, label in found.items()} == names
    # In an order of its own, so that a shard holds all classes.
    first = part.labels(torch.arange(part.shard_counts[0]))
    assert len(set(first.tolist())) == 2


def test_the_same_bytes_from_any_number_of_threads(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "a", workers=1)
    pack(folder, tmp_path / "b", workers=4)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_packing_that_was_ended_goes_on(
    folder: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list and one shard are missing, as if it had been killed; whole shards are kept."""
    half = tmp_path / "half"
    shutil.copytree(packed, half)
    (half / "dataset.json").unlink()
    (half / "train-00001.shard").unlink()
    (half / "train-00001.shard.partial").write_bytes(b"half of it")
    job = Packing(open_source(folder), half, PackOptions(shard_bytes=4000), 1)
    (half / "packing.json").write_text(json.dumps({"identity": job._identity()}))
    kept = (half / "train-00000.shard").stat().st_ino
    job.run()
    assert (half / "train-00000.shard").stat().st_ino == kept
    for path in packed.iterdir():
        assert (half / path.name).read_bytes() == path.read_bytes()
    assert len(list(half.iterdir())) == len(list(packed.iterdir()))


def test_a_folder_that_holds_something_else_is_refused(
    folder: Path, packed: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="holds a packed data set already"):
        pack(folder, packed)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RecipeError, match="is not empty"):
        pack(folder, tmp_path / "full")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "packing.json").write_text('{"identity": "another"}')
    with pytest.raises(RecipeError, match="shards of another packing"):
        pack(folder, tmp_path / "other")


def test_broken_images_are_left_out_and_listed(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "train" / "cat" / "002.jpg").read_bytes()
    (folder / "train" / "cat" / "002.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "dog" / "003.jpg").write_bytes(b"")
    found = pack(folder, tmp_path / "packed")
    assert found.count("train") == 28
    said = [line.split(": not a whole image")[0] for line in found.skipped]
    assert said == ["train/cat/002.jpg", "train/dog/003.jpg"]


def test_nothing_but_broken_images(tmp_path: Path) -> None:
    for part in ("train", "test"):
        (tmp_path / "photos" / part / "a").mkdir(parents=True)
        (tmp_path / "photos" / part / "a" / "1.jpg").write_text("no")
    with pytest.raises(DataError, match="no image of train could be packed; the first: "):
        pack(tmp_path / "photos", tmp_path / "packed")


def test_pixels_are_held_in_memory_or_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(folder, tmp_path / "jpegs", resize=12)
    rows, columns, *_ = simplejpeg.decode_jpeg_header(part_of(tmp_path / "jpegs").read(0))
    assert (rows, columns) == (12, 16)  # the proportions stay
    pack(folder, tmp_path / "packed", resize=12, raw=True)
    config = DataConfig("packed", str(tmp_path / "packed"))
    held = open_data(config).train
    monkeypatch.setattr(sources, "HELD_BYTES", 0)
    read = open_data(config).train
    assert isinstance(held, TensorDataset)
    assert isinstance(read, RawPart)
    numbers = torch.tensor([29, 0, 17, 17])
    for own, other in zip(held.batch(numbers), read.batch(numbers), strict=True):
        assert torch.equal(own, other)
    assert read.batch(torch.tensor([], dtype=torch.int64))[0].shape == (0, 3, 12, 12)
    decoded = open_data(DataConfig("folder", str(folder), resize=12)).train
    pixels = {image.numpy().tobytes() for image in decoded.batch(torch.arange(30))[0]}
    assert {image.numpy().tobytes() for image in held.batch(torch.arange(30))[0]} == pixels


def test_images_of_two_sizes_are_no_pixels_of_one_shape(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "cat" / "004.jpg").write_bytes(photo(0, 30, 30))
    (folder / "train" / "cat" / "000.jpg").write_text("no image")  # others have a shape
    found = pack(folder, tmp_path / "packed", raw=True)
    assert [line.split(": ")[1] for line in found.skipped] == [
        "not a whole image",
        "30 x 30 pixels, and others 24 x 32; give --resize",
    ]


def test_opening_reads_no_shard(packed: Path) -> None:
    class Counted(LocalFiles):
        reads = 0

        def read(self, info: ShardInfo, start: int, length: int) -> bytes:
            self.reads += 1
            return super().read(info, start, length)

    files = Counted(packed)
    part = part_of(packed, files)
    assert (len(part), files.reads) == (30, 0)
    part.read(0)
    assert files.reads == 4  # prologue, header, index, sample
    part.read(1)
    assert files.reads == 5


def test_a_shard_that_is_cut_is_found_before_anything_is_read(packed: Path) -> None:
    path = packed / "train-00001.shard"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match=r"train-00001.shard: \d+ bytes long, truncated; it "):
        part_of(packed)
    path.unlink()
    with pytest.raises(DataError, match=r"train-00001\.shard: cannot be read, No such file"):
        part_of(packed)


def test_a_changed_byte_is_found_by_the_sample_that_has_it(packed: Path) -> None:
    done: list[int] = []
    verify(str(packed), done.append)
    assert sum(done) == 36
    flip(packed / "train-00000.shard", 60)
    part = part_of(packed)
    with pytest.raises(DataError, match=r"train-00000.shard, sample 0: its bytes are not those"):
        part.read(0)
    part.read(1)
    with pytest.raises(DataError, match=r"sample 0: its bytes are not those that were packed"):
        verify(str(packed))


def test_a_shard_that_changes_while_it_is_read(packed: Path) -> None:
    part, unread = part_of(packed), part_of(packed)
    part.read(0)
    shard = packed / "train-00000.shard"
    os.truncate(shard, 50)
    with pytest.raises(DataError, match=r"sample 0: 10 of \d+ bytes could be read; it is trunc"):
        part.read(0)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(DataError, match="cannot be read, is no regular file"):
        unread.read(0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda words, shard: words.pop("kind"),
        lambda words, shard: words.update(kind="video"),
        lambda words, shard: words.update(shape=[3]),
        lambda words, shard: words.update(version=9),
        lambda words, shard: words.update(parts=[1]),
        lambda words, shard: words.update(kind="raw", shape=[3, 1 << 20, 1 << 20]),
        lambda words, shard: shard.update(file="../../etc/passwd"),
        lambda words, shard: shard.update(file=".."),
        lambda words, shard: shard.update(file="a\0b"),
        lambda words, shard: shard.pop("sha256"),
        lambda words, shard: shard.update(sha256="../../.bashrc".ljust(64, "0")),
        lambda words, shard: shard.update(count=10**15),
        lambda words, shard: shard.update(count=10**400),
    ],
)
def test_a_damaged_list_is_told(packed: Path, spoil: Callable[[Any, Any], object]) -> None:
    change_list(packed, lambda words: spoil(words, words["parts"]["train"][0]))
    with pytest.raises(DataError, match=r"dataset\.json: "):
        read_list(str(packed))


def test_a_list_and_shards_that_do_not_belong_together(packed: Path) -> None:
    change_list(packed, lambda words: words["parts"].update(test=[]))
    with pytest.raises(DataError, match="test: the packed data set has no image in it"):
        open_data(DataConfig("packed", str(packed)))
    change_list(packed, lambda words: words["classes"].pop())
    part = part_of(packed)
    with pytest.raises(DataError, match="has label 1, expected 0 to 0"):
        part.labels(torch.arange(len(part)))


def test_verify_knows_a_shard_of_another_packing(packed: Path, tmp_path: Path) -> None:
    other = make_folder(tmp_path / "others", 2, 2)
    pack(other, tmp_path / "other")
    shutil.copy(tmp_path / "other" / "test-00000.shard", packed / "test-00000.shard")
    with pytest.raises(DataError, match=r"test-00000\.shard: holds 2 samples; the list says"):
        verify(str(packed))
    change_list(packed, lambda words: words["parts"]["test"][0].update(count=2))
    with pytest.raises(DataError, match=r"it is not the shard of the list \(SHA-256\)"):
        verify(str(packed))


def test_two_packs_do_not_write_into_one_folder(folder: Path, tmp_path: Path) -> None:
    first = Packing(open_source(folder), tmp_path / "packed", PackOptions(), 1)
    first._begin()
    with (tmp_path / "packed" / "packing.json").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RecipeError, match="another pack writes there"):
            Packing(open_source(folder), tmp_path / "packed", PackOptions(), 1).run()


def test_an_empty_first_image_and_a_long_one(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("test/*/*.jpg"):
        path.write_bytes(b"")
    Image.new("RGB", (70_000, 1)).save(folder / "train" / "cat" / "000.png")
    (folder / "test" / "dog" / "001.jpg").write_bytes(photo(7))
    options = PackOptions(quality=80)
    found = Packing(open_source(folder), tmp_path / "packed", options, 1).run()
    assert found.count("test") == 1
    assert any("cannot be a JPEG: " in line for line in found.skipped)


def test_the_next_whole_image_stands_in_for_broken_ones(folder: Path) -> None:
    files = sorted(folder.glob("train/*/*.jpg"))
    for place in (3, 4, len(files) - 1):
        files[place].write_text("broken")
    config = DataConfig("folder", str(folder), resize=8, on_error="skip")
    train = open_data(config).train
    assert isinstance(train, DecodedSet)
    images, labels = train.batch(torch.tensor([3, 4, 5, len(files) - 1, 0]))
    assert torch.equal(images[[0, 1]], images[[2, 2]])
    assert torch.equal(images[3], images[4])  # after the last comes the first
    assert labels.tolist() == [0, 0, 0, 0, 0]
    assert sorted(train.skipped) == [3, 4, len(files) - 1]
    assert all("not a whole image" in reason for reason in train.skipped.values())
    with pytest.raises(DataError, match="not a whole image"):
        open_data(DataConfig("folder", str(folder), resize=8)).train.batch(torch.tensor([3]))
    for path in files:
        path.write_text("broken")
    with pytest.raises(DataError, match=r"not a whole image: .*; and so are the 99 after it"):
        open_data(config).train.batch(torch.tensor([0]))


def test_what_cannot_be_read_is_never_skipped(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else pixels would depend on the network's luck."""
    train = open_data(DataConfig("packed", str(packed), resize=8, on_error="skip")).train
    assert isinstance(train, DecodedSet)

    def fails(*_: object) -> bytes:
        raise DataError("s3: timeout")

    monkeypatch.setattr(LocalFiles, "read", fails)
    with pytest.raises(DataError, match="s3: timeout"):
        train.batch(torch.tensor([0]))
    assert train.skipped == {}


def test_a_changed_sample_can_be_skipped_and_does_not_stop_a_forecast(packed: Path) -> None:
    flip(packed / "train-00000.shard", 60)
    recipe = Recipe(
        data=DataConfig("packed", str(packed), resize=32, on_error="skip"),
        model=ModelConfig("googlenet_small_bn"),
        train=TrainConfig(16, 8),
    )
    assert workload_of(check_recipe(recipe)).stored_bytes > 100
    train = open_data(recipe.data).train
    images, _ = train.batch(torch.tensor([0, 1]))
    assert torch.equal(images[0], images[1])
