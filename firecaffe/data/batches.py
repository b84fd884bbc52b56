"""The batches of training steps and evaluations, ready on the device, of images or other data.

A rank's training batches are fetched ahead, in the order in which it requests them.
Data in memory are not fetched ahead, since indexing them is cheaper than passing them between
threads. Nor are batches of users' code, which may use the training thread's random generators.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_edges

from firecaffe.data import DataConfig, augment
from firecaffe.data.dataset import (
    ENDS,
    Batch,
    Dataset,
    Images,
    Layout,
    TensorLayout,
    ask,
    is_asked_again,
    is_images,
    layout_of,
    map_batch,
    num_samples,
    same_bits,
)
from firecaffe.data.decode import DecodedSet, StoredSet, scale
from firecaffe.data.sample_order import SampleOrder
from firecaffe.errors import DataError, RecipeError

Fetch = Callable[[Tensor], Batch]


def output_shape(sample_CHW: Sequence[int], config: DataConfig) -> tuple[int, int, int]:
    """Return the shape of the network's images. Raises RecipeError if settings do not fit them."""
    channels, rows, columns = sample_CHW
    side = min(rows, columns)
    try:
        if config.pad > side:
            raise ValueError
        rows, columns = augment.cropped_shape((rows, columns), config.crop, config.pad)
    except ValueError:
        raise RecipeError(
            f"data.crop is {config.crop} with data.pad {config.pad} on images of "
            f"{rows} x {columns}, expected pad from 0 to the shorter side and crop from 0 to that "
            "plus twice the padding"
        ) from None
    for name, values in (("mean", config.mean), ("std", config.std)):
        if len(values) not in (0, 1, channels):
            raise RecipeError(
                f"data.{name} has {len(values)} values, expected none, 1 or {channels} "
                "(the number of channels)"
            )
    return channels, rows, columns


