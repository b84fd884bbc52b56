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
        global_batch_size=24, micro_batch_size=4, steps=3, seed=3, eval_batch_size=16
    ),
    solver=SolverConfig(type="nesterov", base_lr=0.01),
    exchange=ExchangeConfig(algorithm="tree", timeout_s=300),
)


def recipe_on(folder: Path, **words: Any) -> Recipe:
    return changed(RECIPE, data={"path": str(folder), **words})


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 + 10: three steps are more than an epoch, whose last step is whole."""
    return pack_photos(tmp_path_factory.mktemp("photos"), 48, 10)


@pytest.mark.parametrize(
    "words",
    [{"augment": "inception", "order": "shards"}, {"augment": "caffe"}],
    ids=["inception", "caffe"],
)
def test_workers_a_cache_and_threads_change_no_bit(
    trained: Trained, packed: Path, words: dict[str, str], tmp_path: Path
) -> None:
    alone = trained(1, recipe_on(packed, **words), NAMED)
    cache = {"cache": str(tmp_path / "cache"), "cache_bytes": 80_000, "decode_threads": 3}
    three = trained(3, recipe_on(packed, **words, **cache), NAMED)
    assert end(three) == end(alone)
    assert len(three.data_wait_by_rank) == 3
    assert list((tmp_path / "cache").glob("*.shard"))


def test_a_run_that_skips_says_what_it_left_out(trained: Trained, tmp_path: Path) -> None:
    pack_photos(tmp_path, 48, 10)
    photos = tmp_path / "photos"
    broken = [sorted(photos.glob("train/3/*.jpg"))[0], sorted(photos.glob("test/5/*.jpg"))[0]]
    for path in broken:
        path.write_bytes(path.read_bytes()[:300])
    recipe = recipe_on(photos, name="folder", on_error="skip")
    alone, two = (trained(size, recipe, NAMED) for size in (1, 2))
    assert two.state_sha256 == alone.state_sha256
    lines = read_run_file(two.folder, "result.json")["broken_images"]
    assert {line.split(": not a whole image")[0] for line in lines} == set(map(str, broken))
