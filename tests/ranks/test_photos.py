"""Photos from shards and from a folder, on real ranks: the same bits on any number of them."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.kit.small_run import pack_photos
from firecaffe import ExchangeConfig, Recipe, SolverConfig, TrainConfig
from firecaffe.data import DataConfig
from firecaffe.models.config import ModelConfig
from firecaffe.runs.run_folder import read_run_file
from tests.kit.worlds import NAMED, Trained, changed, end

RECIPE = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("packed", resize=32, crop=28, mirror=True),
    train=TrainConfig(
        global_batch_size=24, micro_batch_size=4, steps=6, seed=3, eval_batch_size=16
    ),
    solver=SolverConfig(type="nesterov", base_lr=0.01),
    exchange=ExchangeConfig(algorithm="tree", timeout_s=300),
)


def recipe_on(folder: Path, **words: Any) -> Recipe:
    return changed(RECIPE, data={"path": str(folder), **words})


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 + 20: six steps are more than an epoch, whose last step is whole."""
    return pack_photos(tmp_path_factory.mktemp("photos"), 120, 20)


@pytest.mark.parametrize(
    ("words", "worlds"),
    [
        ({"augment": "inception", "order": "shards"}, (1, 2, 4)),
        ({"augment": "caffe"}, (1, 3)),
        ({"augment": "none"}, (1, 2)),
    ],
    ids=["inception", "caffe", "none"],
)
def test_the_same_bits_on_1_to_4_workers(
    trained: Trained, packed: Path, words: dict[str, str], worlds: tuple[int, ...]
) -> None:
    alone, *others = (trained(size, recipe_on(packed, **words), NAMED) for size in worlds)
    for size, each in zip(worlds[1:], others, strict=True):
        assert end(each) == end(alone)
        assert len(each.data_wait_by_rank) == size


def test_a_cache_and_threads_change_nothing(trained: Trained, packed: Path, tmp_path: Path) -> None:
    cache = {"cache": str(tmp_path / "cache"), "cache_bytes": 80_000, "decode_threads": 3}
    cached = trained(2, recipe_on(packed, augment="inception", **cache), NAMED)
    plain = trained(1, recipe_on(packed, augment="inception"), NAMED)
    assert cached.state_sha256 == plain.state_sha256
    assert list((tmp_path / "cache").glob("*.shard"))


def test_a_run_that_skips_says_what_it_left_out(trained: Trained, tmp_path: Path) -> None:
    pack_photos(tmp_path, 120, 20)
    photos = tmp_path / "photos"
    broken = [sorted(photos.glob("train/3/*.jpg"))[0], sorted(photos.glob("test/5/*.jpg"))[0]]
    for path in broken:
        path.write_bytes(path.read_bytes()[:300])
    recipe = recipe_on(photos, name="folder", on_error="skip")
    alone, two = (trained(size, recipe, NAMED) for size in (1, 2))
    assert two.state_sha256 == alone.state_sha256
    lines = read_run_file(two.folder, "result.json")["broken_images"]
    assert sorted(line.split(": not a whole image")[0] for line in lines) == sorted(
        map(str, broken)
    )
