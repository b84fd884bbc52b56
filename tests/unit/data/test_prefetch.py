"""Batches ahead: the same batches, in order, each made once; doubts and errors in their place."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe.cli import main
from firecaffe.data import Batches, DataConfig, SampleOrder, TensorDataset, open_data
from firecaffe.data.augment import AUGMENTS
from firecaffe.data.batches import FEWEST, MOST, PrefetchedBatches, ahead
from firecaffe.data.dataset import Batch, is_asked_again, is_repeatable, same_bits
from firecaffe.errors import DataError
from firecaffe.exchange.leaves import leaf_share
from tests.kit.data_photos import make_folder, pack
from tests.kit.training import recipe_in, record_of
from tests.world import Ranks

IMAGES = torch.arange(16 * 16, dtype=torch.float32).view(16, 1, 4, 4)
LABELS = torch.arange(16) % 2
FIXED = TensorDataset(IMAGES, LABELS, 2)


class Slow:
    """A data set of one's own, that notices who asks it at the same time."""

    sample_CHW = (1, 2, 2)
    num_classes = 2
    fetchers = 1

    def __init__(self, count: int, bad: int = -1) -> None:
        self.count, self.bad = count, bad
        self.asked: list[int] = []
        self.inside = threading.Lock()

    def __len__(self) -> int:
        return self.count

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        assert self.inside.acquire(blocking=False), "two threads at a time"
        try:
            self.asked += indices_B.tolist()
            if self.bad in indices_B.tolist():
                raise DataError(f"sample {self.bad} is bad")
            images = indices_B.view(-1, 1, 1, 1).expand(-1, 1, 2, 2).float()
            return images.clone(), indices_B % 2
        finally:
            self.inside.release()


def batches_of(dataset: Slow, batch: int = 6, micro: int = 2) -> Batches:
    return Batches(dataset, SampleOrder(0, len(dataset), batch, micro), DataConfig("own"))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_same_batches_in_order_and_each_once(world_size: int) -> None:
    for rank in range(world_size):
        share = leaf_share(3, world_size, rank)
        own, plain = Slow(20), batches_of(Slow(20))
        ahead_of = PrefetchedBatches(batches_of(own), share, 2, 11)
        taken = 0
        for step in range(2, 11):
            for leaf in share:
                batch = ahead_of.train_batch(step, leaf)
                assert same_bits(batch, plain.train_batch(step, leaf))
                taken += len(batch[1])
        ahead_of.close()
        assert len(own.asked) == taken


def test_other_leaves_from_a_step_on() -> None:
    """As if they had been those from the start; what waited is made for nothing, never taken."""
    plain = batches_of(Slow(20), batch=12)
    ahead_of = PrefetchedBatches(batches_of(Slow(20), batch=12), range(3), 0, 12)
    for step, leaves in enumerate([[0, 1, 2], [0, 1, 2], [4, 2, 3], [4, 2, 3], [5], [5]]):
        if list(leaves) != list(ahead_of.leaves):
            ahead_of.go_on(leaves, step)
        for leaf in leaves:
            assert same_bits(ahead_of.train_batch(step, leaf), plain.train_batch(step, leaf))
    ahead_of.close()


def test_an_error_comes_with_its_batch() -> None:
    order = SampleOrder(0, 20, 6, 2)
    bad = int(order.micro_batch(1, 2)[0])
    batches = PrefetchedBatches(batches_of(Slow(20, bad)), range(3), 0, 100)
    for step, leaf in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        batches.train_batch(step, leaf)
    with pytest.raises(DataError, match=f"sample {bad} is bad"):
        batches.train_batch(1, 2)
    batches.close()


def test_no_more_is_made_than_may_wait() -> None:
    begun: list[int] = []

    def calls() -> Iterator[Callable[[], int]]:
        for number in range(1000):
            begun.append(number)
            yield lambda: 0

    for batch_bytes, most in ((1, MOST), (10**12, FEWEST)):
        begun.clear()
        made = ahead(calls(), Slow(1), batch_bytes)
        next(made)
        assert len(begun) <= most + 1
        made.close()


def fetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fetch")]


def test_closing_ends_the_threads_and_data_in_memory_need_none() -> None:
    batches = PrefetchedBatches(batches_of(Slow(20)), range(3), 0, 10**6)
    batches.train_batch(0, 0)
    batches.close()
    for thread in fetching():
        thread.join(timeout=300)
    assert not fetching()
    in_memory = Batches(FIXED, SampleOrder(0, 16, 6, 2), DataConfig("own"))
    PrefetchedBatches(in_memory, range(3), 0, 10).train_batch(0, 0)
    assert not fetching()


