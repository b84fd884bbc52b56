"""`parallel.scheme = "auto"` on real ranks: what it takes by the cluster, and no other bits."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor, nn

import firecaffe
from firecaffe import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    RunConfig,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.cli.typed_recipe import read_recipe
from firecaffe.errors import RecipeError
from firecaffe.models import build_model
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.training.checks import preflight
from tests.ranks.test_auto import on_hosts_of
from tests.world import Ranks

RECIPE = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("generated"),
    train=TrainConfig(32, 8, steps=3, device="cpu", eval_batch_size=500),
    parallel=ParallelConfig(parts=4, scheme="auto"),
)


def fit(recipe: Recipe) -> firecaffe.Result:
    return firecaffe.train(recipe)


def fit_on_hosts(recipe: Recipe, of_host: int) -> firecaffe.Result:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
            patch.setenv(name, "0")
        on_hosts_of(of_host)
        return firecaffe.train(recipe)


def test_the_cluster_decides_and_no_bit_does(ranks: Ranks, tmp_path: Path) -> None:
    """By data where links are fast; one model on all workers where bytes are what counts."""
    digests, found = {}, {}
    for workers, cluster in ((1, "cpu-host"), (4, "cpu-host"), (4, "ethernet-1g")):
        run = RunConfig(
            folder=str(tmp_path / f"{workers}-{cluster}"), tensorboard=False, cluster=cluster
        )
        results = ranks.shared(workers, fit, dataclasses.replace(RECIPE, run=run))
        digests[workers, cluster] = {each.state_sha256 for each in results}
        found[workers, cluster] = words = read_recipe(Path(run.folder) / "recipe.toml").parallel
        # The default of one weird trick, by name: the same bits whatever is chosen.
        assert words.split == {"ip1": "inputs", "ip2": "neurons"}
        assert words.parts == 4
    assert len(set.union(*digests.values())) == 1
    assert found[4, "cpu-host"].model == 1
    assert found[4, "ethernet-1g"].model == 4
    assert {each.scheme for each in found.values()} <= {"none", "one_weird_trick"}
    record = json.loads((tmp_path / "4-ethernet-1g" / "result.json").read_text())
    choice = record["parallel_choice"]
    assert choice["words"]["model"] == record["parallel"]["model"] == 4
    assert min(choice["predicted_s"], key=choice["predicted_s"].get) == _way(choice["words"])
    assert f"{_way(choice['words'])} " in choice["reason"]
    assert " MB" in choice["reason"]
    # Whoever goes on from it may be other workers, which choose anew.
    preflight(check_recipe(RECIPE), 2, resume=tmp_path / "4-ethernet-1g")


def fit_given(recipe: Recipe) -> firecaffe.Result:
    return firecaffe.train(recipe, partial(build_model, "lenet"))


def test_a_network_that_is_given_in_python(ranks: Ranks, tmp_path: Path) -> None:
    """It is priced as the one that is named."""
    found = {}
    for workers in (1, 4):
        folder = str(tmp_path / str(workers))
        run = RunConfig(folder=folder, tensorboard=False, cluster="ethernet-1g")
        results = ranks.shared(workers, fit_given, dataclasses.replace(RECIPE, run=run))
        found[workers] = {each.state_sha256 for each in results}
    assert found[1] == found[4]
    assert read_recipe(tmp_path / "4/recipe.toml").parallel.model == 4


def _way(words: dict[str, object]) -> str:
    return f"{words['scheme']} {words['data']} x {words['model']}"


def test_between_hosts_of_which_none_is_known_a_link_is_measured(
    ranks: Ranks, tmp_path: Path
) -> None:
    run = RunConfig(folder=str(tmp_path / "run"), tensorboard=False)
    [result, _] = ranks.shared(2, fit_on_hosts, dataclasses.replace(RECIPE, run=run), 1)
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "planned on cpu-host with a link of" in record["parallel_choice"]["reason"]
    assert result.steps == 3


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


def test_rows_are_priced(ranks: Ranks, tmp_path: Path) -> None:
    rows = dataclasses.replace(RECIPE.parallel, split={"conv1": "rows"})
    digests = set()
    for workers in (1, 2):
        run = RunConfig(folder=str(tmp_path / f"{workers}"), tensorboard=False)
        recipe = dataclasses.replace(RECIPE, parallel=rows, run=run)
        digests |= {each.state_sha256 for each in ranks.shared(workers, fit, recipe)}
    assert len(digests) == 1
    record = json.loads((tmp_path / "2" / "result.json").read_text())
    assert set(record["parallel_choice"]["predicted_s"]) == {"by data 2 x 1", "none 1 x 2"}


def test_replicas_are_held_by_what_is_chosen(ranks: Ranks, tmp_path: Path) -> None:
    """One weird trick, which no replica can have, is left out."""
    local = SynchronyConfig("local", replicas=2, local_steps=2)
    digests = set()
    for workers, scheme in ((1, "none"), (4, "auto")):
        run = RunConfig(folder=str(tmp_path / scheme), tensorboard=False, cluster="ethernet-1g")
        words = ParallelConfig(1, 1, {"ip1": "inputs", "ip2": "neurons"}, 4)
        parallel = words if scheme == "none" else RECIPE.parallel
        recipe = dataclasses.replace(RECIPE, parallel=parallel, synchrony=local, run=run)
        digests |= {each.state_sha256 for each in ranks.shared(workers, fit, recipe)}
    assert len(digests) == 1
    choice = json.loads((tmp_path / "auto" / "result.json").read_text())["parallel_choice"]
    assert set(choice["predicted_s"]) == {"none 2 x 2", "none 1 x 4"}


def test_what_has_no_price_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    run = RunConfig(folder=str(tmp_path / "run"), tensorboard=False)
    again = dataclasses.replace(RECIPE.parallel, split={"again": "neurons"})
    twice = ModelConfig("tests.ranks.test_auto_layout:Twice")
    recipe = dataclasses.replace(RECIPE, model=twice, parallel=again, run=run)
    for line in ranks.shared(2, refusal, recipe):
        assert line == "parallel.split has again by neurons, which the planner cannot price"
    with pytest.raises(RecipeError, match="no fully connected layer"):
        firecaffe.train(dataclasses.replace(RECIPE, run=run), Own)
    network = build_model("lenet")
    with pytest.raises(RecipeError, match="returned the same network twice"):
        firecaffe.train(dataclasses.replace(RECIPE, run=run), lambda: network)
    assert not (tmp_path / "run").exists()


def refusal(recipe: Recipe) -> str:
    try:
        firecaffe.train(recipe)
    except RecipeError as error:
        return str(error)
    return ""
