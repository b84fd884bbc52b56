"""`firecaffe plan` and `firecaffe check`, typed as a user types them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firecaffe import plan as firecaffe_plan
from firecaffe.api.answer import write_cluster
from firecaffe.data.decode import cores
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.split_plans import WAYS
from tests.typed import firecaffe, in_process, said_by, torchrun

RECIPE = Path(__file__).parents[2] / "recipes" / "nin_small.toml"

ALEXNET = ["--model", "alexnet"]

BATCH_OF_32 = ["--global-batch-size", "256", "--micro-batch-size", "8"]
"""32 micro-batches."""


def plan(*words: str) -> tuple[int, str, str]:
    done = in_process("plan", *words)
    return done.returncode, done.stdout, done.stderr


def planned(*words: str) -> list[dict[str, Any]]:
    code, out, err = plan(*words, "--json")
    assert code == 0, err
    value: list[dict[str, Any]] = json.loads(out)
    return value


def test_a_recipe_on_a_shipped_cluster() -> None:
    (found,) = planned(str(RECIPE), "--cluster", "cpu-host", "--workers", "1,2,4")
    rows = found["rows"]
    assert {row["workers"] for row in rows} == {1, 2, 4}
    assert all(row["step_low_s"] < row["step_s"] < row["step_high_s"] for row in rows)
    assert found["advice"].startswith("Use ")
    shown = said_by("plan", RECIPE, "--workers", "1,2")
    assert "samples/s" in shown
    assert "To change first" in shown or "No single change" in shown


def test_more_workers_than_were_measured_are_noted_and_one_host_has_no_more(tmp_path: Path) -> None:
    two = replace(load_cluster("ethernet-1g"), name="two", measured_devices=2)
    write_cluster(tmp_path / "two.toml", two)
    words = [str(RECIPE), "--cluster", str(tmp_path / "two.toml"), "--exchanges", "ring"]
    for workers, is_noted in (("1,2", False), ("2,4", True)):
        (found,) = planned(*words, "--workers", workers)
        assert ("two was measured on 2 workers" in found["assumption"]) == is_noted
    write_cluster(tmp_path / "two.toml", replace(two, devices_per_node=2, most_devices=2))
    code, _, err = plan(*words, "--workers", "4")
    assert (code, "two has 2 devices; a check on several hosts" in err) == (2, True)


def test_the_exchange_that_the_training_will_use_has_a_row_in_every_table(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    for exchange in ("parameter_server", "hierarchical(tree,ring)"):
        recipe.write_text(f'{RECIPE.read_text()}[exchange]\nalgorithm = "{exchange}"\n')
        code, out, _ = plan(str(recipe), "--cluster", "ethernet-1g", "--workers", "2,4,8")
        rows = [line.split()[:3] for line in out.splitlines() if "(own)" in line]
        assert (code, rows) == (0, [[n, exchange, "(own)"] for n in ("2", "4", "8")])


def test_own_epochs_give_hours_and_the_largest_useful_batch() -> None:
    """nin_small has batches of 64. The points lie on 10 (1 + B / 128)."""
    words = [str(RECIPE), "--workers", "1,2", "--epochs"]
    (answer,) = planned(*words, "32=12.5,256=30")
    for row in answer["rows"]:
        assert row["epochs_to_accuracy"]["epochs"] == pytest.approx(15)
        assert row["hours_to_accuracy"] > 0
    for given in ("32=12.5,256=30", "32=12.5 --noise-scale 64"):
        assert "Largest useful batch: about 128" in plan(*words, *given.split())[1]
    _, out, _ = plan(*words, "512=12,1024=13")
    assert "at least" in next(line for line in out.splitlines() if line.startswith("To your"))
    pairs = firecaffe_plan(RECIPE, workers="1,2", epochs={32: 12.5, 256: 30})
    assert pairs.to_dict() == [answer | {"workload": str(RECIPE)}]


def test_compare_and_several_clusters() -> None:
    clusters = ["--cluster", "ethernet-1g,infiniband-ndr", "--workers", "8"]
    found = planned("--compare", str(RECIPE), str(RECIPE), *clusters)
    assert [each["cluster"] for each in found] == ["ethernet-1g", "infiniband-ndr"]
    found = planned("--model", "googlenet", "--compressors", "all", *clusters)
    assert {row["compressor"] for row in found[0]["rows"]} >= {"none", "int8", "power_sgd"}


@pytest.mark.parametrize(
    ("words", "batch", "most"),
    [
        (["--workers", "1024"], 262_144, 1024),  # micro-batches of 256, the most that is taken
        ([], 8192, 32),
        (["--micro-batch-size", "7", "--workers", "8"], 448, 8),
        (["--micro-batch-size", "500"], 500, 1),
    ],
)
def test_a_network_alone_has_a_batch_that_all_workers_can_share(
    words: list[str], batch: int, most: int
) -> None:
    """1,024 workers were refused for a batch that nobody had given."""
    (found,) = planned(
        "--model", "lenet", "--cluster", "ethernet-10g", "--exchanges", "ring", *words
    )
    assert found["global_batch_size"] == batch
    assert str(batch) in found["assumption"]
    assert max(row["workers"] for row in found["rows"]) == most


def test_a_plan_takes_the_recipe_s_compressor_or_those_asked_for() -> None:
    words = [str(RECIPE), "--workers", "2", "--exchange.compressor", "int8"]
    for more, compressors in (
        ([], {"none", "int8"}),
        (["--compressors", "none"], {"none"}),
        (["--compressors", "one_bit", "--exchange.compressor", "threshold"], {"one_bit"}),
    ):
        (found,) = planned(*words, *more)
        assert {row["compressor"] for row in found["rows"]} == compressors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "googlenet", "--cluster", "atlantis"], "no cluster 'atlantis'"),
        (["--model", "nonet"], "no network is called 'nonet'"),
        (["--model", "googlenet", "--workers", "0"], "--workers is 0"),
        (["--model", "googlenet", "--workers", "many"], "--workers is 'many'"),
        (
            ["--model", "googlenet", "--workers", "64", *BATCH_OF_32],
            "only 32 micro-batches",
        ),
        ([str(RECIPE), "--workers", "64"], "only 8 micro-batches"),
        (["--compare", "a.toml", "b.toml", "--global-batch-size", "8"], "train.global_batch_size"),
        ([str(RECIPE), "--global-batch-size", "8"], "--train.global_batch_size"),
        ([str(RECIPE), "--exchange.compressor", "threshold"], "exchange.compressor is 'threshold'"),
        (["--train.steps", "3", "--model", "lenet"], "--train.steps is a setting of a recipe"),
        (["--model", "googlenet", "--exchanges", "smoke"], "--exchanges: no exchange 'smoke'"),
        (
            [
                *("--model", "lenet", "--cluster", "dgx-a100", "--workers", "12"),
                *("--exchanges", "hierarchical(tree,ring)"),
            ],
            "--workers: 12 ranks do not fill nodes of 8",
        ),
        (["--model", "googlenet", "--compressors", "zip"], "no 'zip'"),
        (["--model", "googlenet", "--micro-batch-size", "0"], "at least 1"),
        (
            ["--model", "googlenet", "--micro-batch-size", "7", "--global-batch-size", "256"],
            "must be a multiple",
        ),
        (
            [
                "--model",
                "vgg19",
                "--cluster",
                "titan",
                "--global-batch-size",
                "512",
                "--micro-batch-size",
                "128",
            ],
            "has 6 GB; use smaller micro-batches",
        ),
        ([str(RECIPE), "--model", "lenet"], "--model has no effect beside a recipe"),
        ([str(RECIPE), "--args", "{a=1}"], "--args has no effect beside a recipe"),
        ([str(RECIPE), "--workers", ""], "--workers is empty"),
        ([str(RECIPE), "--ways="], "--ways is empty"),
        ([str(RECIPE), "--precision", ""], "--precision is empty"),
        ([str(RECIPE), "--cluster", str(RECIPE)], "a recipe; expected a file that describes a clu"),
        ([], "give a recipe, --model or --compare"),
        (["none.toml"], "No such file"),
        ([str(RECIPE), "--cluster", "none.toml"], "No such file"),
        ([str(RECIPE), "--plot", "plan.html"], "must end in .png"),
        ([*ALEXNET, "--device", "a1000"], "--device is 'a1000'; there are a10, a100, a100-40-pcie"),
        ([*ALEXNET, "--device", "a100", "--links", "fast"], "--links is 'fast'; it must be rates"),
        ([*ALEXNET, "--links", "10"], "--links has no effect beside a cluster"),
        ([*ALEXNET, "--device", "a100", "--all"], "--all has no effect beside --device"),
        ([str(RECIPE), "--device", "a100", "--measure"], "--measure has no effect beside --device"),
        (
            ["--compare", str(RECIPE), str(RECIPE), "--html", "plan.html"],
            "--compare has no effect beside --html",
        ),
        ([str(RECIPE), "--epochs", "64=10"], "--epochs: 1 batch with known epochs"),
        ([str(RECIPE), "--epochs", "64:10,128:11"], "must be batches and their epochs"),
        ([str(RECIPE), "--noise-scale", "64"], "--noise-scale goes with --epochs"),
        ([str(RECIPE), "--ways", "columns"], "--ways: no 'columns'; there are all, data,"),
        (
            [str(RECIPE), "--workers", "1", "--ways", "all"],
            "--ways plans for 2 to 512 workers; found 1",
        ),
    ],
)
def test_impossible_input_gets_one_line(words: list[str], said: str) -> None:
    code, _, err = plan(*words)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("firecaffe: ")
    assert said in line


def test_exchanges_of_a_plan_may_be_named() -> None:
    """The backend's own is among them, and a comma within parentheses parts nothing."""
    names = ["native", "hierarchical(tree,ring)"]
    words = ["--model", "lenet", "--cluster", "dgx-a100", "--workers", "16"]
    (lenet,) = planned(*words, "--exchanges", ",".join(names))
    assert {row["exchange"] for row in lenet["rows"]} == {*names}


