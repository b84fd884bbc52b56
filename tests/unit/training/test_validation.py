"""Choosing sees the validation samples alone; the test samples are seen once, at the end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import firecaffe
from firecaffe import DataConfig, Recipe, RunConfig, TensorDataset, TrainConfig
from firecaffe.data.sources import open_image_folder
from firecaffe.errors import RecipeError
from firecaffe.runs.curves import curves_of, time_to
from firecaffe.runs.run_table import read_run
from tests.kit.data_photos import BLUE, GREEN, RED, draw


def images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 4, 4), generator=generator, dtype=torch.uint8)
    return TensorDataset(pixels, torch.arange(count) % 2, 2)


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))


def trained(
    folder: Path, eval_every: int, hold_out: float, **sets: TensorDataset
) -> tuple[firecaffe.Result, dict[str, list[dict[str, Any]]]]:
    """The result, and the rows of metrics.jsonl by kind."""
    recipe = Recipe(
        train=TrainConfig(8, 4, steps=5, eval_every=eval_every),
        data=DataConfig(hold_out=hold_out),
        run=RunConfig(folder=str(folder), tensorboard=False),
    )
    result = firecaffe.train(recipe, network, images(40, 0), images(30, 1), **sets)  # type: ignore[arg-type]
    rows: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["kind"], []).append(row)
    return result, rows


def test_evaluations_on_the_way_see_held_out_images_and_change_no_bit(tmp_path: Path) -> None:
    often, rows = trained(tmp_path / "often", 2, 0.25)
    never, at_end = trained(tmp_path / "never", 0, 0.25)
    assert [(row["step"], row["samples"]) for row in rows["validation"]] == [
        (2, 10),
        (4, 10),
        (5, 10),
    ]
    assert [(row["step"], row["samples"]) for row in rows["test"]] == [(5, 30)]
    assert [row["step"] for row in at_end["validation"]] == [5]
    assert often.weights_sha256 == never.weights_sha256
    assert often.state_sha256 == never.state_sha256
    assert often.validation is not None
    assert often.validation["top1"] == rows["validation"][-1]["top1"]
    run = read_run(tmp_path / "often")
    assert "30 training, 10 held-out and 30 test images" in run.result["data"]
    assert len(curves_of(run).metric) == 3  # a time to a target is read from these
    assert time_to(run, 1.1) is None


def test_one_s_own_validation_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, rows = trained(tmp_path / "own", 3, 0.0, validation_set=images(12, 2))
    assert [(row["step"], row["samples"]) for row in rows["validation"]] == [(3, 12), (5, 12)]
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"run folder: {tmp_path / 'own'}")
    held, _ = trained(tmp_path / "without", 0, 0.0)
    assert held.validation is None


def test_without_validation_images_there_is_nothing_to_choose_by(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.eval_every is 2.*data\.hold_out") as caught:
        trained(tmp_path / "none", 2, 0.0)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "none").exists()


def test_a_folder_s_own_validation_images(tmp_path: Path) -> None:
    for part, color in (("train", RED), ("test", GREEN), ("val", BLUE)):
        draw(tmp_path / part / "a" / "1.png", color, (8, 8))
    sets = open_image_folder(DataConfig("folder", str(tmp_path), resize=8))
    assert sets.validation is not None
    for dataset, color in ((sets.train, RED), (sets.test, GREEN), (sets.validation, BLUE)):
        assert tuple(dataset.batch(torch.tensor([0]))[0][0, :, 0, 0].tolist()) == color
