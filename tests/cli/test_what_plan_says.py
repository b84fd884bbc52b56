"""What `firecaffe plan` says of its own figures, their arithmetic, and what it leaves out."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner.published_scaling import FOLDER, forecast_rows
from firecaffe import plan as firecaffe_plan
from firecaffe.api.answer import time_text, write_cluster
from firecaffe.api.plan_tables import hours_text
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import load_cluster
from firecaffe.planner.learn_rates import load_rates
from firecaffe.value_checks import digits_of
from tests.cli.test_plan import ALEXNET, BATCH_OF_32, RECIPE, plan, planned
from tests.kit.data_sheets import data_sheet

RESNET = ("--model", "resnet50", "--device", "a100")


def test_a_larger_batch_is_advised_up_to_the_largest_useful_one() -> None:
    """Of ResNet-50, 47 thousand."""
    words = ["--model", "resnet50", "--cluster", "ethernet-1g", "--workers", "8"]
    for batch, is_advised in ((4096, True), (65536, False)):
        (found,) = planned(*words, "--global-batch-size", str(batch))
        assert ("a global batch twice as large" in found["advice"]) is is_advised


@pytest.mark.parametrize(
    ("more", "is_known"),
    [
        ([], True),
        (["--input", "3x224x224"], True),
        (["--input", "3x64x64"], False),
        (["--input", "3x227x227"], True),
        (["--args", "{ num_classes = 10 }"], False),
    ],
)
def test_published_epochs_are_of_the_published_network_and_images(
    more: list[str], is_known: bool
) -> None:
    (found,) = planned("--model", "resnet50", "--cluster", "ethernet-1g", "--workers", "8", *more)
    assert (found["rows"][0]["hours_to_accuracy"] is not None) is is_known


def test_what_sums_at_odd_numbers_of_workers_is_said() -> None:
    sizes = ["--micro-batch-size", "256", "--global-batch-size", "8192"]
    _, out, _ = plan(*RESNET, "--links", "10", "--workers", "5,12", *sizes)
    assert "With 5, 12 workers" in out
    _, out, _ = plan(*RESNET, "--links", "10", "--workers", "4")
    assert "fold" not in out


def test_fewer_workers_need_no_faster_link() -> None:
    """Of 16, the 25 Gbit/s Ethernet was passed over: it is not sure to beat 10, as 100 is."""
    words = ["--links", "1,10,25,100", "--workers", "1,2,4,8,16,32"]
    (found,) = json.loads(plan(*RESNET, *words, "--json")[1])
    assert found["link"] == "25 Gbit/s Ethernet"
    said = " ".join(found["sentences"])
    assert "For 2, 4 and 8 workers 10 Gbit/s is enough." in said
    assert "is enough" not in said.replace("10 Gbit/s is enough", "")


@pytest.mark.parametrize("named", [[], ["--exchanges", "ring"]], ids=["all", "ring"])
def test_a_tenth_more_workers_bring_what_a_plan_of_them_says(named: list[str]) -> None:
    few, more = (
        json.loads(
            plan(
                *(*RESNET, *named, "--links", "10", "--workers", str(workers)),
                *("--micro-batch-size", "8", "--global-batch-size", str(64 * workers), "--json"),
            )[1]
        )[0]
        for workers in (10, 11)
    )
    rates = [
        max(
            row["images_per_s"]
            for row in found["plans"][0]["rows"]
            if row["keeps_bits"] or row["exchange"] in named
        )
        for found in (few, more)
    ]
    assert f"bring {rates[1] / rates[0] - 1:+.0%} samples/s" in " ".join(few["sentences"])


def test_one_more_of_five_is_no_tenth() -> None:
    words = ["--model", "lenet", "--device", "a100", "--links", "10", "--workers", "5"]
    assert "A tenth more" not in plan(*words)[1]


@pytest.mark.parametrize(("workers", "micro_batches"), [("1,8,24", 48), ("3", 48), ("100", 100)])
def test_a_batch_that_is_not_said_gives_most_workers_equal_shares(
    workers: str, micro_batches: int
) -> None:
    """Of 2^k micro-batches, which are subtrees; of 32 on 24 workers some have 2 and most 1."""
    _, out, _ = plan(*RESNET, "--links", "10", "--workers", workers)
    batch, size = map(int, re.findall(r"batch (\d+) in micro-batches of (\d+)", out)[0])
    assert batch == micro_batches * size
    assert f"With {workers.split(',')[-1]} workers, shares" not in out


def test_a_tenth_more_is_said_of_equal_shares_alone() -> None:
    words = ["--model", "lenet", "--device", "a100", "--links", "10", "--workers", "10"]
    words += ["--micro-batch-size", "8", "--global-batch-size"]
    assert "A tenth more" in plan(*words, "80")[1]
    assert "A tenth more" not in plan(*words, "96")[1]


def test_a_buyer_reads_to_what_and_with_which_codec() -> None:
    words = ["--links", "1,10", "--workers", "8,32"]
    _, out, _ = plan(*RESNET, *words, "--compressors", "all")
    bought = next(line for line in out.splitlines() if line.startswith("Buy the 1 Gbit/s"))
    assert "hours to 75.9 % top-1" in bought
    assert "(gradients by power_sgd)" in bought
    hours = re.search(r"In bf16 32 workers need .* gives ([\d.]+) minutes", out)
    assert hours is not None  # with the codec, too, and so no longer than in float32
    _, out, _ = plan(*RESNET, *words, "--global-batch-size", "512")
    assert "gives at least" in out
    assert out.count("at least") > 4  # in the cells, too


def test_a_file_of_rates_alone_is_judged_as_the_record_judges_it() -> None:
    """Each row of it that corrected nothing, with its band."""
    path = FOLDER / "dlperf-mxnet.toml"
    code, out, err = plan("--runs", str(path))
    assert code == 0, err
    rates, cluster = load_rates(path)
    judged = forecast_rows(rates.name, cluster, rates.trainings)
    said = re.findall(r" on (\d+): ([\d,]+) measured, ([\d,]+) forecast", out)
    assert [tuple(int(number.replace(",", "")) for number in row) for row in said] == [
        (row.devices, round(row.per_s), round(row.forecast_per_s)) for row in judged
    ]
    assert f"{sum(row.in_band for row in judged)} lie in the band" in out
    assert plan()[0] == 2


def test_energy_is_that_of_nodes_or_says_that_it_is_not() -> None:
    words = ["--model", "resnet50", "--workers", "8"]
    for cluster, is_whole in (("dgx-a100", True), ("ethernet-10g", False)):
        _, out, _ = plan(*words, "--cluster", cluster)
        assert re.search(r"[\d.]+ kWh", out)
        assert ("kWh by the devices alone" in out) is not is_whole


def test_no_codec_is_planned_in_silence() -> None:
    """Cells that a codec has made say so, and codecs that the table leaves out are named."""
    words = [*ALEXNET, "--device", "a100", "--links", "1", "--workers", "8", *BATCH_OF_32]
    for codec, is_noted in (("int8", True), ("none", False)):
        _, out, _ = plan(*words, "--compressors", codec)
        assert ("cost in accuracy is not forecast" in " ".join(out.split())) == is_noted
    (found,) = planned(str(RECIPE), "--workers", "2", "--compressors", "all")
    of_codecs = {row["compressor"] for row in found["rows"]} - {"none"}
    for more, is_noted in (((), True), (("--all",), False)):
        _, out, _ = plan(str(RECIPE), "--workers", "2", "--compressors", "all", *more)
        (note,) = [line for line in out.splitlines() if "not among the fastest" in line] or [""]
        assert bool(note) == is_noted
        assert not note or all(codec in note for codec in of_codecs)


def test_a_table_by_data_says_so_beside_a_recipe_with_stages() -> None:
    words = [str(RECIPE), "--workers", "1,2"]
    for more, is_noted in (((), False), (("--parallel.stages", '["conv2"]'), True)):
        code, out, err = plan(*words, *more)
        assert code == 0, err
        assert ("of training by data" in " ".join(out.split())) == is_noted
        assert ("of training by data" in planned(*words, *more)[0]["assumption"]) == is_noted


def test_equal_ways_are_not_called_faster_and_slower(tmp_path: Path) -> None:
    """GoogLeNet's exchange on one DGX is hidden, whichever it is, if it slows nothing down."""
    recipe, cluster = RECIPE.with_name("googlenet_imagenet_b1024.toml"), tmp_path / "dgx.toml"
    write_cluster(cluster, data_sheet("dgx-h100"))
    (found,) = planned(str(recipe), "--cluster", str(cluster), "--workers", "1,8")
    assert "would be faster" not in found["advice"]
    assert "is as fast." in found["advice"]


