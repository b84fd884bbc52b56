"""Rates of devices by their data sheets: the fit's arithmetic, its file, and what plan says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import firecaffe
from benchmarks.planner.device_fit import ByClass, Problem
from benchmarks.planner.device_networks import BUILDERS
from benchmarks.planner.device_rates import fitted_only, rates_text
from benchmarks.planner.device_rows import Row, read, vectors_of
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.models.kernel import MULTIPLIES
from firecaffe.planner.cluster import Cluster, Device, load_cluster, shipped
from firecaffe.planner.compute_time import micro_batch, update_s
from firecaffe.planner.library_rates import FILE, tables, unmeasured_error
from firecaffe.planner.memory import memory_band, memory_bytes, on_device, usual_micro_batch
from firecaffe.planner.of_recipe import workload_of_model
from firecaffe.planner.offers import Sheet
from firecaffe.planner.precision import in_precision
from firecaffe.planner.published_trainings import contradictions
from firecaffe.planner.workload import Workload

SHEETS, ROWS = read()
PUBLISHED_MILLIONS = {
    "resnet34": 21.80,
    "resnext50_32x4d": 25.03,
    "seresnet50": 28.09,
    "vgg11_bn": 132.87,
    "inception_v3": 23.83,
    "densenet121": 7.98,
    "mobilenetv2_100": 3.50,
    "efficientnet_b0": 5.29,
    "vit_tiny_patch16_224": 5.72,
    "mixer_s32_224": 19.10,
    "convnext_tiny": 28.59,
}
"""Weights as timm's tables print them."""


def written() -> tuple[ByClass, np.ndarray]:
    """The model with the values of the file, for the rows of two networks."""
    rows = [row for row in ROWS if row.net in ("resnet50", "mobilenetv2_100")]
    model = ByClass(Problem(SHEETS, rows))
    found, problem = tables(), model.problem
    shares = [
        [found["share"][arithmetic][library][kind] for kind in MULTIPLIES]
        for arithmetic, library in problem.groups
    ]
    scales = [found["scale"].get(SHEETS[device].name, 1.0) for device in problem.devices]
    memory = found["memory"]
    common = model.values(model.start).common
    parts = [
        np.log(common).ravel(),
        (np.log(shares) - np.log(common)[model.mode]).ravel(),
        np.log([found["reread"]["float32"], found["reread"]["tensor"]]),
        np.log([memory["matrix"], memory["other"]]),
        np.log([memory["transposes"]]),
        np.log([found["overhead_s"]]),
        np.log(scales),
    ]
    return model, np.concatenate(parts)


def device_of(row: Row) -> Device:
    sheet: Sheet = SHEETS[row.device]
    return Device(
        sheet.name,
        sheet.memory_bytes,
        sheet.memory_bytes_per_s,
        sheet.flops,
        efficiency=tables()["scale"].get(sheet.name, 1.0),
        overhead_s=tables()["overhead_s"],
        library=row.library,
    )


def work_of(row: Row) -> Workload:
    name = f"tests.unit.planner.published_networks:{row.net}"
    work = workload_of_model(ModelConfig(name), (3, 224, 224), row.batch, row.batch)
    words = {"tf32": "tf32", "float16": "fp16", "float32": "fp32"}
    return in_precision(work, words[row.precision], row.channels_last)


def test_the_fit_prices_a_step_as_the_planner_does() -> None:
    """Of the same rows, in all arithmetics and formats, but for the kernels of a whole update."""
    model, vector = written()
    seconds = model.seconds(vector)
    seen = set()
    for row, expected in zip(model.problem.rows, seconds, strict=True):
        key = row.precision, row.channels_last, row.net
        if key in seen or (row.precision == "float16" and not row.casts):
            continue
        seen.add(key)
        work, device = work_of(row), device_of(row)
        work = replace(work, optimizer_vectors=vectors_of(row.net))
        found = micro_batch(work, device, row.batch).compute_s
        if row.has_update:
            found += update_s(work, device) - device.overhead_s
        assert found == pytest.approx(expected, rel=1e-3), row
    assert len(seen) >= 5


@pytest.mark.slow
def test_the_file_is_what_the_fit_writes() -> None:
    band = tables()["band"]
    bands = {"network": band["network_out"], "family": band["family_out"]}
    fresh = rates_text(*fitted_only(Problem(SHEETS, ROWS)), bands)
    assert fresh == Path(FILE).read_text("utf-8")


def test_the_file_forecasts_the_rows_that_it_was_fitted_to() -> None:
    model, vector = written()
    errors = np.abs(model.seconds(vector) / model.problem.seconds - 1)[model.problem.is_fitted]
    assert np.median(errors) < 0.06
    assert np.quantile(errors, 0.9) < 0.2


@pytest.mark.parametrize("net", PUBLISHED_MILLIONS)
def test_networks_have_their_published_weights(net: str) -> None:
    with torch.device("meta"):
        network = BUILDERS[net][0]()
    weights = sum(parameter.numel() for parameter in network.parameters()) / 1e6
    assert weights == pytest.approx(PUBLISHED_MILLIONS[net], abs=0.006)


