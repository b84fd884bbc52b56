"""What is done when a rank takes a micro-batch: as that it gets a signal."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from firecaffe.data import Batch, Batches
from firecaffe.data.batches import PrefetchedBatches


@contextmanager
def before_batches(act: Callable[[int, int], object]) -> Iterator[None]:
    """act: of the step, counted from 0, and the micro-batch."""

    def acting(train_batch: Callable[..., Batch]) -> Callable[..., Batch]:
        @wraps(train_batch)
        def take(batches: Any, step: int, leaf: int) -> Batch:
            act(step, leaf)
            return train_batch(batches, step, leaf)

        return take

    of_server, ahead = acting(Batches.train_batch), acting(PrefetchedBatches.train_batch)
    with (
        patch.object(Batches, "train_batch", of_server),
        patch.object(PrefetchedBatches, "train_batch", ahead),
    ):
        yield


def killed(
    rank: int, when: Callable[[int], bool], number: int = signal.SIGKILL
) -> AbstractContextManager[None]:
    def act(step: int, _: int) -> None:
        if int(os.environ["RANK"]) == rank and when(step):
            os.kill(os.getpid(), number)

    return before_batches(act)