@pytest.mark.parametrize("augment", AUGMENTS)
def test_photos_do_not_depend_on_threads_or_batches(tmp_path: Path, augment: str) -> None:
    """The same pixels one by one and together, from the folder and from shards, ahead and not."""
    pack(make_folder(tmp_path / "photos"), tmp_path / "packed")
    path = str(tmp_path / "packed")
    config = DataConfig("packed", path, resize=16, crop=12, mirror=True, augment=augment)
    config, alone = (replace(config, decode_threads=threads) for threads in (3, 1))
    order = SampleOrder(5, 30, 8, 4)
    together = PrefetchedBatches(Batches(open_data(config).train, order, config), range(2), 0, 8)
    single = Batches(open_data(alone).train, SampleOrder(5, 30, 8, 1), alone)
    for step in range(8):
        for leaf in range(2):
            parts = [single.train_batch(step, 4 * leaf + place) for place in range(4)]
            images, labels = map(torch.cat, zip(*parts, strict=True))
            assert same_bits(together.train_batch(step, leaf), (images, labels))
    together.close()


class Drawing:
    """A data set that draws from a generator of its own, from the `after`-th batch on."""

    sample_CHW, num_classes = (1, 4, 4), 2

    def __init__(self, after: int = 0) -> None:
        self.asked, self.after = 0, after
        self.coin = random.Random()

    def __len__(self) -> int:
        return len(IMAGES)

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        self.asked += 1
        images = IMAGES[indices_B].clone()
        if self.asked > self.after:
            for place in range(len(images)):
                images[place] += self.coin.random()
        return images, indices_B % 2


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))


def run(folder: Path, train_set: object, test_set: object, steps: int = 6) -> firecaffe.Result:
    words = f"train.global_batch_size=8 train.micro_batch_size=4 train.steps={steps}"
    return firecaffe.train(recipe_in(folder, words), network, train_set, test_set)


def on_one_rank_alone(folder: Path, rank_that_draws: int) -> list[str]:
    is_drawing = int(os.environ["RANK"]) == rank_that_draws
    return run(folder, Drawing() if is_drawing else FIXED, FIXED).identity_doubts


def test_what_is_asked_twice_before_the_first_step() -> None:
    assert not is_repeatable(Drawing())
    assert is_repeatable(Drawing(after=2))
    nothing = torch.full((2, 1, 4, 4), torch.nan)
    assert is_repeatable(TensorDataset(nothing, torch.arange(2), 2))
    assert not same_bits((IMAGES, ()), (IMAGES.double(), ()))
    assert same_bits(({"a": IMAGES}, [LABELS]), ({"a": IMAGES.clone()}, [LABELS]))
    assert not same_bits(({"a": IMAGES}, LABELS), ({"b": IMAGES}, LABELS))


def test_it_stands_in_the_record_the_lines_and_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sets in (("a", (Drawing(), FIXED)), ("b", (FIXED, Drawing())), ("c", (FIXED, FIXED))):
        run(tmp_path / name, *sets)
    lines = capsys.readouterr().out
    a, b, c = (record_of(tmp_path / name)["identity_doubts"] for name in "abc")
    assert [len(doubts) for doubts in (a, b, c)] == [1, 1, 0]
    assert "the training set draws random numbers" in a[0]
    assert "the test set draws random numbers" in b[0]
    assert all(f"warning: {doubt}" in lines for doubt in a + b)
    assert main(["compare", *(str(tmp_path / name) for name in "abc")]) == 0
    compared = capsys.readouterr().out
    assert f"a: {a[0]}" in compared
    assert "c: " not in compared


def test_one_that_begins_to_draw_later_is_found_by_the_batches_that_are_asked_for_again(
    tmp_path: Path,
) -> None:
    counts, draws = run(tmp_path / "late", Drawing(after=20), FIXED, steps=40).identity_doubts
    assert "carries over asked" in counts
    assert "asked once more" in draws
    assert record_of(tmp_path / "late")["identity_doubts"] == [counts, draws]


def test_what_it_costs() -> None:
    """The batches of 256 steps of 8 leaves, and 9 more: half a hundredth."""
    assert sum(map(is_asked_again, range(256))) == 9
    counted = Drawing(after=10**9)
    batches = Batches(counted, SampleOrder(0, 16, 16, 2), DataConfig())
    ahead = PrefetchedBatches(batches, range(8), 0, 256, [])
    for step in range(256):
        for leaf in range(8):
            ahead.train_batch(step, leaf)
    ahead.close()
    assert counted.asked == 256 * 8 + 9


def test_two_threads_that_find_it_at_once_say_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are both asked for twice; the doubt is about the first of them."""
    together = threading.Barrier(2)

    def both_have_compared(first: Batch, second: Batch) -> bool:
        found = same_bits(first, second)
        together.wait(60)
        return found

    monkeypatch.setattr("firecaffe.data.batches.same_bits", both_have_compared)
    drawing, doubts = Drawing(), list[str]()
    monkeypatch.setattr(drawing, "fetchers", 2, raising=False)
    batches = Batches(drawing, SampleOrder(0, 16, 16, 1), DataConfig())
    ahead = PrefetchedBatches(batches, [0], 0, 2, doubts)
    for step in range(2):
        ahead.train_batch(step, 0)
    ahead.close()
    assert len(doubts) == 1
    assert "samples of step 1," in doubts[0]


def test_a_doubt_of_one_rank_is_every_rank_s(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.shared(2, on_one_rank_alone, tmp_path / "run", 1)
    assert first == second
    assert any("the training set draws random numbers" in doubt for doubt in first)
