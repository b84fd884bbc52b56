"""Batches made before they are asked for, by threads, in bounded memory.

A call that makes a batch is begun as soon as one of the batches ahead has been taken, in order, so
nothing is made twice and the next epoch's first batches are ready at its turn. Data in memory are
not fetched ahead: taking them is cheaper than handing them from thread to thread. Nor is what a
user's code makes: it may draw from generators that the training's own thread draws from, too.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from math import prod
from typing import TypeVar

from firecaffe.data.dataset import Dataset, TensorDataset, is_images, layout_of
from firecaffe.data.decoded import DecodedSet
from firecaffe.data.packed import RawPart

T = TypeVar("T")

AHEAD_BYTES = 256_000_000
"""Memory of batches that wait to be taken."""

FEWEST, MOST = 2, 32
"""Batches ahead, however large or small they are."""

FETCHERS = 2
"""Batches in the making at once, so that decoding threads never wait for the last of a batch."""


def fetchers_of(dataset: Dataset) -> int:
    """Threads that may ask a data set at once; 0: who needs a batch asks for it."""
    if isinstance(dataset, TensorDataset):
        return 0
    if isinstance(dataset, DecodedSet):
        return FETCHERS
    fetchers: int = getattr(dataset, "fetchers", 0)
    return fetchers


def sample_bytes(dataset: Dataset) -> int:
    """Memory of one sample while it waits, about: bytes of what is decoded, float32 of images that
    are not ours.
    """
    if is_images(dataset):
        is_bytes = isinstance(dataset, DecodedSet | RawPart)
        return prod(dataset.sample_CHW) * (1 if is_bytes else 4)
    return layout_of(dataset).num_bytes


def ahead(
    calls: Iterable[Callable[[], T]], dataset: Dataset, batch_bytes: int
) -> Generator[T, None, None]:
    """The calls' results, in order. batch_bytes: of each, about.

    A data set whose items other processes make is asked by a thread for each of them.
    Whoever stops early closes the iterator: what has not begun is dropped, what has is waited for.
    """
    fetchers = fetchers_of(dataset)
    if not fetchers:
        yield from (call() for call in calls)
        return
    depth = max(min(MOST, max(FEWEST, AHEAD_BYTES // max(1, batch_bytes))), fetchers)
    left = iter(calls)
    with ThreadPoolExecutor(fetchers, thread_name_prefix="fetch") as pool:
        waiting: deque[Future[T]] = deque(pool.submit(call) for call in islice(left, depth))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(call) for call in islice(left, 1))
                yield result
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
