"""What forward asks that tells the number of ranks."""

import cProfile
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Thread
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from firecaffe.cluster.groups import group_of_one
from firecaffe.data.decode import decode_threads
from firecaffe.errors import RecipeError
from firecaffe.inventory.world_queries import (
    check_queries,
    doubts_of_world,
    size_queries,
    world_queries,
)


def test_the_number_of_ranks_is_asked_for_and_not_the_rank() -> None:
    with world_queries() as asked:
        for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "HOME"):
            os.environ.get(variable)
        assert not dist.is_initialized()
    assert asked == ["WORLD_SIZE"]
    check_queries(asked)
    assert "WORLD_SIZE" in doubts_of_world("forward", asked)[0]


def test_a_profiler_goes_on_and_the_number_of_ranks_is_seen() -> None:
    profile = cProfile.Profile()
    profile.enable()
    try:
        with world_queries() as asked:
            os.environ.get("WORLD_SIZE")
    finally:
        profile.disable()
    assert asked == ["WORLD_SIZE"]
    assert any("get" in str(entry.code) for entry in profile.getstats())


def test_a_module_that_is_loaded_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's compiler loads some, with functions that dataclasses makes in their names."""
    module = ModuleType("torch.distributed.anything")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with world_queries() as asked:
        exec("from dataclasses import dataclass\n@dataclass\nclass Made:\n    a: int", vars(module))
    assert asked == []


def test_an_exchange_is_refused_by_its_name() -> None:
    with group_of_one(torch.device("cpu")), world_queries() as asked:
        dist.all_reduce(torch.ones(1))
        dist.get_world_size()
        dist.get_rank()
    assert asked == [f"all_reduce of torch.distributed in {__name__}", "get_world_size"]
    with pytest.raises(RecipeError, match=f"calls all_reduce of .* in {__name__}"):
        check_queries(asked)


def test_what_opens_data_is_watched_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    environment = type(os.environ)
    with group_of_one(torch.device("cpu")):
        before = dist.distributed_c10d._get_group_size
        with size_queries() as asked:
            assert sys.getprofile() is None
            assert (os.getenv("WORLD_SIZE"), "RANK" in os.environ) == ("3", False)
            assert dist.get_world_size() == 1
            decode_threads(0)  # firecaffe's own
        assert dist.distributed_c10d._get_group_size is before
    assert asked == ["WORLD_SIZE", "get_world_size"]
    assert type(os.environ) is environment


@pytest.mark.parametrize("queries", [size_queries, world_queries])
def test_who_goes_through_all_variables_asks_for_none(
    queries: Callable[[], AbstractContextManager[list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a package that torch.compile loads does."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    with queries() as asked:
        assert ("WORLD_SIZE", "3") in list(os.environ.items())
    assert asked == []


def test_ranks_and_other_threads_may_be_asked_for() -> None:
    thread = Thread(target=os.getenv, args=("WORLD_SIZE",))
    with size_queries() as asked:
        os.environ.get("RANK")
        thread.start()
        thread.join()
    assert asked == []
