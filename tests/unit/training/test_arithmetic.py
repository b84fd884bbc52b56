"""Random numbers by key; threads by recipe."""

import random
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

import firecaffe
from firecaffe.recipe.config import TrainConfig
from firecaffe.training.forward import _deterministic, arithmetic, seed_random
from tests.kit.training import recipe_in
from tests.ranks.networks import Everything, small_data


def drawn(*key: int | str) -> list[float]:
    seed, *what = key
    assert isinstance(seed, int)
    seed_random(seed, *what)
    values: list[float] = torch.cat([torch.rand(3), torch.randn(3), torch.randperm(5)]).tolist()
    return [*values, random.random(), *np.random.rand(2), random.gauss(), np.random.normal()]


def test_another_key_gives_other_numbers_and_the_same_the_same() -> None:
    assert drawn(1, "dropout", 3, 4) == drawn(1, "dropout", 3, 4)
    keys: list[tuple[int | str, ...]] = [
        *((1, "dropout", 3, 4), (2, "dropout", 3, 4), (1, "weights", 3, 4), (1, "dropout", 4, 3)),
        *((1, "dropout", 34), (1, "dropout", 3, 5), (1, "dropout"), (1,), (-1,), (10**30,)),
        *((0, "dropout", step, leaf) for step in range(20) for leaf in range(20)),
    ]
    assert len({tuple(drawn(*key)) for key in keys}) == len(keys)
    seed_random(1, "dropout", 3, 4)  # and each generator has others
    of_all = [torch.rand(3, dtype=torch.float64).tolist(), np.random.rand(3).tolist()]
    of_all.append([random.random() for _ in range(3)])
    assert len({number for numbers in of_all for number in numbers}) == 9


@pytest.mark.parametrize("before", ["nothing", "uniform", "normal", "seed"])
def test_what_was_drawn_before_does_not_matter(before: str) -> None:
    expected, own = drawn(7, "weights"), torch.Generator().manual_seed(5)
    of_others = own.get_state()
    if before == "uniform":
        torch.rand(5), random.random(), np.random.rand()
    if before == "normal":  # torch makes normal numbers in pairs and keeps the second
        torch.randn(1, dtype=torch.float64), random.gauss(0, 1), np.random.normal()
    if before == "seed":
        torch.manual_seed(99), random.seed(99), np.random.seed(99)
    assert drawn(7, "weights") == expected
    seed_random(7, "weights")
    state = torch.get_rng_state()
    torch.randn(1)
    seed_random(7, "weights")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(own.get_state(), of_others)  # other generators are left alone


def test_tf32_by_its_newer_name_is_as_it_was() -> None:
    """Which the older name then cannot read."""
    products = torch.backends.cuda.matmul
    with ExitStack() as before:
        before.callback(setattr, products, "fp32_precision", products.fp32_precision)
        products.fp32_precision = "tf32"
        with _deterministic():
            assert not products.allow_tf32
        assert products.fp32_precision == "tf32"


@pytest.mark.parametrize("were", [False, True])
def test_kernels_are_as_they_were(were: bool) -> None:
    kernels = (
        (torch.utils.deterministic, "fill_uninitialized_memory"),
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cudnn, "allow_tf32"),
        (torch.backends.cuda.matmul, "allow_tf32"),
    )
    with ExitStack() as before:
        before.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(were, warn_only=True)
        for holder, name in kernels:
            before.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, were)
        with _deterministic():
            assert not any(getattr(holder, name) for holder, name in kernels)
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert [getattr(holder, name) for holder, name in kernels] == [were] * len(kernels)
        assert torch.are_deterministic_algorithms_enabled() is were
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_training_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    threads, numbers = torch.get_num_threads(), torch.get_rng_state()
    with arithmetic(TrainConfig(threads=threads + 1), torch.device("cpu")):
        assert torch.get_num_threads() == threads + 1
        assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads
    sizes = {"global_batch_size": 12, "micro_batch_size": 2, "steps": 1, "threads": threads + 1}
    recipe = recipe_in(tmp_path / "run", train=sizes)
    firecaffe.train(recipe, Everything, small_data(60), small_data(20, 1))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), numbers)
