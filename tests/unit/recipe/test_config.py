"""What [train] and the number of ranks may be."""

from typing import Any

import pytest

from firecaffe.errors import RecipeError
from firecaffe.recipe.config import TrainConfig, check_train, check_workers


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"global_batch_size": 1, "micro_batch_size": 1},
        {"steps": 5, "epochs": 0},
        {"steps": 0, "epochs": 1},
    ],
)
def test_accepted(words: dict[str, Any]) -> None:
    check_train(TrainConfig(**words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"global_batch_size": 0}, r"train\.global_batch_size is 0; it must be 1 to 16,777,216"),
        ({"micro_batch_size": 0}, r"train\.micro_batch_size is 0; it must be 1 to 16,777,216"),
        ({"micro_batch_size": -1}, r"train\.micro_batch_size is -1"),
        ({"threads": 0}, r"train\.threads is 0"),
        ({"eval_batch_size": 0}, r"train\.eval_batch_size is 0"),
        (
            {"global_batch_size": 2**24, "micro_batch_size": 1},
            r"16,777,216 a step; there may be at most 1,048,576",
        ),
        ({"steps": -1}, r"train\.steps is -1; it must be 0 to 10,000,000"),
        ({"epochs": -1}, r"train\.epochs is -1"),
        ({"eval_every": -5}, r"train\.eval_every is -5"),
        ({"steps": 5, "epochs": 1}, r"train\.steps is 5 and train\.epochs 1"),
        (
            {"global_batch_size": 100, "micro_batch_size": 16},
            r"train\.global_batch_size is 100, which is no multiple of train\.micro_batch_size, 16",
        ),
        ({"global_batch_size": 8, "micro_batch_size": 16}, r"train\.global_batch_size is 8"),
    ],
)
def test_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_train(TrainConfig(**words))


def test_as_many_ranks_as_micro_batches() -> None:
    config = TrainConfig(global_batch_size=128, micro_batch_size=16)
    assert config.num_micro_batches == 8
    for world_size in range(1, 9):
        check_workers(config, world_size)
    with pytest.raises(RecipeError, match="9 ranks but only 8 micro-batches") as caught:
        check_workers(config, 9)
    for word in ("train.global_batch_size 128", "train.micro_batch_size 16", "at most 8 ranks"):
        assert word in str(caught.value)
