"""The arithmetic that `firecaffe plan` forecasts, and the cluster of a file of rates."""

from pathlib import Path
from typing import Any

import pytest

from firecaffe import plan as firecaffe_plan
from firecaffe.errors import RecipeError
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
