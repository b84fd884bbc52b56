"""`exchange.algorithm = "auto"` on real ranks: what it takes, what it says, and no other bits."""

import dataclasses
import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from firecaffe import ExchangeConfig, Recipe, Result, SynchronyConfig, TrainConfig
from firecaffe.cluster.world import World, join
from firecaffe.exchange.choose import choose
from firecaffe.exchange.route import find_route
from firecaffe.runs.run_folder import read_run_file
from firecaffe.transport.auto_exchange import AutoChoice, choose_exchange, rank_elsewhere
from firecaffe.transport.link import MeasuredLink
from firecaffe.transport.local_ranks import ranks_per_host
from tests.kit.worlds import Trained, Training, changed, end
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
        found = choose_exchange(world, SIZES, tree)
    return found, measured


NOTHING_TO_CHOOSE = {
    "one worker": ((1, 1, 8, True), "tree (auto: one worker, nothing to send)"),
    "one host": ((2, 2, 8, True), "tree (auto: shared memory, nothing goes between hosts)"),
    "unequal shares": (
        (3, 3, 8, False),
        "tree (auto: fold sums in its place, since workers' shares are no branches of the tree)",
    ),
    "shares that change": (
        (2, 1, 8, False, "", True),
        "tree (auto: fold sums in its place, since shares may become any)",
    ),
    "compressor": ((2, 1, 8, False, "int8"), "tree (auto: compressor int8 takes the gradients)"),
}


@pytest.mark.parametrize(("arguments", "reason"), NOTHING_TO_CHOOSE.values(), ids=NOTHING_TO_CHOOSE)
def test_where_there_is_nothing_to_choose_nothing_is_measured(
    ranks: Ranks, tmp_path: Path, arguments: tuple[Any, ...], reason: str
) -> None:
    world_size, *others = arguments
    for found, measured in ranks.shared(world_size, chosen, str(tmp_path), *others):
        assert found == AutoChoice("tree", reason)
        assert measured == []
    assert not list(tmp_path.iterdir())


def test_all_ranks_take_what_rank_0_says_and_why(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks.shared(4, chosen, str(tmp_path), 2, 8, False)
    [found] = {repr(found): found for found, _ in by_rank}.values()
    assert [measured for _, measured in by_rank] == [[(0, 2)]] * 4
    expected = choose(4, SIZES, 50e-6, 25e6)
    assert found.algorithm == expected.algorithm == "halving_doubling"
    assert (found.latency_s, found.bandwidth_bytes_per_s) == (50e-6, 25e6)
    assert found.predicted_s == expected.by_algorithm
    # 7 MB at 25 MB/s are 0.28 s; halving-doubling takes 3/2 of them, a tree 4, a server 6.
    assert found.reason.startswith(
        "halving_doubling (α 50 µs, 25.0 MB/s measured: 0.42 s a step for 7 MB; "
    )
    assert found.reason.endswith("tree 1.12 s; parameter_server 1.68 s)")


def test_a_link_is_measured_once_a_day_and_rank_0_s_memory_counts(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Ranks that went by memories of their own would measure with nobody, or choose otherwise."""
    before = ranks.shared(4, chosen, str(tmp_path), 2, 8, False)
    kept = Path(".cache", "firecaffe", "links.json")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    text = (tmp_path / "0" / kept).read_text()
    for rank, other in ((1, text.replace("e-05", "e-01")), (2, "{")):
        (tmp_path / str(rank) / kept).parent.mkdir(parents=True)
        (tmp_path / str(rank) / kept).write_text(other)
    for (found, measured), (first, _) in zip(
        ranks.shared(4, chosen, str(tmp_path), 2, 8, False), before, strict=True
    ):
        assert measured == []
        assert "25.0 MB/s measured 0 min ago: 0.42 s a step" in found.reason
        assert dataclasses.replace(found, reason=first.reason) == first
    (tmp_path / "0" / kept).unlink()
    for _, measured in ranks.shared(4, chosen, str(tmp_path), 2, 8, False):
        assert measured == [(0, 2)]
    for _, measured in ranks.shared(4, chosen, str(tmp_path), 1, 8, False):
        assert measured == [(0, 1)]  # the ranks are on other hosts


def test_where_hosts_add_in_shared_memory_one_rank_of_each_sends(
    ranks: Ranks, tmp_path: Path
) -> None:
    for found, measured in ranks.shared(4, chosen, str(tmp_path), 2, 8, True):
        assert measured == [(0, 2)]
        assert found.predicted_s == choose(4, SIZES, 50e-6, 25e6, senders=2).by_algorithm
        assert found.algorithm == "recursive_doubling"  # one message there, one back, at once


@pytest.mark.parametrize(
    ("world_size", "local_world_size", "shared_memory", "senders"),
    [(8, 2, True, 4), (8, 8, True, 1), (8, 1, True, 8), (8, 2, False, 8), (6, 3, True, 6)],
)
def test_senders(world_size: int, local_world_size: int, shared_memory: bool, senders: int) -> None:
    route = find_route(
        "tree", 2 * world_size, world_size, local_world_size, shared_memory=shared_memory
    )
    assert (route.senders, route.shares_memory) == (senders, senders < world_size)


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
    """What was said of exchanges."""
    lines = result.folder.with_suffix(".txt").read_text().splitlines()
    return [line.split("exchange: ")[1] for line in lines if "exchange: " in line]


def record_of(result: Result) -> Any:
    return read_run_file(result.folder, "result.json")


def test_a_training_with_a_link_really_measured(trained: Trained) -> None:
    alone, found = (trained(workers, RECIPE, AtHome()) for workers in (1, 4))
    assert end(found) == end(alone)
    record, choice = record_of(found), record_of(found)["exchange_choice"]
    assert record["exchange"] == record["route"] == choice["algorithm"]
    assert choice["predicted_s"][choice["algorithm"]] == min(choice["predicted_s"].values())
    assert choice["latency_s"] > 0
    assert choice["bandwidth_bytes_per_s"] > 0
    assert lines_of(found) == [choice["reason"]]
    assert lines_of(alone) == ["none, for one worker"]
    assert 'algorithm = "auto"' in (found.folder / "recipe.toml").read_text()
    reason = record_of(alone)["exchange_choice"]["reason"]
    assert reason == "tree (auto: one worker, nothing to send)"


def test_a_training_where_there_is_nothing_to_choose(trained: Trained) -> None:
    record = record_of(trained(2, changed(RECIPE, exchange={"shared_memory": True})))
    assert (record["exchange"], record["route"]) == ("tree", "shared memory")
    assert "shared memory, nothing" in record["exchange_choice"]["reason"]


@pytest.mark.parametrize("warm_steps", [0, 1])
def test_with_a_server_the_exchange_of_warm_steps_alone_is_chosen(
    trained: Trained, warm_steps: int
) -> None:
    words = SynchronyConfig(mode="asynchronous", warm_steps=warm_steps)
    record = record_of(trained(2, changed(RECIPE, synchrony=words), AtHome()))
    assert (record["exchange_choice"] is not None) == bool(warm_steps)


def test_an_exchange_that_is_named_is_not_chosen(trained: Trained) -> None:
    named = changed(RECIPE, exchange={"algorithm": "sharded_parameter_server"})
    assert record_of(trained(2, named))["exchange_choice"] is None
