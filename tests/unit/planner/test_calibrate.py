"""Fits find what made the data; a cluster learns from finished runs: here those of a known cluster,
told to another one.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from firecaffe.errors import RunError
from firecaffe.planner.calibrate import fit, learn
from firecaffe.planner.cluster import Cluster, load_cluster
from firecaffe.planner.compute_time import correction
from firecaffe.planner.forecast import forecast
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.planner.workload import images_of
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe, to_toml


def test_a_fit_finds_what_made_the_data() -> None:
    rows = [(n, 1e-4 + n / 1e8) for n in (1e3, 1e4, 1e5, 1e6, 1e7)]
    found = fit(lambda v, n: v["a"] + n / v["b"], {"a": 1e-3, "b": 1e7}, rows)
    assert found.values == pytest.approx({"a": 1e-4, "b": 1e8}, rel=1e-3)
    assert found.held_out_error < 1e-3
    assert max(found.errors.values()) < 1e-3
    noisy = [(n, (1 + 0.1 * (-1) ** i) * n / 1e8) for i, n in enumerate((1e4, 1e5, 1e6, 1e7))]
    found = fit(lambda v, n: n / v["rate"], {"rate": 1e7}, noisy)
    assert found.values["rate"] == pytest.approx(1e8, rel=0.1)
    assert 0.02 < found.errors["rate"] < 0.2
    assert 0.05 < found.held_out_error < 0.2
    with pytest.raises(ValueError, match="1 measurements do not bear 2 parameters"):
        fit(lambda v, n: v["a"] + n * v["b"], {"a": 1.0, "b": 1.0}, [(1, 1.0)])
    with pytest.raises(ValueError, match="above 0"):
        fit(lambda v, n: v["a"], {"a": 1.0}, [(1, 0.0)])


STEPS = 12


def slow_cluster(rate: float, latency_s: float) -> Cluster:
    cluster = load_cluster("ethernet-1g")
    outer = replace(cluster.links[-1], bandwidth_bytes_per_s=rate, latency_s=latency_s)
    device = replace(cluster.device, jitter=0.0)
    return replace(cluster, device=device, links=(*cluster.links[:-1], outer))


def recipe_of(bucket_bytes: int = 0) -> Recipe:
    recipe = Recipe()
    if not bucket_bytes:
        return recipe
    return replace(recipe, exchange=replace(recipe.exchange, bucket_bytes=bucket_bytes))


def a_run(
    folder: Path, on: Cluster, ranks: int, exchange: str, noise: float = 0.0, bucket_bytes: int = 0
) -> Path:
    """What a run would have left behind, had its steps taken what this cluster gives."""
    recipe = recipe_of(bucket_bytes)
    row = forecast(workload_of(check_recipe(recipe)), on, ranks, exchange)
    (folder / "timings").mkdir(parents=True)
    (folder / "recipe.toml").write_text(to_toml(recipe))
    (folder / "forecast.json").write_text(json.dumps(row.as_dict()))
    lines = []
    for step in range(STEPS):
        line = {"step": step + 1, "data_s": row.data_s, "update_s": row.update_s}
        for word in ("step_s", "compute_s", "exposed_communication_s"):
            line[word] = getattr(row, word) * (1 + noise * (-1) ** step)
        lines.append(json.dumps(line) + "\n")
    for rank in range(ranks):
        (folder / "timings" / f"rank-{rank}.jsonl").write_text("".join(lines))
    return folder


def test_a_link_is_found_from_its_runs(tmp_path: Path) -> None:
    true = slow_cluster(25e6, 400e-6)
    cases = [(2, "tree"), (4, "ring"), (8, "halving_doubling"), (8, "parameter_server")]
    folders = [a_run(tmp_path / f"{p}-{name}", true, p, name) for p, name in cases]
    told, lines = learn(slow_cluster(110e6, 50e-6), folders)
    assert told.links[-1].bandwidth_bytes_per_s == pytest.approx(25e6, rel=0.02)
    assert told.links[-1].latency_s == pytest.approx(400e-6, rel=0.2)
    assert "from 4 runs; held out 0." in lines[-1]
    work = workload_of(check_recipe(Recipe()))
    for ranks, name in ((16 // 4, "tree"), (8, "ring")):  # of which no run was
        expected = forecast(work, true, ranks, name)
        assert forecast(work, told, ranks, name).step_s == pytest.approx(expected.step_s, rel=0.03)


def test_one_run_bears_a_bandwidth_alone_and_keeps_the_links_error(tmp_path: Path) -> None:
    start = slow_cluster(110e6, 50e-6)
    told, _ = learn(start, [a_run(tmp_path / "a", slow_cluster(25e6, 50e-6), 4, "tree")])
    assert told.links[-1].bandwidth_bytes_per_s == pytest.approx(25e6, rel=0.05)
    assert told.links[-1].latency_s == start.links[-1].latency_s
    assert told.links[-1].error == start.links[-1].error


def test_runs_that_add_in_memory_bear_the_rate_of_memory(tmp_path: Path) -> None:
    cluster = load_cluster("cpu-host")
    [link] = cluster.links

    def of_rate(rate: float) -> Cluster:
        return replace(cluster, links=(replace(link, memory_bytes_per_s=rate),))

    run = a_run(tmp_path / "a", of_rate(2e6), 2, "tree")
    told, _ = learn(of_rate(8e6), [run])
    assert told.links[0].memory_bytes_per_s == pytest.approx(2e6, rel=0.05)
    assert told.links[0].bandwidth_bytes_per_s == link.bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("told", "true", "exchange", "why"),
    [
        ((1e12, 1e-9), (1e12, 1e-9), "ring", "hidden"),
        ((120e6, 1400e-6), (120e6, 40e-6), "tree", "waited less"),
    ],
)
def test_what_is_hidden_or_waits_less_than_the_latency_says_nothing_of_the_link(
    tmp_path: Path, told: tuple[float, float], true: tuple[float, float], exchange: str, why: str
) -> None:
    """A check on a busy machine had found a latency of 1.4 ms; the fit made the rate endless."""
    start = slow_cluster(*told)
    learned, lines = learn(start, [a_run(tmp_path / "a", slow_cluster(*true), 2, exchange)])
    assert learned.links[-1] == start.links[-1]
    assert "stays as it was" in lines[-1]
    assert why in lines[-1]


def test_compute_is_replaced_and_runs_that_differ_widen_its_band(tmp_path: Path) -> None:
    true = load_cluster("cpu-host")
    twice = replace(true, device=replace(true.device, efficiency=true.device.efficiency / 2))
    told, _ = learn(true, [a_run(tmp_path / "a", twice, 1, "tree", noise=0.1)])
    (row,) = told.device.measured
    work = workload_of(check_recipe(Recipe()))
    expected, learned = (forecast(work, on, 1, "tree").compute_s for on in (twice, told))
    assert learned == pytest.approx(expected, rel=0.11)
    assert row.error == pytest.approx(0.1, rel=0.2)
    larger = replace(work, layout=images_of((1, 56, 56)))
    corrections = [correction(of, told.device, work.micro_batch_size) for of in (work, larger)]
    assert corrections == [pytest.approx(2.0, rel=0.15), 1.0]
    older = replace(true.device, measured=(replace(row, inputs=""),))
    told, _ = learn(replace(true, device=older), [tmp_path / "a"])
    assert told.device.measured == (row,)
    told, _ = learn(true, [tmp_path / "a", a_run(tmp_path / "b", true, 1, "tree")])
    assert told.device.measured[0].error > 0.2


def test_what_runs_computed_beside_their_exchange_is_not_slowed_down_again(tmp_path: Path) -> None:
    plain = slow_cluster(25e6, 50e-6)
    plain = replace(plain, device=replace(plain.device, exchange_slowdown=0.0))
    slowed = replace(plain, device=replace(plain.device, exchange_slowdown=0.5))
    run = a_run(tmp_path / "a", slowed, 4, "ring", bucket_bytes=100_000)
    work = workload_of(check_recipe(recipe_of(bucket_bytes=100_000)))
    expected_s = forecast(work, slowed, 4, "ring").compute_s
    assert expected_s > 1.05 * forecast(work, plain, 4, "ring").compute_s
    told, _ = learn(slowed, [run])
    assert forecast(work, told, 4, "ring").compute_s == pytest.approx(expected_s, rel=0.01)


def test_a_folder_that_teaches_nothing_is_named(tmp_path: Path) -> None:
    """As one of another mode."""
    cluster = load_cluster("cpu-host")
    folder = a_run(tmp_path / "a", cluster, 1, "tree")
    for missing in ("forecast.json", "timings"):
        (folder / missing).rename(folder / "gone")
        with pytest.raises(RunError, match=str(folder)):
            learn(cluster, [folder])
        (folder / "gone").rename(folder / missing)
    (folder / "forecast.json").write_text('{"mode": "stale"}')
    rank_0 = folder / "timings" / "rank-0.jsonl"  # with a server it has no times of computing
    rank_0.write_text(re.sub(r'"compute_s": [^,]+', '"compute_s": 0.0', rank_0.read_text()))
    with pytest.raises(RunError, match=r"is of synchrony\.mode stale"):
        learn(cluster, [folder])