def _caffe(
    dataset: Images, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    crop, pad, mirror = config.crop, config.pad, config.mirror
    if not isinstance(dataset, DecodedSet):
        images_BCHW, labels_B = ask(dataset, samples_B, seed, epoch)
        images_BChw = augment.random_crop_mirror(
            images_BCHW, samples_B, seed=seed, epoch=epoch, crop=crop, pad=pad, mirror=mirror
        )
        return images_BChw, labels_B
    _, height, width = dataset.sample_CHW
    rows, columns = augment.cropped_shape((height, width), crop, pad)
    room = (height + 2 * pad - rows + 1, width + 2 * pad - columns + 1)
    top_B, left_B, flags_B = augment.crops_and_mirrors(samples_B, seed, epoch, room, mirror)

    def cut_crop(image_CHW: Tensor, place: int) -> Tensor:
        image_CHW = scale(image_CHW, height, width)
        image_CHW = pad_edges(image_CHW, [pad] * 4) if pad else image_CHW
        top, left = top_B[place], left_B[place]
        image_Chw = image_CHW[:, top : top + rows, left : left + columns]
        return image_Chw.flip(2) if flags_B[place] else image_Chw

    return dataset.transformed(samples_B, cut_crop, crop)


def _inception(
    dataset: Images, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    side = config.crop
    draws_BA4 = augment.draws(seed, epoch, samples_B).tolist()
    _, _, flags_B = augment.crops_and_mirrors(samples_B, seed, epoch, (1, 1), config.mirror)

    def cut_box(image_CHW: Tensor, place: int) -> Tensor:
        _, rows, columns = image_CHW.shape
        image_Chw = augment.cut(image_CHW, augment.box(draws_BA4[place], rows, columns), side)
        return image_Chw.flip(2) if flags_B[place] else image_Chw

    if isinstance(dataset, DecodedSet):
        return dataset.transformed(samples_B, cut_box, side)
    images_BCHW, labels_B = ask(dataset, samples_B, seed, epoch)
    cuts = [cut_box(image_CHW, place) for place, image_CHW in enumerate(images_BCHW)]
    shape = (0, images_BCHW.shape[1], side, side)
    return torch.stack(cuts) if cuts else images_BCHW.new_empty(shape), labels_B


def _plain(
    dataset: Images, config: DataConfig, seed: int, epoch: int, samples_B: Tensor
) -> tuple[Tensor, Tensor]:
    images_BCHW, labels_B = ask(dataset, samples_B, seed, epoch)
    return augment.center_crop(images_BCHW, config.crop, config.pad).contiguous(), labels_B


FETCH = {"caffe": _caffe, "inception": _inception, "none": _plain}


def test_fetcher(dataset: Dataset, config: DataConfig) -> Fetch:
    """Return the function that fetches test samples: images are cut, at the training's scale."""
    if not is_images(dataset):
        return dataset.batch
    if config.augment == "inception" and isinstance(dataset, DecodedSet):
        cut = partial(augment.middle, shorter=config.resize, side=config.crop)
        return partial(dataset.transformed, transform=lambda image, _: cut(image), side=config.crop)

    def fetch_centers(samples_B: Tensor) -> Batch:
        images_BCHW, labels_B = dataset.batch(samples_B)
        return augment.center_crop(images_BCHW, config.crop, config.pad), labels_B

    return fetch_centers


T = TypeVar("T")

PREFETCH_BYTES = 256_000_000

FEWEST, MOST = 2, 32
"""Limits of the number of batches fetched ahead, whatever their size."""


def fetchers_of(dataset: Dataset) -> int:
    """Return how many fetching threads may call a data set at once. 0: only the caller's thread."""
    fetchers: int = getattr(dataset, "fetchers", 0)
    return fetchers


def sample_bytes(dataset: Dataset) -> int:
    """Return the approximate bytes of a prefetched sample. Images not decoded here are float32."""
    if is_images(dataset):
        return prod(dataset.sample_CHW) * (1 if isinstance(dataset, StoredSet) else 4)
    return layout_of(dataset).num_bytes


def ahead(
    calls: Iterable[Callable[[], T]], dataset: Dataset, batch_bytes: int
) -> Generator[T, None, None]:
    """Yield the calls' results in order. Closing drops calls not begun and waits for others."""
    fetchers = fetchers_of(dataset)
    if not fetchers:
        yield from (call() for call in calls)
        return
    depth = max(min(MOST, max(FEWEST, PREFETCH_BYTES // max(1, batch_bytes))), fetchers)
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


def network_layout(dataset: Dataset, config: DataConfig) -> Layout:
    """Return the layout that the network receives. Raises RecipeError if settings do not fit."""
    if is_images(dataset):
        shape = output_shape(dataset.sample_CHW, config)
        return Layout(TensorLayout(shape, torch.float32), TensorLayout((), torch.int64))
    return layout_of(dataset)


@dataclass(frozen=True)
class Batches:
    """A run's training batches: functions of the order's seed, the step and the leaf alone."""

    dataset: Dataset
    order: SampleOrder
    config: DataConfig
    device: torch.device | str = "cpu"

    @cached_property
    def layout(self) -> Layout:
        return network_layout(self.dataset, self.config)

    def train_batch(self, step: int, leaf: int) -> Batch:
        """Return a batch on the device; at an epoch's end fewer samples or 0. Raises DataError."""
        return self.on_device(self.host_batch(step, leaf))

    def host_batch(self, step: int, leaf: int) -> Batch:
        """Return a batch on the host: images as they are stored, augmented but not normalized."""
        samples_B = self.order.micro_batch(step, leaf)
        if len(samples_B) == 0:  # at an epoch's end; data sets need not support empty requests
            return self.layout.zeros(0)
        dataset, seed, epoch = self.dataset, self.order.seed, self.order.epoch(step)
        if is_images(dataset):
            fetch = partial(FETCH[self.config.augment], dataset, self.config, seed, epoch)
        else:
            fetch = partial(ask, dataset, seed=seed, epoch=epoch)
        return _fetch(fetch, self.dataset, samples_B)

    def on_device(self, batch: Batch) -> Batch:
        return on_device(batch, self.dataset, self.config, self.device)


def on_device(
    batch: Batch, dataset: Dataset, config: DataConfig, device: torch.device | str
) -> Batch:
    if not is_images(dataset):
        return map_batch(lambda tensor: tensor.to(device, non_blocking=True), batch)
    images_BChw, labels_B = batch
    normal_BChw = augment.normalize(images_BChw, config.mean, config.std, device)
    return normal_BChw, labels_B.to(device, non_blocking=True)


def _fetch(fetch: Fetch, dataset: Dataset, samples_B: Tensor) -> Batch:
    try:
        batch = fetch(samples_B)
    except ENDS as error:
        raise DataError(
            f"the data end before sample {int(samples_B.max())} of {len(dataset)} "
            f"({type(error).__name__}: {error})"
        ) from error
    inputs, targets = batch
    rows = num_samples(inputs, ()), num_samples(inputs, targets)
    if not rows[0] == rows[1] == len(samples_B):
        what = ("images", "labels") if is_images(dataset) else ("inputs", "targets")
        raise DataError(
            f"{len(samples_B)} samples were asked for, {rows[0]} {what[0]} and "
            f"{rows[1]} {what[1]} came; the data set says that it holds {len(dataset)}"
        )
    return batch


class TrainBatches(Protocol):
    @property
    def order(self) -> SampleOrder: ...

    def train_batch(self, step: int, leaf: int) -> Batch: ...


@dataclass
class PrefetchedBatches:
    """Prefetched batches of `leaves`, in this order, of each step from `first_step` on."""

    batches: Batches
    leaves: Sequence[int]
    first_step: int
    last_step: int
    """One more than the last step."""
    doubts: list[str] | None = None
    """Receives a warning if a batch differs when requested twice. None: nothing is checked."""
    _next: Iterator[tuple[int, int]] = field(init=False, repr=False)
    _made: Generator[tuple[Batch, bool], None, None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        batches = self.batches
        batch_bytes = batches.order.micro_batch_size * sample_bytes(batches.dataset)
        self._next = self._places()
        calls = (partial(self._host_batch, *place) for place in self._places())
        self._made = ahead(calls, batches.dataset, batch_bytes)

    def go_on(self, leaves: Sequence[int], step: int) -> None:
        """Continue with other leaves from `step` on. Waiting batches are dropped."""
        # Waits for the batch in progress, since a data set need not allow two callers at once.
        self.close()
        self.leaves, self.first_step = leaves, step
        self._begin()

    @property
    def order(self) -> SampleOrder:
        return self.batches.order

    def _places(self) -> Iterator[tuple[int, int]]:
        return (
            (step, leaf) for step in range(self.first_step, self.last_step) for leaf in self.leaves
        )

    # Returns the batch, and whether it differed when it was requested again. It runs in one of
    # several threads, so `train_batch` reports this.
    def _host_batch(self, step: int, leaf: int) -> tuple[Batch, bool]:
        batch, differs = self.batches.host_batch(step, leaf), False
        if self.doubts is not None and leaf == self.leaves[0] and is_asked_again(step):
            differs = not same_bits(batch, self.batches.host_batch(step, leaf))
        if torch.device(self.batches.device).type == "cuda":
            batch = map_batch(lambda tensor: tensor.pin_memory(), batch)
        return batch, differs

    def train_batch(self, step: int, leaf: int) -> Batch:
        """Return `Batches.train_batch`. This call reports errors and doubts of prefetching."""
        expected = next(self._next)
        if expected != (step, leaf):
            raise RuntimeError(f"asked for {(step, leaf)}, expected {expected}")
        batch, differs = next(self._made)
        if differs and self.doubts is not None:
            self.doubts.append(
                f"the training set draws random numbers: asked once more for samples of step "
                f"{step + 1}, it gave others; batch(indices) must depend on the indices alone"
            )
            self.doubts = None  # warn once
        return self.batches.on_device(batch)

    def close(self) -> None:
        self._made.close()


def eval_batches(
    dataset: Dataset,
    batch_size: int,
    rank: int,
    world_size: int,
    *,
    config: DataConfig,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[int, Any, Any]]:
    """Yield (batch number, inputs, targets) of one rank's part of an evaluation, center-cropped.

    Batch b is samples [b batch_size, (b + 1) batch_size) of the data set, for rank b mod
    world_size. So each sample counts once, and sums by batch number do not depend on world_size.
    """
    fetch = test_fetcher(dataset, config)
    numbers = range(rank, -(-len(dataset) // batch_size), world_size)

    def fetched(number: int) -> Batch:
        start = number * batch_size
        samples_B = torch.arange(start, min(start + batch_size, len(dataset)))
        return _fetch(fetch, dataset, samples_B)

    calls = (partial(fetched, number) for number in numbers)
    made = ahead(calls, dataset, batch_size * sample_bytes(dataset))
    for number, batch in zip(numbers, made, strict=True):
        yield number, *on_device(batch, dataset, config, device)
