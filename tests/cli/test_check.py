"""`firecaffe check`, `bench step` and measured steps: the clusters that forecasts are made of."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from firecaffe.api import plan_measured
from firecaffe.api.cluster_file import write_cluster
from firecaffe.cli import main
from firecaffe.data.decode import cores
from firecaffe.planner.cluster import load_cluster
from tests.cli.test_plan import plan, planned
from tests.typed import firecaffe, torchrun

SMALL = """
[model]
name = "lenet"
[data]
name = "generated"
[train]
global_batch_size = 32
micro_batch_size = 4
steps = 30
[run]
tensorboard = false
"""


def test_a_checked_cluster_forecasts_and_measured_steps_replace_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device of the cluster is then made a thousand times too slow."""
    recipe, file, wrong, run = (tmp_path / name for name in ("r.toml", "c.toml", "w.toml", "run"))
    recipe.write_text(SMALL)
    two = ["--nproc-per-node", "2"]
    done = firecaffe("check", recipe, *two, "--write", file, "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "exchange tree" in done.stdout
    cluster = load_cluster(str(file))
    assert [row.micro_batch_size for row in cluster.device.measured] == [2, 4, 8]
    assert set(cluster.links[0].efficiency) >= {"tree", "native"}
    slower = re.search(r"beside an exchange, computing takes (\d+)% longer", done.stdout)
    assert round(100 * cluster.device.exchange_slowdown) == (int(slower[1]) if slower else 0)
    assert not list(tmp_path.glob(".firecaffe-check*"))

    device = load_cluster("cpu-host").device
    slow = replace(device, peak_flops={"float32": 8e7}, memory_bytes_per_s=8e6)
    write_cluster(wrong, replace(cluster, name="wrong", device=slow))
    done = firecaffe("train", recipe, *two, "--run.folder", run, "--run.cluster", wrong)
    assert done.returncode == 0, done.stderr
    assert "forecast: " in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "with compute measured" in line]
    assert "in steps 5 to 20: " in line
    first = json.loads((run / "forecast.json").read_text())
    assert (first["workers"], first["exchange"]) == (2, "tree")
    second = first["refined"]
    assert (second["workers"], second["made_from"]["micro_batches"]) == (2, 4)
    assert 0 < second["step_low_s"] < second["step_s"] < second["step_high_s"]
    assert main(["explain", str(run), "--json"]) == 0
    score = json.loads(capsys.readouterr().out)["score"]
    measured_s = score["step"]["measured_s"]
    assert score["step"]["forecast_s"] == second["step_s"]
    assert score["first_s"] == first["step_s"]
    assert abs(second["step_s"] - measured_s) < abs(first["step_s"] - measured_s)
    assert main(["explain", str(run)]) == 0
    said = capsys.readouterr().out
    assert "forecast for wrong" in said
    assert "exposed exchange" in said


def test_a_recipe_in_stages_is_timed_whole(tmp_path: Path) -> None:
    """Its workers need no micro-batches of their own."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SMALL.replace("= 32", "= 4") + '[parallel]\nstages = ["ip1"]\n')
    done = firecaffe("check", recipe, "--nproc-per-node", "2", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "timed was the whole network on each rank" in done.stdout


def test_a_step_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_measured, "LEAST_S", 0.0)
    monkeypatch.setattr(plan_measured, "cores", lambda: 2)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SMALL.replace('"generated"', f'"fashion-mnist"\npath = "{tmp_path}/none"'))
    code, out, err = plan(str(recipe), "--measure", "--workers", "1,4")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("measured here: lenet")]
    assert "each node has the 2 cores of this host" in line
    assert "from 4 workers on, those of a node share its 2 cores" in out
    (answer,) = planned(str(recipe), "--measure", "--workers", "1")
    [row] = answer["rows"]
    assert row["compute_s"] - row["low"]["compute_s"] >= 0.02 * row["compute_s"]  # the device: 60 %


def test_bench_step_writes_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    words = ["--model", "lenet", "--sizes", "1", "--seconds", "0.01", "--write", file]
    assert (done := firecaffe("bench", "step", *words)).returncode == 0, done.stderr
    written = load_cluster(str(file))
    assert (written.device.measured[0].model, written.cores_per_node) == ("lenet", cores())
    rate = "bandwidth_bytes_per_s ="
    file.write_text(file.read_text().replace(f"{rate} 4000000000.0", f"{rate} 0"))
    code, _, err = plan("--model", "lenet", "--cluster", str(file))
    assert (code, "bandwidth_bytes_per_s: expected float >= 1e-12, found 0" in err) == (2, True)


ATTACHED = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import firecaffe
dist.init_process_group('gloo')
model = DistributedDataParallel(torch.nn.Linear(300, 300))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
attached = firecaffe.adapt.attach(model, optimizer, sys.argv[1])
for _ in range(6):
    model(torch.randn(64, 300)).sum().backward()
    optimizer.step()
attached.detach()
model(torch.randn(1, 300)).sum().backward()
optimizer.step()
"""
# The group is not destroyed: torch 2.13 may then wait for its own thread, which wants the
# interpreter's lock to let go of the last Work.


def test_a_ddp_script_with_two_more_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").write_text(ATTACHED)
    torchrun(2, tmp_path / "script.py", tmp_path / "run").check_returncode()
    assert main(["explain", str(tmp_path / "run"), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [(each["rank"], each["steps"]) for each in ranks] == [(0, 6), (1, 6)]
    for each in ranks:
        # Medians of each: on a busy machine they need not add up to the step's.
        assert 0 < sum(each["parts_s"].values()) <= 1.5 * each["step_s"]
        assert min(each["parts_s"].values()) >= 0