FAMILIES = {"A100 SXM": "ampere-ga100", "H200": "hopper", "K20X": "kepler"}
"""Of shipped devices without rows of their own."""


@pytest.mark.parametrize("name", [name for name in shipped() if name != "cpu-host"])
def test_cluster_files_have_the_fitted_figures(name: str) -> None:
    device, found = load_cluster(name).device, tables()
    is_fitted = device.name in found["scale"]
    if is_fitted:
        assert device.efficiency == found["scale"][device.name]
    else:
        family = next(family for part, family in FAMILIES.items() if part in device.name)
        assert device.efficiency == found["family_scale"][family]
    assert device.overhead_s == found["overhead_s"]
    assert device.error == unmeasured_error(is_fitted)


def resnet50(word: str = "", channels_last: bool = False, batch: int = 64) -> Workload:
    work = workload_of_model(ModelConfig("resnet50"), None, batch, batch)
    return in_precision(work, word, channels_last)


def test_arithmetic_and_memory_format_decide_the_time() -> None:
    """On an A100: float32, tf32, half, half with the channels last, from slow to fast."""
    device = load_cluster("dgx-a100").device
    works = [resnet50(), resnet50("tf32"), resnet50("fp16"), resnet50("bf16", channels_last=True)]
    seconds = [micro_batch(work, device, 64).compute_s for work in works]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 3 * seconds[-1]
    assert [work.precision for work in works] == ["float32", "tf32", "float16", "bfloat16"]


def test_measured_steps_of_float32_say_nothing_of_tf32() -> None:
    device = load_cluster("dgx-a100").device
    row = firecaffe.planner.cluster.MeasuredStep("resnet50", 64, 1.0)
    device = replace(device, measured=(row,))
    assert micro_batch(resnet50("fp32"), device, 64).compute_s == pytest.approx(1.0)
    assert micro_batch(resnet50("tf32"), device, 64).compute_s < 0.2


def planned(**words: object) -> str:
    return str(firecaffe.plan(model="resnet50", workers=1, **words))  # type: ignore[arg-type]


def test_the_first_line_says_arithmetic_and_micro_batch() -> None:
    first = " ".join(planned(cluster="dgx-a100", precision="bf16", channels_last=True).split())
    assert "micro-batches of 256 in bfloat16 by autocast, channels last" in first
    assert "no micro-batch size is given: 256 is taken" in first
    assert "in float32, " in " ".join(planned(cluster="cpu-host").split())


def test_arithmetic_that_a_device_lacks_is_refused() -> None:
    with pytest.raises(RecipeError, match="cpu-host's device has no tf32"):
        planned(cluster="cpu-host", precision="tf32")
    with pytest.raises(RecipeError, match="must be one of fp32, tf32, fp16, bf16"):
        planned(cluster="dgx-a100", precision="half")


def test_a_micro_batch_that_is_not_given_is_the_largest_that_fits() -> None:
    device, memory = load_cluster("ec2-p3").device, 16e9
    size = usual_micro_batch(resnet50(), replace(device, memory_bytes=memory))
    parts = [on_device(memory_bytes(resnet50(batch=b), 1), device) for b in (size, 2 * size)]
    highs = [memory_band(part)[1] for part in parts]
    assert highs[0] <= memory < highs[1]
    assert usual_micro_batch(resnet50(), replace(device, memory_bytes=1e15)) == 256
    assert usual_micro_batch(resnet50(), replace(device, memory_bytes=1.0)) == 1
    assert usual_micro_batch(resnet50(), load_cluster("cpu-host").device) == 8


@pytest.mark.parametrize("net", ["resnet50", "resnet152", "vgg19"])
def test_a_published_row_that_ran_fits_its_device(net: str) -> None:
    """Lambda's batches were chosen to fill the memory."""
    work = workload_of_model(ModelConfig(net), None, 8, 8)
    rows = [row for row in ROWS if row.net == net]
    assert rows
    for row in rows:
        autocast = row.precision if row.casts else ""
        ran = replace(work, micro_batch_size=row.batch, autocast=autocast)
        counted = sum(memory_bytes(ran, 1).values())
        assert counted <= SHEETS[row.device].memory_bytes, row


def slowed(cluster: Cluster, times: float) -> Cluster:
    device = replace(cluster.device, efficiency=cluster.device.efficiency / times)
    return replace(cluster, device=device)


def test_a_plan_says_where_published_rates_contradict_it() -> None:
    cluster, work = load_cluster("ec2-p3"), resnet50("fp16", channels_last=True, batch=128)
    assert contradictions(work, slowed(cluster, 3.0))[0].startswith("torchvision-exp has 1,154 ")
    own = load_cluster("dgx1-p100")
    assert all("P100" in line for line in contradictions(resnet50(), slowed(own, 3.0)))
    assert contradictions(replace(work, model="other"), slowed(cluster, 3.0)) == []


def test_an_unknown_library_is_refused(tmp_path: Path) -> None:
    text = Path(firecaffe.planner.cluster.FOLDER / "titan.toml").read_text("utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('library = "cudnn4"', 'library = "cudnn99"'), "utf-8")
    with pytest.raises(RecipeError, match=r"device\.library is 'cudnn99'; there are plain, cudnn4"):
        load_cluster(str(path))
