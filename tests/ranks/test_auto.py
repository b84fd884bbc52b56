"""`exchange.algorithm = "auto"` and `parallel.scheme = "auto"` on real ranks: what they take, say,
and no other bits. The forecast of a run whose network is split, or in stages.
"""

import dataclasses
import io
import os
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from firecaffe import (
    DataConfig,
    ExchangeConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    Result,
    SynchronyConfig,
    TrainConfig,
)
from firecaffe.api.recipe_argument import recipe_of
from firecaffe.cli import main
from firecaffe.cluster.world import World, join
from firecaffe.exchange.route import choose, find_route
from firecaffe.models import build_model
from firecaffe.models.squeezenet import Fire
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.runs.run_folder import read_run_file
from firecaffe.training.checks import preflight
from firecaffe.training.parallel import auto_layout
from firecaffe.transport.auto_exchange import AutoChoice, choose_exchange, rank_elsewhere
from firecaffe.transport.link import MeasuredLink
from firecaffe.transport.local_ranks import ranks_per_host
from tests.kit.worlds import NAMED, Named, Trained, Training, changed, end
from tests.world import Ranks

LINK = MeasuredLink(0, 1, (60e-6, 50e-6, 70e-6), (25e6, 20e6, 30e6))
SIZES = [4_000_000, 3_000_000]
RECIPE = Recipe(
    train=TrainConfig(global_batch_size=32, micro_batch_size=4, steps=3, eval_batch_size=7),
    exchange=ExchangeConfig(bucket_bytes=500, shared_memory=False, timeout_s=300),
)


def on_hosts_of(local_world_size: int) -> None:
    """This rank's environment as if a host had so many ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % local_world_size)
    os.environ["GROUP_RANK"] = str(int(os.environ["RANK"]) // local_world_size)


def chosen(
    homes: str,
    local_world_size: int,
    num_leaves: int,
    shared_memory: bool,
    codec: str = "",
    any_shares: bool = False,
) -> tuple[AutoChoice, list[tuple[int, int]]]:
    """What this rank is told, and the links that were measured. homes: a folder of the ranks'."""
    on_hosts_of(local_world_size)
    measured = []

    def measure_link(
        world: World, first: int, second: int, least_s: float, most_s: float
    ) -> MeasuredLink:
        measured.append((first, second))
        # Only rank 0's figures may count.
        return LINK if world.is_first else MeasuredLink(first, second, (1.0,), (1.0,))

    with pytest.MonkeyPatch.context() as patch, join("cpu") as world:
        patch.setattr("firecaffe.transport.auto_exchange.measure_link", measure_link)
        patch.setenv("HOME", str(Path(homes, str(world.rank))))
        tree = find_route(
            "tree",
            num_leaves,
            world.world_size,
            ranks_per_host(world),
            shared_memory=shared_memory,
            codec=codec,
            any_shares=any_shares,
        )
        return choose_exchange(world, SIZES, tree), measured


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((1, 1, 8, True), "one worker"),
        ((2, 2, 8, True), "shared memory"),
        ((3, 3, 8, False), "workers' shares are no branches of the tree"),
        ((2, 1, 8, False, "", True), "shares may become any"),
        ((2, 1, 8, False, "int8"), "compressor int8"),
    ],
)
def test_where_there_is_nothing_to_choose_nothing_is_measured(
    ranks: Ranks, tmp_path: Path, arguments: tuple[Any, ...], reason: str
) -> None:
    world_size, *others = arguments
    for choice, measured in ranks.shared(world_size, chosen, str(tmp_path), *others):
        assert choice == AutoChoice("tree", choice.reason)
        assert reason in choice.reason
        assert measured == []
    assert not list(tmp_path.iterdir())


