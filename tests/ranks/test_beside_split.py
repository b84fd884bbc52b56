"""What other sections have beside split layers: any layout comes to the bits of one worker."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import firecaffe
from firecaffe import ParallelConfig, Recipe, RunConfig
from firecaffe.tasks import Loss
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.state import stored_piece
from tests.ranks.networks import small_data
from tests.ranks.test_layouts import ALL, HEAD, LAYOUTS, PATHS, RECIPE, ROWS, WORKERS, Net
from tests.world import Ranks

RATES = {"base_lr": 0.1, "lr_mult": {"*.bias": 2.0, "features.6.branch4.*": 0.5}}
NORMS: dict[str, Any] = {"type": "lamb", "clip_gradients": 0.5, **RATES}


def with_words(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    """The recipe with some words of some sections changed."""
    changed = {
        name: dataclasses.replace(getattr(recipe, name), **words)
        for name, words in sections.items()
    }
    return dataclasses.replace(recipe, **changed)


class Wide(Net):
    """With fully connected layers whose parts power_sgd makes smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(
            *(nn.Linear(63, 240), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(240, 90), nn.ReLU(inplace=True), nn.Linear(90, 4)),
        )


def fit(
    recipe: Recipe, folder: str, resume: str | None, loss: Loss, network: type[Net]
) -> firecaffe.Result:
    recipe = dataclasses.replace(recipe, run=RunConfig(folder=folder, tensorboard=False))
    data = small_data(68), small_data(30, 1)
    return firecaffe.train(recipe, network, *data, loss=loss, resume=resume)


def trained(
    ranks: Ranks,
    recipe: Recipe,
    name: str,
    folder: Path,
    split: dict[str, str] = HEAD,
    resume: Path | None = None,
    loss: Loss = F.cross_entropy,
    network: type[Net] = Net,
) -> firecaffe.Result:
    """By a layout of LAYOUTS, or "alone" by one worker."""
    parallel = ParallelConfig(split=HEAD, parts=4) if name == "alone" else LAYOUTS[name]
    recipe = dataclasses.replace(recipe, parallel=dataclasses.replace(parallel, split=split))
    workers = 1 if name == "alone" else WORKERS.get(name, 4)
    words = recipe, str(folder), resume and str(resume), loss, network
    results = ranks.shared(workers, fit, *words)
    assert len({(each.state_sha256, each.weights_sha256, each.test_loss) for each in results}) == 1
    result: firecaffe.Result = results[0]
    return result


def loud(logits: Tensor, labels: Tensor) -> Tensor:
    return 20 * F.cross_entropy(logits, labels)


def test_a_loss_scale_of_float16(ranks: Ranks, tmp_path: Path) -> None:
    """Gradients of one part overflow before those of the others."""
    train = {"autocast": "float16", "steps": 6}
    model, solver = {"freeze": ["features.*", "classifier.[03].*"]}, {"clip_gradients": 0.3}
    recipe = with_words(RECIPE, train=train, model=model, solver=solver)
    expected = trained(ranks, recipe, "alone", tmp_path / "alone", loss=loud)
    meta = json.loads((tmp_path / "alone/checkpoints/step-00000006/meta.json").read_text())
    assert meta["scaler"]["scale"] < 65_536 / 8
    found = trained(ranks, recipe, "trick 2 x 2", tmp_path / "run", loss=loud)
    assert found.state_sha256 == expected.state_sha256


CODECS = ("int8", "power_sgd")
"""By rows, and of all together; one_bit is in the matrix."""


@pytest.mark.parametrize("name", CODECS)
def test_encoded_gradients(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """From the first step, and from a checkpoint that the layout before has made."""
    exchange = {"compressor": name, "compressor_level": 1}
    often = {"every": 2, "keep_last": 0}
    recipe = with_words(RECIPE, exchange=exchange, train={"steps": 4}, checkpoint=often)
    expected = trained(ranks, recipe, "alone", tmp_path / "alone", network=Wide)
    resume = None
    for layout in ("trick 2", "2 x 2"):
        folder = tmp_path / layout
        found = trained(ranks, recipe, layout, folder, resume=resume, network=Wide)
        assert found.state_sha256 == expected.state_sha256, layout
        assert not found.identity_doubts
        resume = folder / "checkpoints/step-00000002"


@pytest.mark.parametrize(
    ("layout", "split"),
    [("trick 2 x 2", HEAD), ("2 x 2", ALL), ("2 x 2", PATHS), ("2 x 2", ROWS)],
    ids=["head", "layers", "paths", "rows"],
)
def test_norms_over_parts_and_statistics_estimated_again(
    ranks: Ranks, layout: str, split: dict[str, str], tmp_path: Path
) -> None:
    train = {"batch_norm_samples": 54, "steps": 3}
    recipe = with_words(RECIPE, solver=NORMS, train=train)
    expected = trained(ranks, recipe, "alone", tmp_path / "alone", split)
    found = trained(ranks, recipe, layout, tmp_path / "run", split)
    assert found.loss == expected.loss
    assert found.state_sha256 == expected.state_sha256
    assert found.test_loss == expected.test_loss != 0
    assert not found.identity_doubts
    estimated = stored_piece(load_newest(tmp_path / "run")[0], "batch_norm")
    wanted = {name for name, each in Net().named_buffers() if each.is_floating_point()}
    assert set(estimated) == wanted
    of_both = [firecaffe.load(tmp_path / name, Net).state_dict() for name in ("alone", "run")]
    for name, each in of_both[0].items():
        assert each.equal(of_both[1][name]), name