def test_modes_are_planned_where_they_are_asked_for_and_where_a_recipe_has_one(
    tmp_path: Path,
) -> None:
    (found,) = planned(str(RECIPE), "--workers", "1,4", "--modes")
    words = [each["words"] for each in found["modes"]]
    assert words[0] == "every_step"
    assert {each["workers"] for each in found["modes"]} == {4}
    served = tmp_path / "served.toml"
    served.write_text('[synchrony]\nmode = "stale"\nclock = "simulated"\n')
    plain, late = planned("--compare", str(RECIPE), str(served), "--workers", "2")
    assert plain["modes"] is None
    assert "stale, s = 4" in [each["words"] for each in late["modes"]]
    assert "those of synchrony.mode every_step" in late["assumption"]
    assert not any("every_step" in each["assumption"] for each in (found, plain))
    shown = said_by("plan", served, "--workers", "1")
    assert "stale, s = 4" in shown
    assert "mode, on 1 worker " in shown


def test_ways_to_share_the_network() -> None:
    words = ["--model", "alexnet", "--cluster", "ethernet-10g", "--workers", "1,4"]
    words += ["--exchanges", "ring", "--micro-batch-size", "8"]
    (found,) = planned(*words, "--ways", "all")
    plans = {each["name"]: each for each in found["parallel"]["plans"]}
    assert [*plans] == [*WAYS]
    assert plans["data"]["step_s"] == pytest.approx(found["rows"][-1]["step_s"])
    assert plans["one_weird_trick"]["layouts"]["classifier.0"] in ("neurons 4", "inputs 4")
    assert plans["layers"]["step_s"] == min(each["step_s"] for each in plans.values())
    assert plans["pipeline"]["cuts"][0] == "features.0"
    layers = {each["name"]: each for each in found["parallel"]["layers"]}
    assert layers["classifier.0"]["weights_bytes"] == 4 * 37_752_832
    assert layers["classifier.0"]["data_bytes"] == 4 * 256 * (9216 + 4096)
    assert layers["features.0"]["sent_bytes"] == layers["features.0"]["by_data_bytes"]
    assert planned(*words)[0]["parallel"] is None
    code, out, _ = plan(*words, "--ways", "data,pipeline")
    assert code == 0
    assert "pipeline, 4 stages, 9% idle" in out
    assert "one_weird_trick" not in out


