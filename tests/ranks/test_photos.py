"""Photos from shards and from a folder, on real ranks: the same bits on any number of them."""

import dataclasses
from pathlib import Path

import pytest

import firecaffe
from benchmarks.small_run import pack_photos
from firecaffe import ExchangeConfig, Recipe, RunConfig, SolverConfig, TrainConfig
from firecaffe.data import DataConfig
from firecaffe.models.config import ModelConfig
from firecaffe.runs.run_folder import read_run_file
from tests.world import Ranks

RECIPE = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("packed", resize=32, crop=28, mirror=True),
    train=TrainConfig(
        global_batch_size=24, micro_batch_size=4, steps=6, seed=3, eval_batch_size=16
    ),
    solver=SolverConfig(type="nesterov", base_lr=0.01),
    exchange=ExchangeConfig(algorithm="tree", timeout_s=300),
)


def recipe_on(folder: Path, **words: str) -> Recipe:
    data = dataclasses.replace(RECIPE.data, path=str(folder), **words)  # type: ignore[arg-type]
    return dataclasses.replace(RECIPE, data=data)


def fit(recipe: Recipe, folder: str) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    return firecaffe.train(recipe)


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
    ranks: Ranks, packed: Path, tmp_path: Path, words: dict[str, str], worlds: tuple[int, ...]
) -> None:
    recipe = recipe_on(packed, **words)
    found = [ranks.shared(size, fit, recipe, str(tmp_path / str(size)))[0] for size in worlds]
    assert len({result.state_sha256 for result in found}) == 1
    assert len({(result.top1, result.test_loss) for result in found}) == 1
    assert [len(result.data_wait_by_rank) for result in found] == list(worlds)


def test_a_cache_and_threads_change_nothing(ranks: Ranks, packed: Path, tmp_path: Path) -> None:
    plain = recipe_on(packed, augment="inception")
    data = dataclasses.replace(
        plain.data, cache=str(tmp_path / "cache"), cache_bytes=80_000, decode_threads=3
    )
    cached = dataclasses.replace(plain, data=data)
    one = ranks.shared(1, fit, plain, str(tmp_path / "plain"))[0]
    other = ranks.shared(2, fit, cached, str(tmp_path / "cached"))[0]
    assert one.state_sha256 == other.state_sha256
    assert list((tmp_path / "cache").glob("*.shard"))


def test_a_run_that_skips_says_what_it_left_out(ranks: Ranks, tmp_path: Path) -> None:
    pack_photos(tmp_path, 120, 20)
    photos = tmp_path / "photos"
    broken = [sorted(photos.glob("train/3/*.jpg"))[0], sorted(photos.glob("test/5/*.jpg"))[0]]
    for path in broken:
        path.write_bytes(path.read_bytes()[:300])
    recipe = recipe_on(photos, name="folder", on_error="skip")
    found = [ranks.shared(size, fit, recipe, str(tmp_path / str(size)))[0] for size in (1, 2)]
    assert found[0].state_sha256 == found[1].state_sha256
    record = read_run_file(tmp_path / "2", "result.json")
    lines = record["broken_images"]
    assert sorted(line.split(": not a whole image")[0] for line in lines) == sorted(
        map(str, broken)
    )
