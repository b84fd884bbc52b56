"""Every numeric word of a recipe with values that cannot be: accepted, or one line names it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from firecaffe import DataConfig, ModelConfig, Recipe, TrainConfig
from firecaffe.data.generated import generate
from firecaffe.errors import FirecaffeError, RecipeError
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.training.checks import preflight
from tests.kit.models_refused import refused

RECIPE = Recipe(ModelConfig("lenet"), DataConfig("generated"), TrainConfig(8, 4, steps=2))
WHOLE = (10**30, -(10**30), 10**12, -1, 0)
REAL = (1e300, -1e300, 1e39, 1e-300, -1.0, 0.0, float("nan"), float("inf"))
VALUES: dict[Any, list[Any]] = {
    int: list(WHOLE),
    float: list(REAL),
    list[int]: [[value] for value in WHOLE],
    list[float]: [[value] for value in REAL],
    dict[str, float]: [{"*": value} for value in REAL],
}
HOPELESS = (10**30, -(10**30), 1e300, -1e300, 1e39, float("nan"), float("inf"))


def numeric_words() -> Iterator[tuple[str, str, Any]]:
    for section in dataclasses.fields(Recipe):
        config = getattr(RECIPE, section.name)
        for word, annotation in get_type_hints(type(config)).items():
            if annotation in VALUES:
                yield section.name, word, annotation


@pytest.fixture(autouse=True)
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firecaffe.data.sources.generate", lambda: generate(0, 60, 20))


@pytest.mark.parametrize(("section", "word", "annotation"), [*numeric_words()])
def test_no_number_ends_in_a_traceback(section: str, word: str, annotation: Any) -> None:
    for value in VALUES[annotation]:
        config = dataclasses.replace(getattr(RECIPE, section), **{word: value})
        recipe = dataclasses.replace(RECIPE, **{section: config})
        single = value
        if isinstance(value, list | dict):
            [single] = value.values() if isinstance(value, dict) else value
        said = ""
        try:
            preflight(check_recipe(recipe), 1)
        except FirecaffeError as error:
            said = str(error)
        if said or repr(single) in map(repr, HOPELESS):
            assert f"{section}.{word}" in said, value
            assert len(said.splitlines()) == 1


def replaced(section: str, **words: Any) -> Recipe:
    config = dataclasses.replace(getattr(RECIPE, section), **words)
    return dataclasses.replace(RECIPE, **{section: config})


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        # Beyond what data and arithmetic give.
        (replaced("train", global_batch_size=10**6), ["60 training samples", "at most 60"]),
        (replaced("train", global_batch_size=10**12), ["global_batch_size is", "1 to 16,777,216"]),
        (
            replaced("train", epochs=10**7, steps=0),
            ["train.epochs is", "steps", "at most 10,000,000"],
        ),
        (replaced("train", global_batch_size=68), ["global_batch_size is 68", "at most 60"]),
        (replaced("solver", base_lr=1e38, lr_mult={"*": 10.0}), ["solver.base_lr", "1e+39"]),
        (replaced("solver", weight_decay=1e38, decay_mult={"*": 10.0}), ["solver.weight_decay"]),
        (replaced("data", pad=29), ["data.pad 29", "28 x 28", "shorter side"]),
        (replaced("data", resize=20_000), ["data.resize is 20000", "1 to 16384"]),
        (replaced("data", std=[1e-45]), ["data.std", "1.2e-38"]),
        # Of another kind.
        (replaced("train", steps="3"), ["train.steps is '3'", "a whole number"]),
        (replaced("train", steps=2.0), ["train.steps is 2.0", "a whole number"]),
        (replaced("train", steps=True), ["train.steps is True", "a whole number"]),
        (replaced("data", mirror=1), ["data.mirror is 1", "true or false"]),
        (replaced("data", mean=0.5), ["data.mean is 0.5", "a list"]),
        (replaced("data", mean=["0.5"]), ["data.mean", "each of its values a finite number"]),
        (replaced("solver", lr_mult={1: 2.0}), ["solver.lr_mult", "text"]),
        (replaced("model", name=None), ["model.name is None", "text"]),
        (replaced("train", device="tpu"), ["train.device is 'tpu'", "'cuda'"]),
        (Recipe(train={"steps": 3}), ["train is {'steps': 3}", "TrainConfig("]),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_named(recipe: Recipe, parts: list[str]) -> None:
    with refused(RecipeError, parts):
        preflight(check_recipe(recipe), 1)
