"""Data workers: the same bits as without, their faults in one line, and none is left behind."""

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from firecaffe import from_torch
from firecaffe.data import Data, DataParts, current_key, divide
from firecaffe.data.batches import Batches, eval_batches
from firecaffe.data.config import DataConfig
from firecaffe.data.look import same_bits
from firecaffe.data.own_data import check_own
from firecaffe.data.sample_order import SampleOrder
from firecaffe.data.train_batches import BatchesAhead
from firecaffe.errors import DataError, OwnCodeError
from firecaffe.training.data_workers import data_workers
from tests.world import fork_server

COUNT = 12


class Drawn(Dataset[Any]):
    """Items that draw from all generators; one raises, one ends its process, one never comes."""

    def __init__(self, raises: int = -1, ends: int = -1, waits: int = -1) -> None:
        self.raises, self.ends, self.waits = raises, ends, waits

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if index == self.raises:
            raise ValueError("nothing there")
        if index == self.ends:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.waits:
            threading.Event().wait()
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        key = torch.tensor(current_key())
        return {"drawn": torch.tensor(drawn), "key": key}, (index, float(os.getpid()))


def of_workers(workers: int, **words: int) -> Data:
    """Training, held-out and test samples, made by so many workers."""
    names = ("train", "test")
    train, test = (check_own(name, from_torch(Drawn(**words), workers)) for name in names)
    return divide(DataParts(train, test), DataConfig(hold_out=0.25))


@pytest.fixture(autouse=True)
def _server() -> None:
    """The tests' fork server, which has torch loaded, before one is started that has less."""
    fork_server()
    forkserver.ensure_running()


def batches_of(data: Data) -> Iterator[Any]:
    """Those of an epoch of training, and of an evaluation; by whom they were made is left out."""
    order = SampleOrder(4, len(data.train), 6, 2)
    ahead = BatchesAhead(Batches(data.train, order, DataConfig()), range(3), 0, 2)
    for step in range(2):
        for leaf in range(3):
            yield ahead.train_batch(step, leaf)
    ahead.close()
    assert data.validation is not None
    for part in (data.validation, data.test):
        for _, inputs, targets in eval_batches(part, 5, 0, 1, config=DataConfig()):
            yield inputs, targets


def makers_of(batches: Iterable[Any]) -> set[int]:
    return {int(process) for batch in batches for process in batch[1][1].tolist()}


def test_the_same_bits_from_other_processes_which_end() -> None:
    expected = list(batches_of(of_workers(0)))
    assert makers_of(expected) <= {os.getpid()}
    data = of_workers(2)
    with data_workers(data):
        found = list(batches_of(data))
    makers = makers_of(found)
    assert os.getpid() not in makers
    assert 2 <= len(makers) <= 4  # two for training and what is held out of it, two for the test
    assert not any(psutil.pid_exists(maker) for maker in makers)
    for one, other in zip(expected, found, strict=True):
        assert same_bits((one[0], one[1][0]), (other[0], other[1][0]))
    with pytest.raises(DataError, match="have ended"):
        data.train.batch(torch.tensor([0]))


def test_a_worker_that_raises_or_is_killed_is_one_line() -> None:
    data = of_workers(2, raises=7)
    with data_workers(data), pytest.raises(OwnCodeError) as caught:
        list(batches_of(data))
    assert "train[7] raised ValueError: nothing there" in str(caught.value)
    assert "in __getitem__" in caught.value.traceback
    assert "firecaffe/training/" not in caught.value.traceback
    data = of_workers(1, ends=7)
    with data_workers(data), pytest.raises(DataError) as killed:
        list(batches_of(data))
    assert all(part in str(killed.value) for part in ("train", "SIGKILL", "7", "workers=0"))


def test_one_that_waits_for_ever_does_not_keep_the_training_from_ending() -> None:
    data = of_workers(1, waits=int(SampleOrder(4, 9, 6, 2).micro_batch(1, 0)[0]))
    batches = Batches(data.train, SampleOrder(4, 9, 6, 2), DataConfig())
    ahead = BatchesAhead(batches, range(3), 0, 9)
    with data_workers(data):
        ahead.train_batch(0, 0)
    ahead.close()


def test_what_cannot_be_sent_to_a_worker_is_said_before_the_training() -> None:
    dataset = Drawn()
    vars(dataset)["lock"] = threading.Lock()
    with pytest.raises(DataError, match=r"train_set cannot be sent to data workers.*lock"):
        check_own("train_set", from_torch(dataset, workers=1))
    check_own("train_set", from_torch(dataset))


def test_classes_and_functions_that_no_process_could_import_are_sent() -> None:
    """As those of a script or a notebook."""

    class Local(Drawn):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0]["drawn"], index

    def collate(items: list[Any]) -> Any:
        return torch.stack([item for item, _ in items]), ()

    by_main = type("OfMain", (Local,), {"__module__": "__main__"})
    for kind in (Local, by_main):
        alone, apart = (check_own("train", from_torch(kind(), n, collate)) for n in (0, 1))
        data = divide(DataParts(apart, apart), DataConfig())
        samples = torch.arange(COUNT)
        with data_workers(data):
            assert same_bits(apart.batch(samples), alone.batch(samples))


def rank_with_workers(pipe: Connection) -> None:
    data = of_workers(2)
    with data_workers(data):
        pipe.send(makers_of(batches_of(data)))
        threading.Event().wait()


def test_they_end_with_a_rank_that_is_killed() -> None:
    context = multiprocessing.get_context("forkserver")
    own, other = context.Pipe()
    rank = context.Process(target=rank_with_workers, args=(other,))
    rank.start()
    workers = [psutil.Process(number) for number in own.recv()]
    assert workers
    rank.kill()
    rank.join()
    _, left = psutil.wait_procs(workers, timeout=300)
    assert not left