def test_ways_are_planned_with_the_fastest_exchange_of_float32() -> None:
    """Codecs are faster on this link, and no way to share a network sends with one."""
    words = [*ALEXNET, "--cluster", "ethernet-1g", "--workers", "8", *BATCH_OF_32]
    (found,) = planned(*words, "--compressors", "all", "--ways", "data")
    rows = [row for row in found["rows"] if row["exchange"] != "native"]
    uncoded = min(row["step_s"] for row in rows if row["compressor"] == "none")
    assert min(row["step_s"] for row in rows) < uncoded
    (by_data,) = found["parallel"]["plans"]
    assert by_data["step_s"] == pytest.approx(uncoded)


def test_modes_begin_with_the_step_of_the_table() -> None:
    """On Ethernet exchanges slow backward down, by a fifth of the step of 32 workers."""
    words = ["--model", "resnet50", "--cluster", "ethernet-10g", "--workers", "32"]
    (found,) = planned(*words, "--modes")
    least = min(row["step_s"] for row in found["rows"] if row["exchange"] != "native")
    assert found["modes"][0]["step_s"] == pytest.approx(least, rel=0.02)
    _, out, _ = plan(*words, "--modes")
    slowed = re.search(r"slows down by ([\d.]+) ms", " ".join(out.split()))
    assert slowed is not None
    assert float(slowed[1]) > 0.1 * 1e3 * least


