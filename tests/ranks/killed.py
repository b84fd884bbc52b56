"""A rank that gets a signal when it takes a micro-batch."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

from firecaffe.data import Batch, Batches
from firecaffe.data.batches import PrefetchedBatches


@contextmanager
def killed(rank: int, when: Callable[[int], bool], number: int = signal.SIGKILL) -> Iterator[None]:
    """If this process is that rank. when: of the step, counted from 0."""

    def deadly(train_batch: Callable[..., Batch]) -> Callable[..., Batch]:
        @wraps(train_batch)
        def take(batches: Any, step: int, leaf: int) -> Batch:
            if int(os.environ["RANK"]) == rank and when(step):
                os.kill(os.getpid(), number)
            return train_batch(batches, step, leaf)

        return take

    of_server, ahead = deadly(Batches.train_batch), deadly(PrefetchedBatches.train_batch)
    with (
        patch.object(Batches, "train_batch", of_server),
        patch.object(PrefetchedBatches, "train_batch", ahead),
    ):
        yield
