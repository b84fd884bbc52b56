"""One thread: on layers this small, threads that wait for each other are what takes time."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A world that `firecaffe.split` has joined would be that of other tests, too."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