def test_a_link_is_measured_once_a_day_and_rank_0_s_memory_counts(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Ranks that went by memories of their own would measure with nobody, or choose otherwise."""
    four = partial(ranks.shared, 4, chosen, str(tmp_path))
    choices, measured = zip(*four(2, 8, False), strict=True)
    expected = choose(4, SIZES, 50e-6, 25e6)
    [(first, choice)] = {repr(each): each for each in choices}.items()
    assert first.count("halving_doubling") >= 2
    assert measured == ([(0, 2)],) * 4
    assert choice.algorithm == expected.algorithm == "halving_doubling"
    assert (choice.latency_s, choice.bandwidth_bytes_per_s) == (50e-6, 25e6)
    assert choice.predicted_s == expected.by_algorithm
    # 7 MB at 25 MB/s are 0.28 s; halving-doubling takes 3/2 of them, a tree 4, a server 6.
    for part in ("α 50 µs, 25.0 MB/s", "0.42 s a step for 7 MB", "tree 1.12 s;", "server 1.68 s"):
        assert part in choice.reason
    kept = Path(".cache", "firecaffe", "links.json")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    text = (tmp_path / "0" / kept).read_text()
    for rank, other in ((1, text.replace("e-05", "e-01")), (2, "{")):
        (tmp_path / str(rank) / kept).parent.mkdir(parents=True)
        (tmp_path / str(rank) / kept).write_text(other)
    for again, measured_again in four(2, 8, False):
        assert measured_again == []
        assert "measured 0 min ago" in again.reason
        assert dataclasses.replace(again, reason=choice.reason) == choice
    (tmp_path / "0" / kept).unlink()
    assert [links for _, links in four(2, 8, False)] == [[(0, 2)]] * 4
    assert [links for _, links in four(1, 8, False)] == [[(0, 1)]] * 4  # ranks on other hosts


def test_where_hosts_add_in_shared_memory_one_rank_of_each_sends(
    ranks: Ranks, tmp_path: Path
) -> None:
    for choice, measured in ranks.shared(4, chosen, str(tmp_path), 2, 8, True):
        assert measured == [(0, 2)]
        assert choice.predicted_s == choose(4, SIZES, 50e-6, 25e6, senders=2).by_algorithm
        assert choice.algorithm == "recursive_doubling"  # one message there, one back, at once


def test_the_rank_elsewhere_is_the_first_on_another_host() -> None:
    assert rank_elsewhere(["a", "a", "b", "c"]) == 2
    assert rank_elsewhere(["a", "a"]) == 1


class AtHome(Training):
    """With a home of its own, where measured links are kept; and what was printed, beside it."""

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        out = io.StringIO()
        with redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", f"{folder}-home")
            result = super().__call__(recipe, folder, resume)
        if os.environ["RANK"] == "0":
            folder.with_suffix(".txt").write_text(out.getvalue())
        return result


def lines_of(result: Result) -> list[str]:
    lines = result.folder.with_suffix(".txt").read_text().splitlines()
    return [line.split("exchange: ")[1] for line in lines if "exchange: " in line]


def record_of(result: Result) -> Any:
    return read_run_file(result.folder, "result.json")


def test_a_training_with_a_link_really_measured(trained: Trained) -> None:
    alone, four = (trained(workers, RECIPE, AtHome()) for workers in (1, 4))
    assert end(four) == end(alone)
    record, choice = record_of(four), record_of(four)["exchange_choice"]
    assert record["exchange"] == record["route"] == choice["algorithm"]
    assert choice["predicted_s"][choice["algorithm"]] == min(choice["predicted_s"].values())
    assert choice["latency_s"] > 0
    assert choice["bandwidth_bytes_per_s"] > 0
    assert lines_of(four) == [choice["reason"]]
    assert lines_of(alone) == ["none, for one worker"]
    assert 'algorithm = "auto"' in (four.folder / "recipe.toml").read_text()


SERVED = SynchronyConfig("asynchronous")


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"exchange": {"shared_memory": True}}, "shared memory, nothing"),
        ({"synchrony": dataclasses.replace(SERVED, warm_steps=1)}, "measured"),
        ({"synchrony": SERVED}, None),
        ({"exchange": {"algorithm": "sharded_parameter_server"}}, None),
    ],
    ids=["one host", "warm steps of a server", "a server alone", "named"],
)
def test_what_is_recorded_of_a_choice(
    trained: Trained, sections: dict[str, Any], reason: str | None
) -> None:
    record = record_of(trained(2, changed(RECIPE, **sections), AtHome()))
    choice = record["exchange_choice"]
    assert (choice is None) == (reason is None)
    if choice is not None:
        assert reason in choice["reason"]
    if reason == "shared memory, nothing":
        assert (record["exchange"], record["route"]) == ("tree", "shared memory")


LENET = Recipe(
    model=ModelConfig("lenet"),
    data=DataConfig("generated"),
    train=TrainConfig(32, 8, steps=3, device="cpu", eval_batch_size=500),
    parallel=ParallelConfig(parts=4, scheme="auto"),
)


@dataclass(frozen=True)
class OnHosts(Named):
    of_host: int = 0

    def __call__(self, recipe: Recipe, folder: Path, resume: Path | None = None) -> Result:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
                patch.setenv(name, "0")
            on_hosts_of(self.of_host)
            if os.environ["RANK"] != "0":  # another host may have a GPU that no cluster has
                patch.setattr(auto_layout, "cluster_for", lambda *_: None)
            return super().__call__(recipe, folder, resume)


def on(cluster: str, **sections: Any) -> Recipe:
    return changed(LENET, run={"cluster": cluster}, **sections)


def words_of(result: Result) -> ParallelConfig:
    return recipe_of(result.folder / "recipe.toml").parallel


def choice_of(result: Result) -> Any:
    return record_of(result)["parallel_choice"]


class Given(Named):
    def parts(self) -> dict[str, Any]:
        return {"model": partial(build_model, "lenet")}


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
    assert chosen["model"] == record_of(slow)["parallel"]["model"] == 4
    assert min(choice["predicted_s"], key=choice["predicted_s"].get) == way
    assert f"{way} " in choice["reason"]
    assert " MB" in choice["reason"]
    # Whoever goes on from it may be other workers, which choose anew.
    preflight(check_recipe(LENET), 2, resume=fast.folder)


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
    folder = trained(2, changed(LENET, model=ModelConfig(model), parallel=layout), NAMED).folder
    forecast = read_run_file(folder, "forecast.json")
    assert (forecast["parallel"]["stages"], forecast["workers"]) == (layout.stages, 2)
    assert 0 < forecast["step_low_s"] < forecast["step_s"] < forecast["step_high_s"]
    assert main(["explain", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "forecast for cpu-host: " in said
    assert ("waits for activations: forecast" in said) == (not layout.stages)
    assert ("a stage does not compute: forecast" in said) == bool(layout.stages)


def test_between_hosts_of_which_none_is_known_a_link_is_measured(trained: Trained) -> None:
    reason = choice_of(trained(2, LENET, OnHosts(of_host=1)))["reason"]
    assert "planned on cpu-host with a link of" in reason


class Own(nn.Module):
    """Nobody knows it by name."""


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.out = nn.Linear(784, 784), nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.again(self.again(x.flatten(1))))
        return made


def test_rows_are_priced(trained: Trained) -> None:
    rows = changed(LENET, parallel={"split": {"conv1": "rows"}})
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
    recipe = changed(LENET, model=twice, parallel={"split": {"again": "neurons"}})
    for said in ranks.shared(2, NAMED.error, recipe, run):
        assert "parallel.split has again by neurons, which the planner cannot price" in said
    network = build_model("lenet")
    assert "no fully connected layer" in Training(Own).error(LENET, run)
    assert "returned the same network twice" in Training(lambda: network).error(LENET, run)
    assert not run.exists()
