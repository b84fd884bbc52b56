"""A data set that draws random numbers is found out, wherever it begins to."""

import json
import random
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import firecaffe
from firecaffe import Recipe, RunConfig, TensorDataset, TrainConfig
from firecaffe.cli import main
from firecaffe.data import train_batches
from firecaffe.data.batches import Batches
from firecaffe.data.config import DataConfig
from firecaffe.data.layout import Batch
from firecaffe.data.look import is_asked_again, is_repeatable, same_bits
from firecaffe.data.sample_order import SampleOrder
from firecaffe.data.train_batches import BatchesAhead
from tests.world import Ranks

IMAGES = torch.arange(16 * 16, dtype=torch.float32).view(16, 1, 4, 4)
LABELS = torch.arange(16) % 2


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
    recipe = Recipe(
        train=TrainConfig(8, 4, steps=steps), run=RunConfig(str(folder), tensorboard=False)
    )
    return firecaffe.train(recipe, network, train_set, test_set)


def on_one_rank_alone(folder: Path, rank_that_draws: int) -> list[str]:
    import os

    is_drawing = int(os.environ["RANK"]) == rank_that_draws
    fixed = TensorDataset(IMAGES, torch.arange(16) % 2, 2)
    return run(folder, Drawing() if is_drawing else fixed, fixed).identity_doubts


def test_what_is_asked_twice_before_the_first_step() -> None:
    assert not is_repeatable(Drawing())
    assert is_repeatable(Drawing(after=2))
    assert is_repeatable(TensorDataset(IMAGES, torch.arange(16), 16))
    nothing = torch.full((2, 1, 4, 4), torch.nan)
    assert is_repeatable(TensorDataset(nothing, torch.arange(2), 2))
    assert not same_bits((IMAGES, ()), (IMAGES.double(), ()))
    assert same_bits(({"a": IMAGES}, [LABELS]), ({"a": IMAGES.clone()}, [LABELS]))
    assert not same_bits(({"a": IMAGES}, LABELS), ({"b": IMAGES}, LABELS))


def test_it_stands_in_the_record_the_lines_and_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = TensorDataset(IMAGES, torch.arange(16) % 2, 2)
    for name, sets in (("a", (Drawing(), fixed)), ("b", (fixed, Drawing())), ("c", (fixed, fixed))):
        run(tmp_path / name, *sets)
    lines = capsys.readouterr().out
    found = [
        json.loads((tmp_path / name / "result.json").read_text())["identity_doubts"]
        for name in "abc"
    ]
    assert [len(doubts) for doubts in found] == [1, 1, 0]
    assert "the training set draws random numbers" in found[0][0]
    assert "the test set draws random numbers" in found[1][0]
    assert all(f"warning: {doubt}" in lines for doubts in found for doubt in doubts)
    assert main(["compare", *(str(tmp_path / name) for name in "abc")]) == 0
    compared = capsys.readouterr().out
    assert f"a: {found[0][0]}" in compared
    assert "c: " not in compared


def test_one_that_begins_to_draw_later_is_found_by_the_batches_that_are_asked_for_again(
    tmp_path: Path,
) -> None:
    fixed = TensorDataset(IMAGES, torch.arange(16) % 2, 2)
    late = Drawing(after=20)
    result = run(tmp_path / "late", late, fixed, steps=40)
    [doubt] = result.identity_doubts
    assert "asked once more" in doubt
    record = json.loads((tmp_path / "late" / "result.json").read_text())
    assert record["identity_doubts"] == [doubt]


def test_what_it_costs() -> None:
    """The batches of 256 steps of 8 leaves, and 9 more: half a hundredth."""
    assert sum(map(is_asked_again, range(256))) == 9
    counted = Drawing(after=10**9)
    batches = Batches(counted, SampleOrder(0, 16, 16, 2), DataConfig())
    ahead = BatchesAhead(batches, range(8), 0, 256, [])
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

    monkeypatch.setattr(train_batches, "same_bits", both_have_compared)
    drawing, doubts = Drawing(), list[str]()
    monkeypatch.setattr(drawing, "fetchers", 2, raising=False)
    batches = Batches(drawing, SampleOrder(0, 16, 16, 1), DataConfig())
    ahead = BatchesAhead(batches, [0], 0, 2, doubts)
    for step in range(2):
        ahead.train_batch(step, 0)
    ahead.close()
    assert len(doubts) == 1
    assert "samples of step 1," in doubts[0]


def test_a_doubt_of_one_rank_is_every_rank_s(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, on_one_rank_alone, tmp_path / "run", 1)
    assert first == second
    assert any("the training set draws random numbers" in doubt for doubt in first)
