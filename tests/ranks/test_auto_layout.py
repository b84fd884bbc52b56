"""`parallel.scheme = "auto"` on real ranks: what it takes by the cluster, and no other bits. The
forecast of a run whose network is split, or in stages.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import firecaffe
from firecaffe import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    Result,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.cli import main
from firecaffe.cli.typed_recipe import read_recipe
from firecaffe.models import build_model
from firecaffe.models.squeezenet import Fire
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.checks import preflight
from tests.kit.worlds import NAMED, Named, Trained, Training, changed
from tests.ranks.test_auto import on_hosts_of
from tests.world import Ranks

RECIPE = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("generated"),
    train=TrainConfig(32, 8, steps=3, device="cpu", eval_batch_size=500),
    parallel=ParallelConfig(parts=4, scheme="auto"),
)


@dataclass(frozen=True)
class OnHosts(Named):
    """As if hosts had so many ranks."""

    of_host: int = 0

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
                patch.setenv(name, "0")
            on_hosts_of(self.of_host)
            return super().__call__(recipe, folder, resume)


def on(cluster: str, **sections: Any) -> Recipe:
    return changed(RECIPE, run={"cluster": cluster}, **sections)


def words_of(result: Result) -> ParallelConfig:
    """As the run's own recipe has them."""
    return read_recipe(result.folder / "recipe.toml").parallel


def choice_of(result: Result) -> Any:
    return read_run_file(result.folder, "result.json")["parallel_choice"]


class Given(Named):
    """The network of the recipe, by a function."""

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        recipe = changed(recipe, run={"folder": str(folder), "tensorboard": False})
        return firecaffe.train(recipe, partial(build_model, "lenet"))


def test_the_cluster_decides_and_no_bit_does(trained: Trained) -> None:
    """By data where links are fast; one model on all workers where bytes are what counts."""
    fast, slow = trained(4, on("cpu-host"), NAMED), trained(4, on("ethernet-1g"), Given())
    alone = trained(1, on("cpu-host"), NAMED)
    assert alone.state_sha256 == fast.state_sha256 == slow.state_sha256
    for result, model in ((alone, 1), (fast, 1), (slow, 4)):
        # The default of one weird trick, by name: the same bits whatever is chosen.
        words = words_of(result)
        assert (words.split, words.parts) == ({"ip1": "inputs", "ip2": "neurons"}, 4)
        assert (words.scheme in ("none", "one_weird_trick"), words.model) == (True, model)
    choice, chosen = choice_of(slow), choice_of(slow)["words"]
    way = f"{chosen['scheme']} {chosen['data']} x {chosen['model']}"
    assert chosen["model"] == read_run_file(slow.folder, "result.json")["parallel"]["model"] == 4
    assert min(choice["predicted_s"], key=choice["predicted_s"].get) == way
    assert f"{way} " in choice["reason"]
    assert " MB" in choice["reason"]
    # Whoever goes on from it may be other workers, which choose anew.
    preflight(check_recipe(RECIPE), 2, resume=fast.folder)


def blocks() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 7, stride=4), nn.ReLU(), Fire(4, 2, 4), nn.Flatten()),
        nn.Linear(8 * 36, 10),
    )


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("lenet", ParallelConfig(1, 2, {"ip1": "neurons", "ip2": "inputs"}, 4, "one_weird_trick")),
        ("lenet", ParallelConfig(stages=["ip1"])),
        (f"{__name__}:blocks", ParallelConfig(1, 2, {"2": "paths"}, 2)),
    ],
    ids=["trick", "stages", "paths"],
)
def test_a_run_of_a_layout_has_a_forecast_that_is_scored(
    trained: Trained, model: str, layout: ParallelConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(2, changed(RECIPE, model=ModelConfig(model), parallel=layout), NAMED).folder
    forecast = read_run_file(folder, "forecast.json")
    assert (forecast["parallel"]["stages"], forecast["workers"]) == (layout.stages, 2)
    assert 0 < forecast["step_low_s"] < forecast["step_s"] < forecast["step_high_s"]
    assert main(["explain", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "forecast for cpu-host: " in said
    assert ("waits for activations: forecast" in said) == (not layout.stages)
    assert ("a stage does not compute: forecast" in said) == bool(layout.stages)


def test_between_hosts_of_which_none_is_known_a_link_is_measured(trained: Trained) -> None:
    reason = choice_of(trained(2, RECIPE, OnHosts(of_host=1)))["reason"]
    assert "planned on cpu-host with a link of" in reason


class Own(nn.Module):
    """Nobody knows it by name."""


class Twice(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.out = nn.Linear(784, 784), nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.again(self.again(x.flatten(1))))
        return made


def test_rows_are_priced(trained: Trained) -> None:
    rows = changed(RECIPE, parallel={"split": {"conv1": "rows"}})
    alone, two = (trained(workers, rows, NAMED) for workers in (1, 2))
    assert two.state_sha256 == alone.state_sha256
    assert set(choice_of(two)["predicted_s"]) == {"by data 2 x 1", "none 1 x 2"}


def test_replicas_are_held_by_what_is_chosen(trained: Trained) -> None:
    """One weird trick, which no replica can have, is left out."""
    local = on("ethernet-1g", synchrony=SynchronyConfig("local", replicas=2, local_steps=2))
    named = ParallelConfig(1, 1, {"ip1": "inputs", "ip2": "neurons"}, 4)
    alone, four = trained(1, changed(local, parallel=named), NAMED), trained(4, local, NAMED)
    assert four.state_sha256 == alone.state_sha256
    assert set(choice_of(four)["predicted_s"]) == {"none 2 x 2", "none 1 x 4"}


def test_what_has_no_price_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    run = tmp_path / "run"
    twice = ModelConfig(f"{__name__}:Twice")
    recipe = changed(RECIPE, model=twice, parallel={"split": {"again": "neurons"}})
    for said in ranks.shared(2, NAMED.error, recipe, run):
        assert "parallel.split has again by neurons, which the planner cannot price" in said
    network = build_model("lenet")
    assert "no fully connected layer" in Training(Own).error(RECIPE, run)
    assert "returned the same network twice" in Training(lambda: network).error(RECIPE, run)
    assert not run.exists()
