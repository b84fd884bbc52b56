"""`firecaffe plan` and `firecaffe check`, typed as a user types them."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firecaffe import plan as firecaffe_plan
from firecaffe.api.cluster_file import write_cluster
from firecaffe.cli import main
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.split_plans import WAYS

RECIPE = Path(__file__).parents[2] / "recipes" / "nin_small.toml"

ALEXNET = ["--model", "alexnet"]

BATCH_OF_32 = ["--global-batch-size", "256", "--micro-batch-size", "8"]
"""32 micro-batches."""


def plan(*words: str) -> tuple[int, str, str]:
    """The same command in this process, which has loaded torch already."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["plan", *words])
    return code, out.getvalue(), err.getvalue()


def planned(*words: str) -> list[dict[str, Any]]:
    code, out, err = plan(*words, "--json")
    assert code == 0, err
    value: list[dict[str, Any]] = json.loads(out)
    return value


def test_a_recipe_on_a_shipped_cluster(tmp_path: Path) -> None:
    (answer,) = planned(str(RECIPE), "--cluster", "cpu-host", "--workers", "1,2,4")
    rows = answer["rows"]
    assert {row["workers"] for row in rows} == {1, 2, 4}
    assert all(row["step_low_s"] < row["step_s"] < row["step_high_s"] for row in rows)
    assert answer["advice"].startswith("Use ")
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    code, out, err = plan(str(RECIPE), "--workers", "1,2", "--plot", str(picture))
    assert code == 0, err
    assert "samples/s" in out
    assert "To change first" in out or "No single change" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


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
    words = [str(RECIPE), "--workers", "1,2", "--exchanges", "ring", "--epochs"]
    (answer,) = planned(*words, "32=12.5,256=30")
    for row in answer["rows"]:
        assert row["epochs_to_accuracy"]["epochs"] == pytest.approx(15)
        assert row["hours_to_accuracy"] > 0
    for given in ("32=12.5,256=30", "32=12.5 --noise-scale 64"):
        assert "Largest useful batch: about 128" in plan(*words, *given.split())[1]
    _, out, _ = plan(*words, "512=12,1024=13")
    assert "at least" in next(line for line in out.splitlines() if line.startswith("To your"))
    pairs = firecaffe_plan(RECIPE, workers="1,2", exchanges=["ring"], epochs={32: 12.5, 256: 30})
    assert pairs.to_dict() == [answer | {"workload": str(RECIPE)}]


def test_exchanges_and_compressors_of_a_plan_may_be_named() -> None:
    """The backend's own is among them, and a comma within parentheses parts nothing."""
    names = "native,hierarchical(tree,ring)"
    words = ["--model", "lenet", "--cluster", "dgx-a100", "--workers", "16", "--exchanges", names]
    (answer,) = planned(*words)
    assert {row["exchange"] for row in answer["rows"]} == {"native", "hierarchical(tree,ring)"}
    words = [str(RECIPE), "--workers", "2", "--exchange.compressor", "int8"]
    for more, compressors in (
        ([], {"none", "int8"}),
        (["--compressors", "none"], {"none"}),
        (["--compressors", "one_bit", "--exchange.compressor", "threshold"], {"one_bit"}),
    ):
        (answer,) = planned(*words, *more)
        assert {row["compressor"] for row in answer["rows"]} == compressors


def test_compare_and_several_clusters() -> None:
    clusters = ["--cluster", "ethernet-1g,infiniband-ndr", "--workers", "8", "--exchanges", "ring"]
    found = planned("--compare", str(RECIPE), str(RECIPE), *clusters)
    assert [each["cluster"] for each in found] == ["ethernet-1g", "infiniband-ndr"]
    found = planned("--model", "googlenet", "--compressors", "all", *clusters)
    assert {row["compressor"] for row in found[0]["rows"]} >= {"none", "int8", "power_sgd"}


@pytest.mark.parametrize(
    ("words", "batch", "most"),
    [
        (["--workers", "1024"], 262_144, 1024),  # micro-batches of 256, the most that is taken
        ([], 8192, 32),
        (["--micro-batch-size", "7", "--workers", "8"], 252, 8),
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


def test_arithmetic_that_a_device_has_not_is_said() -> None:
    """A recipe may ask for it, as it is the run that decides; --precision is refused."""
    words = [str(RECIPE), "--workers", "1", "--cluster", "titan"]
    for more, is_noted in (([], False), (["--train.autocast", "bfloat16"], True)):
        (answer,) = planned(*words, *more)
        assert ("no rate of bfloat16" in answer["assumption"]) is is_noted
    for word in ("half", 16, ["bf16"]):
        with pytest.raises(RecipeError, match=r"precision is .*fp32, tf32, fp16, bf16"):
            firecaffe_plan(model="lenet", workers=1, precision=word)  # type: ignore[arg-type]


RATES = """
name = "mine"
source = "our cluster"
cluster = "ec2-p3"
[[trainings]]
model = "resnet50"
batch = 64
precision = "fp16"
rows = [{ devices = 1, per_s = 800.0, fit = true }]
"""


def test_a_file_of_rates_brings_its_cluster_with_its_arithmetic(tmp_path: Path) -> None:
    path = tmp_path / "rates.toml"
    path.write_text(RATES)
    words = ["--model", "resnet50", "--runs", str(path), "--workers", "1"]
    (answer,) = planned(*words, "--precision", "fp16", "--micro-batch-size", "64")
    assert answer["cluster"] == "ec2-p3"
    assert answer["rows"][0]["images_per_s"] == pytest.approx(800.0, rel=0.02)
    code, _, err = plan(*words, "--cluster", "dgx-h100")
    assert (code, "--cluster has no effect beside" in err) == (2, True)


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
    _, out, _ = plan(str(served), "--workers", "1")
    assert "stale, s = 4" in out
    assert "mode, on 1 worker " in out


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


def test_a_buyer_is_told_the_slowest_link_that_none_surely_beats() -> None:
    (found,) = planned(
        *ALEXNET, "--device", "a100", "--workers", "1,8", "--exchanges", "ring", *BATCH_OF_32
    )
    rates = [
        max(row["images_per_s"] for row in of["rows"] if row["workers"] == 8)
        for of in found["plans"]
    ]
    assert rates == sorted(rates)
    assert found["plans"][0]["cluster"] == "1 Gbit/s"
    assert found["link"] == "100 Gbit/s Ethernet"  # 244 MB of gradients and little computing
    assert found["sentences"][0].startswith("Buy the 100 Gbit/s Ethernet: on 8 workers")
    code, out, _ = plan(
        *ALEXNET, "--device", "a100", "--links", "10", "--exchanges", "ring", *BATCH_OF_32
    )
    assert (code, "Buy" in out) == (0, False)


def test_a_buyer_is_told_of_known_rates() -> None:
    """TensorFlow's page of 2017 has 91.8 images/s of one P100, outside the band of the forecast."""
    words = ["--model", "resnet152", "--micro-batch-size", "16", "--workers", "1"]
    words += ["--exchanges", "ring"]
    (found,) = planned(*words, "--device", "p100", "--links", "10")
    (line,) = (line for line in found["assumptions"] if "tensorflow-2017" in line)
    assert line.startswith("tensorflow-2017 has 91.8 images/s of resnet152 on one NVIDIA P100")