def test_a_way_is_planned_where_by_data_nothing_fits() -> None:
    words = ["--model", "vgg19", "--cluster", "titan", "--workers", "4", "--exchanges", "ring"]
    words += ["--global-batch-size", "512", "--micro-batch-size", "8"]
    (found,) = planned(*words, "--ways", "all")
    fits = {each["name"]: each["fits"] for each in found["parallel"]["plans"]}
    assert not fits["data"]
    assert fits["one_weird_trick"]
    widest = {each["name"]: each["widest"] for each in found["parallel"]["plans"]}
    assert {name for name, by in widest.items() if by >= 1} == {n for n, fit in fits.items() if fit}


def test_a_link_without_bandwidth_is_refused(tmp_path: Path) -> None:
    words = ["bench", "step", "--model", "lenet", "--sizes", "1", "--seconds", "0.01", "--write"]
    said_by(*words, tmp_path / "c.toml")
    text, written = (tmp_path / "c.toml").read_text(), load_cluster(str(tmp_path / "c.toml"))
    assert (written.device.measured[0].model, written.cores_per_node) == ("lenet", cores())
    spoiled = tmp_path / "spoiled.toml"
    spoiled.write_text(
        text.replace("bandwidth_bytes_per_s = 4000000000.0", "bandwidth_bytes_per_s = 0")
    )
    code, _, err = plan("--model", "lenet", "--cluster", str(spoiled))
    assert code == 2
    assert "bandwidth_bytes_per_s: expected float >= 1e-12, found 0" in err


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, err = plan(str(RECIPE), "--workers", "1,2,4", "--plot", str(tmp_path / "plan.png"))
    assert code == 0, err
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.png"]