FEW = ["--model", "lenet", "--workers", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "torch.nn:Flatten", "--input", "1x28x28", "--workers", "1,4"], "no parameter"),
        ([*FEW, "--args", "{num_classes=-1}"], "num_classes=-1"),
        ([*FEW, "--epochs", f"128={10**21},256=1"], f"128={10**21}"),
        ([*FEW, "--epochs", "128=10,10000000000=1"], "10000000000=1"),
    ],
    ids=["no parameter", "argument", "epochs", "batch"],
)
def test_what_cannot_be_planned_gets_one_line(words: list[str], said: str) -> None:
    code, _, err = plan(*words)
    assert code == 2
    (line,) = err.splitlines()
    assert said in line
    assert "--workers" not in line


def test_epochs_that_no_line_goes_through_have_a_band_that_is_a_number() -> None:
    (found,) = planned(*FEW, "--epochs", "1=1000,100000000=1", "--global-batch-size", "1024")
    band = found["rows"][0]["epochs_to_accuracy"]
    assert 0 < band["low"] < band["epochs"] < band["high"] < float("inf")


@pytest.mark.parametrize(
    ("failures", "restart_s", "ending"),
    [(0.001, 60, [1, 2]), (1e9, 60, []), (0.5, 1e6, []), (3.0, 6000, [1])],
)
def test_a_training_that_failures_do_not_let_end_is_not_advised(
    tmp_path: Path, failures: float, restart_s: float, ending: list[int]
) -> None:
    """By Daly, exp(-restarts / time between failures) of the time is left: on two nodes the square
    of one's, 0.7 % and 0.005 %.
    """
    path, cluster = tmp_path / "mine.toml", load_cluster("ethernet-10g")
    write_cluster(
        path, replace(cluster, failures_per_node_hour=failures, restart_s=float(restart_s))
    )
    recipe = RECIPE.with_name("nin_imagenet_b1024.toml")
    words = [str(recipe), "--cluster", str(path), "--workers", "1,2"]
    (found,) = planned(*words)
    assert {row["workers"] for row in found["rows"] if row["hours"] is not None} == {*ending}
    assert ("does not end" in found["advice"]) is (len(ending) < 2)
    assert ("Use " in found["advice"]) is bool(ending)
    assert ("Use 2 workers" in found["advice"]) is (2 in ending)
    _, out, _ = plan(*words)
    assert re.search(r"e\+\d+ days", out) is None


def test_what_is_written_is_said(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    _, out, _ = plan(str(RECIPE), "--workers", "1,2", "--html", str(page))
    assert f"wrote {page}" in out.replace("\n", "")


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


def test_an_unknown_network_of_a_file_of_rates_is_refused_with_what_it_needs(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rates.toml"
    path.write_text(RATES.replace("resnet50", "inception_v3"))
    code, _, err = plan("--runs", str(path))
    assert code == 2
    for part in (str(path), "inception_v3", "parameters and layers"):
        assert part in err


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (52_512.0, "52,500"),
        (999.7, "1,000"),
        (99.96, "100"),
        (7.0, "7"),
        (0.0442, "0.0442"),
    ],
)
def test_a_large_figure_has_no_exponent(value: float, said: str) -> None:
    assert digits_of(value) == said
    if value >= 2:
        assert (time_text(value), hours_text(24 * value)) == (f"{said} s", f"{said} days")


def test_thousands_have_commas_without_an_exponent_too() -> None:
    assert digits_of(1234.0, 4) == "1,234"
