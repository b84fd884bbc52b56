"""What the words of [train] may be."""

from typing import Any

import pytest

from firecaffe.errors import RecipeError
from firecaffe.recipe.config import TrainConfig, check_train


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
        ({"steps": -1}, r"train\.steps is -1; it must be 0 to 10,000,000"),
        ({"epochs": -1}, r"train\.epochs is -1"),
        ({"eval_every": -5}, r"train\.eval_every is -5"),
    ],
)
def test_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_train(TrainConfig(**words))