def test_a_buyer_is_told_the_slowest_link_that_none_surely_beats() -> None:
    (found,) = planned(*ALEXNET, "--device", "a100", "--workers", "1,8", *BATCH_OF_32)
    rates = [
        max(row["images_per_s"] for row in of["rows"] if row["workers"] == 8)
        for of in found["plans"]
    ]
    assert rates == sorted(rates)
    assert found["plans"][0]["cluster"] == "1 Gbit/s"
    assert found["link"] == "100 Gbit/s Ethernet"  # 244 MB of gradients and little computing
    assert found["sentences"][0].startswith("Buy the 100 Gbit/s Ethernet: on 8 workers")
    code, out, _ = plan(*ALEXNET, "--device", "a100", "--links", "10", *BATCH_OF_32)
    assert (code, "Buy" in out) == (0, False)


def test_a_buyer_is_told_of_known_rates() -> None:
    """TensorFlow's page of 2017 has 91.8 images/s of one P100, outside the band of the forecast."""
    words = ["--model", "resnet152", "--micro-batch-size", "16", "--workers", "1"]
    (found,) = planned(*words, "--device", "p100", "--links", "10")
    (line,) = (line for line in found["assumptions"] if "tensorflow-2017" in line)
    assert line.startswith("tensorflow-2017 has 91.8 images/s of resnet152 on one NVIDIA P100")


def test_check_writes_the_cluster_that_plan_and_train_read(tmp_path: Path) -> None:
    file, run = tmp_path / "mine.toml", tmp_path / "run"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nname = "lenet"\n[data]\nname = "generated"\n'
        "[train]\nglobal_batch_size = 16\nmicro_batch_size = 4\nsteps = 12\n"
        "[run]\ntensorboard = false\n"
    )
    two = ["--nproc-per-node", "2"]
    done = firecaffe("check", str(recipe), *two, "--write", str(file), "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "exchange tree" in done.stdout
    cluster = load_cluster(str(file))
    assert [row.micro_batch_size for row in cluster.device.measured] == [2, 4, 8]
    assert set(cluster.links[0].efficiency) >= {"tree", "native"}
    beside = re.search(r"beside an exchange, computing takes (\d+)% longer", done.stdout)
    assert round(100 * cluster.device.exchange_slowdown) == (int(beside[1]) if beside else 0)
    assert not list(tmp_path.glob(".firecaffe-check*"))
    words = ["--run.folder", str(run), "--run.cluster", str(file)]
    done = firecaffe("train", str(recipe), *two, *words)
    assert done.returncode == 0, done.stderr
    assert "forecast: " in done.stdout
    forecast = json.loads((run / "forecast.json").read_text())
    assert (forecast["workers"], forecast["exchange"]) == (2, "tree")
    said = said_by("explain", run)
    assert "forecast for mine" in said
    assert "exposed exchange" in said


def test_check_of_a_recipe_in_stages(tmp_path: Path) -> None:
    """Its workers need no micro-batches of their own."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        '[model]\nname = "lenet"\n[data]\nname = "generated"\n'
        "[train]\nglobal_batch_size = 4\nmicro_batch_size = 4\nsteps = 1\n"
        '[parallel]\nstages = ["ip1"]\n'
    )
    done = firecaffe("check", str(recipe), "--nproc-per-node", "2", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "timed was the whole network on each rank" in done.stdout
    done = in_process("check", recipe, "--nproc-per-node", "3")
    assert done.returncode == 2
    assert "3 workers with 2 stages: there must be a multiple of 2" in done.stderr


def test_check_and_train_refuse_before_a_rank_starts(tmp_path: Path) -> None:
    done = in_process("check", "--write", "cluster.txt")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    words = "--data.name", "generated", "--run.cluster", str(tmp_path / "none.toml")
    done = in_process("train", RECIPE, *words)
    assert done.returncode == 2
    assert "No such file" in done.stderr


def test_a_ddp_script_with_two_more_lines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "import firecaffe\n"
        "dist.init_process_group('gloo')\n"
        "model = DistributedDataParallel(torch.nn.Linear(300, 300))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "attached = firecaffe.adapt.attach(model, optimizer, sys.argv[1])\n"
        "for _ in range(6):\n"
        "    model(torch.randn(64, 300)).sum().backward()\n"
        "    optimizer.step()\n"
        "attached.detach()\n"
        "model(torch.randn(1, 300)).sum().backward()\n"
        "optimizer.step()\n"
    )
    # The group is not destroyed: torch 2.13 may then wait for its own thread, which wants the
    # interpreter's lock to let go of the last Work.
    torchrun(2, script, tmp_path / "run").check_returncode()
    ranks = json.loads(said_by("explain", tmp_path / "run", "--json"))["ranks"]
    assert [(each["rank"], each["steps"]) for each in ranks] == [(0, 6), (1, 6)]
    for each in ranks:
        # Medians of each: on a busy machine they need not add up to the step's.
        assert 0 < sum(each["parts_s"].values()) <= 1.5 * each["step_s"]
        assert min(each["parts_s"].values()) >= 0
