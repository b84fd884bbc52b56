"""The arithmetic that `firecaffe plan` forecasts, and the cluster of a file of rates."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firecaffe import plan as firecaffe_plan
from firecaffe.api.answer import write_cluster
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import load_cluster
from tests.cli.test_plan import RECIPE, plan, planned


def test_arithmetic_that_a_device_has_not_is_said() -> None:
    """A recipe may ask for it, as it is the run that decides; --precision is refused."""
    words = [str(RECIPE), "--workers", "1", "--cluster", "titan"]
    (found,) = planned(*words, "--train.autocast", "bfloat16")
    assert "no rate of bfloat16" in found["assumption"]
    (found,) = planned(*words)
    assert "no rate" not in found["assumption"]
    code, _, err = plan(*words, "--precision", "bf16")
    assert (code, "has no bfloat16" in err) == (2, True)


@pytest.mark.parametrize("cluster", ["ec2-p3", "dgx1-p100"])
def test_float16_does_not_stand_for_bfloat16(cluster: str) -> None:
    """Volta's and Pascal's data sheets have float16 alone; without a rate, float32's is taken."""
    words = ["--cluster", cluster, "--workers", "1"]
    alone = ["--model", "lenet", *words]
    code, _, err = plan(*alone, "--precision", "bf16")
    assert (code, "has no bfloat16" in err) == (2, True)
    assert plan(*alone, "--precision", "fp16")[0] == 0
    buyer = ["--model", "lenet", "--device", "k80", "--links", "10", "--workers", "1"]
    code, _, err = plan(*buyer, "--precision", "bf16")
    assert (code, "NVIDIA K80" in err, "its file" in err) == (2, True, False)
    (found,) = planned(str(RECIPE), *words, "--train.autocast", "bfloat16")
    assert "no rate of bfloat16" in found["assumption"]
    (found,) = planned(str(RECIPE), *words, "--train.autocast", "float16")
    assert "no rate" not in found["assumption"]


def test_bfloat16_stands_for_float16(tmp_path: Path) -> None:
    """Devices that have bfloat16 have float16 at the same rate, which a file may leave out."""
    path, found = tmp_path / "mine.toml", load_cluster("h200")
    peaks = {"float32": 1e13, "bfloat16": 1e14}
    write_cluster(path, replace(found, device=replace(found.device, peak_flops=peaks)))
    words = ["--model", "lenet", "--cluster", str(path), "--workers", "1", "--precision"]
    (half,), (other,) = planned(*words, "fp16"), planned(*words, "bf16")
    assert half["rows"][0]["step_s"] == other["rows"][0]["step_s"]


@pytest.mark.parametrize("word", ["half", 16, ["bf16"]])
def test_precisions_that_are_none(word: Any) -> None:
    with pytest.raises(RecipeError, match=r"precision is .*fp32, tf32, fp16, bf16"):
        firecaffe_plan(model="lenet", workers=1, precision=word)


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
    (said,) = planned(*words, "--precision", "fp16", "--micro-batch-size", "64")
    assert said["cluster"] == "ec2-p3"
    assert said["rows"][0]["images_per_s"] == pytest.approx(800.0, rel=0.02)
    code, _, err = plan(*words, "--cluster", "dgx-h100")
    assert (code, "--cluster has no effect beside" in err) == (2, True)
