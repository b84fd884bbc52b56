"""Batches made ahead by threads, in order and in bounded memory, across the ends of epochs.

Data in memory are not fetched ahead: taking them is cheaper than passing them between threads. Nor
are batches of users' code, which may draw from generators that the training's thread uses.
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
"""Memory of batches that wait."""

FEWEST, MOST = 2, 32
"""Limits of the number of batches ahead, whatever their size."""

FETCHERS = 2
"""Batches made at once, so that decoding threads never wait for the end of a batch."""


def fetchers_of(dataset: Dataset) -> int:
    """Return how many threads may call a data set at once. 0: none but the caller."""
    if isinstance(dataset, TensorDataset):
        return 0
    if isinstance(dataset, DecodedSet):
        return FETCHERS
    fetchers: int = getattr(dataset, "fetchers", 0)
    return fetchers


def sample_bytes(dataset: Dataset) -> int:
    """Return the approximate memory of a waiting sample: float32 for images not decoded here."""
    if is_images(dataset):
        is_bytes = isinstance(dataset, DecodedSet | RawPart)
        return prod(dataset.sample_CHW) * (1 if is_bytes else 4)
    return layout_of(dataset).num_bytes


def ahead(
    calls: Iterable[Callable[[], T]], dataset: Dataset, batch_bytes: int
) -> Generator[T, None, None]:
    """Yield the calls' results in order. `batch_bytes` is the approximate size of each.

    Closing the iterator drops calls that have not begun, and waits for the others.
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
