"""What other sections have beside split layers: any layout comes to the bits of one worker.

Other words, codecs and norms beside fully connected layers are in the matrix (`test_matrix.py`).
"""

import dataclasses
import json
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import firecaffe
from firecaffe import CheckpointConfig, ParallelConfig
from firecaffe.training.checkpoint import load_newest
from firecaffe.training.state import stored_piece
from tests.kit.worlds import Trained, Training, changed, checkpoint_of, end
from tests.ranks.test_layouts import HEAD, LAYOUTS, NET, PATHS, RECIPE, ROWS, Net

ALONE = ParallelConfig(split=HEAD, parts=4)
RATES = {"base_lr": 0.1, "lr_mult": {"*.bias": 2.0, "features.6.branch4.*": 0.5}}
NORMS: dict[str, Any] = {"type": "lamb", "clip_gradients": 0.5, **RATES}


class Wide(Net):
    """With fully connected layers whose parts power_sgd makes smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Sequential(
            *(nn.Linear(63, 240), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(240, 90), nn.ReLU(inplace=True), nn.Linear(90, 4)),
        )


def loud(logits: Tensor, labels: Tensor) -> Tensor:
    return 20 * F.cross_entropy(logits, labels)


def test_a_loss_scale_of_float16(trained: Trained) -> None:
    """Gradients of one part overflow before those of the others."""
    recipe = changed(
        RECIPE,
        train={"autocast": "float16", "steps": 6},
        model={"freeze": ["features.*", "classifier.[03].*"]},
        solver={"clip_gradients": 0.3},
    )
    training = Training(Net, 68, 0, loud)
    alone = trained(1, changed(recipe, parallel=ALONE), training)
    meta = json.loads((checkpoint_of(alone, 6) / "meta.json").read_text())
    assert meta["scaler"]["scale"] < 65_536 / 8
    assert end(trained(4, changed(recipe, parallel=LAYOUTS["trick 2 x 2"]), training)) == end(alone)


@pytest.mark.parametrize("codec", ["int8", "power_sgd"])
def test_encoded_gradients(trained: Trained, codec: str) -> None:
    """By rows, and of all together; from the first step, and from a checkpoint that the layout
    before has made.
    """
    recipe = changed(
        RECIPE,
        exchange={"compressor": codec, "compressor_level": 1},
        checkpoint=CheckpointConfig(2, keep_last=0),
    )
    training = Training(Wide, 68)
    alone = trained(1, changed(recipe, parallel=ALONE), training)
    trick = trained(2, changed(recipe, parallel=LAYOUTS["trick 2"]), training)
    rows = changed(recipe, parallel=LAYOUTS["2 x 2"])
    assert end(trick) == end(trained(4, rows, training, checkpoint_of(trick, 2))) == end(alone)


@pytest.mark.parametrize("split", [PATHS, ROWS], ids=["paths", "rows"])
def test_norms_over_parts_and_statistics_estimated_again(
    trained: Trained, split: dict[str, str]
) -> None:
    recipe = changed(RECIPE, solver=NORMS, train={"batch_norm_samples": 54, "steps": 3})
    layouts = [dataclasses.replace(each, split=split) for each in (ALONE, LAYOUTS["2 x 2"])]
    alone, found = (
        trained(workers, changed(recipe, parallel=each), NET)
        for workers, each in zip((1, 4), layouts, strict=True)
    )
    assert end(found) == end(alone)
    assert found.test_loss != 0
    estimated = stored_piece(load_newest(found.folder)[0], "batch_norm")
    assert set(estimated) == {
        name for name, each in Net().named_buffers() if each.is_floating_point()
    }
    expected, state = (firecaffe.load(each.folder, Net).state_dict() for each in (alone, found))
    assert all(each.equal(state[name]) for name, each in expected.items())
