"""`firecaffe pack` and `firecaffe bench data`, typed as a user types them."""

import json
from pathlib import Path

import pytest

from firecaffe.data import DataConfig, open_data
from firecaffe.files import private_folder
from firecaffe.planner.cluster import load_cluster
from tests.kit.data_photos import make_folder, photo
from tests.typed import in_process


def typed(*words: object) -> tuple[int, str, str]:
    done = in_process(*words)
    return done.returncode, done.stdout, done.stderr


def test_pack_info_and_verify(tmp_path: Path) -> None:
    folder, dest = make_folder(tmp_path / "photos"), tmp_path / "packed"
    (folder / "train" / "cat" / "000.jpg").write_text("no image")
    code, out, err = typed("pack", folder, dest, "--shard-size", "4kB", "--threads", "2")
    assert code == 0, err
    assert "train: 29 images in " in out
    assert "test: 6 images in " in out
    assert "broken and left out: 1\n  train/cat/000.jpg: not a whole image" in out
    assert "sizes: from 24 to 24 rows, from 32 to 32 columns" in out
    code, out, err = typed("pack", "--info", dest)
    assert (code, err) == (0, "")
    assert "train: cat 14, dog 15" in out
    assert typed("pack", "--verify", dest)[0] == 0
    shard = dest / "train-00000.shard"
    content = bytearray(shard.read_bytes())
    content[50] ^= 1
    shard.write_bytes(content)
    code, out, err = typed("pack", "--verify", dest)
    assert code == 3
    assert err.startswith(f"firecaffe: {shard}, sample 0: its bytes are not those that were packed")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["pack"], 2, "pack takes SOURCE and DEST; found nothing"),
        (["pack", "nowhere", "x"], 3, "nowhere: there is no such file or folder"),
        (
            ["pack", "a", "b", "--shard-size", "big"],
            2,
            "--shard-size is 'big'; it must be as 256MB",
        ),
        (["pack", "a", "b", "--quality", "200"], 2, "--quality is 200; it must be 1 to 100"),
        (["pack", "a", "--verify", "b"], 2, "pack takes SOURCE and DEST; or --verify DEST"),
        (["pack", "--info", "nowhere"], 3, "nowhere/dataset.json: cannot be read, No such file"),
        (["bench", "data", "nowhere"], 3, "nowhere: there is no such file or folder"),
        (["bench", "data", "x", "--crop", "999"], 2, "at most --resize"),
        (["bench", "data", "x", "--write", "a.txt"], 2, "--write is a.txt; it must end in .toml"),
    ],
)
def test_mistakes_get_one_line(words: list[str], code: int, said: str) -> None:
    found, _, err = typed(*words)
    assert found == code
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_folder_of_classes_has_a_test_part_held_out(tmp_path: Path) -> None:
    """It was refused: "nothing in it can be packed"."""
    folder, dest = tmp_path / "classes", tmp_path / "packed"
    for label, count in {"cat": 30, "dog": 12, "emu": 2}.items():
        for number in range(count):
            path = folder / label / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photo(100 * len(label) + number))
    code, out, err = typed("pack", folder, dest)
    assert code == 0, err
    first = out.splitlines()[0]
    assert "no test part: 5 of its 44 images" in first
    assert "--hold-out" in first
    code, out, err = typed("pack", "--info", dest)
    assert "train: cat 27, dog 11, emu 1" in out
    assert "test: cat 3, dog 1, emu 1" in out
    opened = open_data(DataConfig("packed", str(dest)))
    assert (len(opened.train), len(opened.test)) == (39, 5)
    assert typed("pack", folder, tmp_path / "again")[0] == 0
    for name in ("train-00000.shard", "test-00000.shard"):
        assert (dest / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    code, out, err = typed("pack", folder, tmp_path / "none", "--hold-out", "0")
    assert "no test part, which a training needs" in out
    assert "train: 44 images" in out
    code, out, err = typed("pack", folder, tmp_path / "half", "--hold-out", "0.5")
    assert "test: 22 images" in out


def test_what_cannot_be_held_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos")
    code, _, err = typed("pack", folder, tmp_path / "x", "--hold-out", "0.1")
    assert (code, "has a part test already" in err) == (2, True)
    code, _, err = typed("pack", folder, tmp_path / "x", "--hold-out", "1")
    assert (code, "--hold-out is 1" in err) == (2, True)
    code, _, err = typed("pack", folder, tmp_path / "x", "--channel-order", "rgb")
    assert (code, "--channel-order is of Caffe's LMDBs" in err) == (2, True)
    single = tmp_path / "single" / "cat" / "0.jpg"
    single.parent.mkdir(parents=True)
    single.write_bytes(photo(0))
    code, _, err = typed("pack", tmp_path / "single", tmp_path / "x")
    assert (code, "no class has two images" in err) == (3, True)
    assert not (tmp_path / "x").exists()


def test_bench_data_of_each_format(tmp_path: Path) -> None:
    folder, dest = make_folder(tmp_path / "photos", 40), tmp_path / "packed"
    assert typed("pack", folder, dest)[0] == 0
    words = ["--images", "30", "--resize", "32", "--crop", "28", "--model-rate", "100", "--json"]
    stages = ["storage, cold", "storage, warm", "decode", "crop and resize", "batch"]
    stages += ["copy to device, normalize", "together, warm", "together, cold"]
    for path in (folder, dest):
        written = tmp_path / f"{path.name}.toml"
        code, out, err = typed("bench", "data", path, *words, "--write", written)
        assert code == 0, err
        found = json.loads(out)
        assert [stage["name"] for stage in found["stages"]] == stages
        assert all(stage["images_per_s"] > 0 for stage in found["stages"])
        assert set(found["formats"]) == {"a folder of files", "packed"}
        assert found["said"][0].startswith("what limits: ")
        storage = load_cluster(str(written)).storage
        assert storage is not None
        assert storage.decoded_images_per_s == found["stages"][6]["images_per_s"]
    raw = tmp_path / "raw"
    assert typed("pack", folder, raw, "--raw", "--resize", "32")[0] == 0
    with private_folder("firecaffe-bench-", tmp_path) as left:
        pass
    left.mkdir()  # as by a process that was killed
    code, out, err = typed("bench", "data", raw, "--images", "30")
    assert code == 0, err
    assert not left.exists()
    assert "decode" not in out
