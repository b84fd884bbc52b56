"""A held-out part: every image on one side, the same whoever asks, as the source has them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from firecaffe.data import DataConfig, TensorDataset, is_images, num_classes, open_data
from firecaffe.data.decoded import DecodedSet
from firecaffe.data.hold_out import hold_out, num_held_out
from firecaffe.data.packed import RawPart
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.plan.of_recipe import workload_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe
from tests.unit.data.test_packed import make_folder, pack


def numbered(count: int) -> TensorDataset:
    """Image n holds n, and so does its label, by ten."""
    numbers = torch.arange(count)
    return TensorDataset(numbers.view(-1, 1, 1, 1).float(), numbers % 10)


@pytest.mark.parametrize(("count", "share"), [(1000, 0.1), (17, 0.5), (1000, 0.001)])
def test_every_image_is_on_one_side(count: int, share: float) -> None:
    whole = numbered(count)
    parts = hold_out(whole, share)
    assert len(parts[1]) == num_held_out(count, share) == round(count * share)
    found = []
    for part in parts:
        images, labels = part.batch(torch.arange(len(part)))
        numbers = images.flatten().long()
        assert torch.equal(labels, numbers % 10)
        assert num_classes(part) == whole.num_classes
        assert torch.equal(numbers, numbers.sort().values)
        found += numbers.tolist()
    assert sorted(found) == list(range(count))


def test_of_anyones_data_set() -> None:
    class Own:
        """No class of ours."""

        sample_CHW, num_classes = (1, 1, 1), 10

        def __len__(self) -> int:
            return 20

        def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
            return indices_B.view(-1, 1, 1, 1).float(), indices_B % 10

    rest, held = hold_out(Own(), 0.2)
    assert is_images(held)
    numbers = [part.batch(torch.arange(len(part)))[0].flatten().tolist() for part in (rest, held)]
    assert (len(rest), len(held)) == (16, 4)
    assert sorted(numbers[0] + numbers[1]) == list(range(20))
    assert (held.num_classes, held.sample_CHW) == (10, (1, 1, 1))


def test_it_is_no_run_of_neighbors() -> None:
    _, held = hold_out(numbered(1000), 0.1)
    images, _ = held.batch(torch.arange(len(held)))
    assert 300 < images.mean() < 700


def test_of_photos_and_of_raw_samples_read_from_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firecaffe.data.sources.HELD_BYTES", 0)
    folder = make_folder(tmp_path / "photos")
    for kind, raw in ((DecodedSet, False), (RawPart, True)):
        dest = tmp_path / kind.__name__
        pack(folder, dest, resize=16, raw=raw)
        config = DataConfig("packed", str(dest), resize=16)
        whole = open_data(config).train
        assert isinstance(whole, kind)
        images, labels = whole.batch(torch.arange(30))
        data = open_data(DataConfig("packed", str(dest), resize=16, hold_out=0.2))
        assert "24 training, 6 held-out and " in data.description
        assert data.validation is not None
        seen: list[int] = []
        for part in (data.train, data.validation):
            for number in range(len(part)):
                image, label = part.batch(torch.tensor([number]))
                [place] = [n for n in range(30) if torch.equal(images[n], image[0])]
                assert label[0] == labels[place]
                seen.append(place)
        assert sorted(seen) == list(range(30))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"hold_out": 1.0}, "data.hold_out is 1, expected 0 or more and less than 1"),
        ({"hold_out": -0.1}, "data.hold_out is -0.1"),
        ({"hold_out": 1e-9}, "which is 0 of 10000 training samples"),
    ],
)
def test_what_cannot_be_is_refused(words: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        open_data(DataConfig(name="generated", **words))  # type: ignore[arg-type]


def test_a_plan_counts_what_is_left() -> None:
    recipe = Recipe(model=ModelConfig("lenet"), data=DataConfig(hold_out=0.1))
    assert workload_of(check_recipe(recipe)).samples == 54_000
