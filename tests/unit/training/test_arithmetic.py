"""Random numbers by key; threads by recipe."""

from collections.abc import Iterator

import pytest
import torch

from firecaffe.recipe.config import TrainConfig
from firecaffe.training.arithmetic import seed_random, set_arithmetic


def drawn(*key: int | str) -> list[float]:
    seed, *what = key
    assert isinstance(seed, int)
    seed_random(seed, *what)
    values: list[float] = torch.cat([torch.rand(3), torch.randn(3), torch.randperm(5)]).tolist()
    return values


def test_the_same_key_gives_the_same_numbers() -> None:
    assert drawn(1, "dropout", 3, 4) == drawn(1, "dropout", 3, 4)


def test_another_key_gives_other_numbers() -> None:
    keys: list[tuple[int | str, ...]] = [
        (1, "dropout", 3, 4),
        (2, "dropout", 3, 4),
        (1, "weights", 3, 4),
        (1, "dropout", 4, 3),
        (1, "dropout", 34),
        (1, "dropout", 3, 5),
        (1, "dropout"),
        (1,),
        (-1,),
        (10**30,),
        *((0, "dropout", step, leaf) for step in range(20) for leaf in range(20)),
    ]
    assert len({tuple(drawn(*key)) for key in keys}) == len(keys)


@pytest.mark.parametrize("before", ["nothing", "uniform", "normal", "seed"])
def test_what_was_drawn_before_does_not_matter(before: str) -> None:
    expected = drawn(7, "weights")
    if before == "uniform":
        torch.rand(5)
    if before == "normal":  # torch makes normal numbers in pairs and keeps the second
        torch.randn(1, dtype=torch.float64)
    if before == "seed":
        torch.manual_seed(99)
    assert drawn(7, "weights") == expected
    seed_random(7, "weights")
    state = torch.get_rng_state()
    torch.randn(1)
    seed_random(7, "weights")
    assert torch.equal(torch.get_rng_state(), state)


def test_other_generators_are_left_alone() -> None:
    own = torch.Generator().manual_seed(5)
    state = own.get_state()
    seed_random(7, "weights")
    assert torch.equal(own.get_state(), state)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("number", [1, 2])
def test_threads_are_the_recipes(number: int) -> None:
    set_arithmetic(TrainConfig(threads=number), torch.device("cpu"))
    assert torch.get_num_threads() == number
    assert not torch.are_deterministic_algorithms_enabled()
