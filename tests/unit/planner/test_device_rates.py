"""Devices by their data sheets: the fit of their rates, shipped clusters, and what plan says."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import firecaffe
from benchmarks.planner.device_fit import ByClass, Problem
from benchmarks.planner.device_networks import BUILDERS
from benchmarks.planner.device_rates import fitted_only, rates_text
from benchmarks.planner.device_rows import Row, read, vectors_of
from firecaffe.errors import RecipeError
from firecaffe.models import ModelConfig
from firecaffe.models.kernel import MULTIPLIES
from firecaffe.planner.advice import Gain, gain_of
from firecaffe.planner.cluster import FOLDER, Cluster, Device, MeasuredStep, load_cluster, shipped
from firecaffe.planner.compute_time import contradictions, micro_batch, update_s
from firecaffe.planner.forecast import forecast
from firecaffe.planner.library_rates import FILE, tables, unmeasured_error
from firecaffe.planner.memory import memory_band, memory_bytes, on_device, usual_micro_batch
from firecaffe.planner.offers import (
    Sheet,
    device_of,
    offers,
    sheet_of,
    sheets,
    usual_device,
    usual_link,
)
from firecaffe.planner.recipe_workload import workload_of_model
from firecaffe.planner.workload import Workload, in_precision

SHEETS, ROWS = read()
PUBLISHED_MILLIONS = {
    "resnet34": 21.80, "resnext50_32x4d": 25.03, "seresnet50": 28.09, "vgg11_bn": 132.87,
    "inception_v3": 23.83, "densenet121": 7.98, "mobilenetv2_100": 3.50, "efficientnet_b0": 5.29,
    "vit_tiny_patch16_224": 5.72, "mixer_s32_224": 19.10, "convnext_tiny": 28.59,
}  # fmt: skip
"""Weights as timm's tables print them."""


def resnet50(**_: Any) -> nn.Module:
    return BUILDERS["resnet50"][0]()


def mobilenetv2_100(**_: Any) -> nn.Module:
    return BUILDERS["mobilenetv2_100"][0]()


@cache
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


def device_of_row(row: Row) -> Device:
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
    model = ModelConfig(f"tests.unit.planner.test_device_rates:{row.net}")
    work = workload_of_model(model, (3, 224, 224), row.batch, row.batch)
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
        device = device_of_row(row)
        work = replace(work_of(row), optimizer_vectors=vectors_of(row.net))
        taken_s = micro_batch(work, device, row.batch).compute_s
        if row.has_update:
            taken_s += update_s(work, device) - device.overhead_s
        assert taken_s == pytest.approx(expected, rel=1e-3), row
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


def test_networks_have_their_published_weights() -> None:
    for name, millions in PUBLISHED_MILLIONS.items():
        with torch.device("meta"):
            network = BUILDERS[name][0]()
        weights = sum(parameter.numel() for parameter in network.parameters()) / 1e6
        assert weights == pytest.approx(millions, abs=0.006), name


FAMILIES = {"A100 SXM": "ampere-ga100", "H200": "hopper", "K20X": "kepler"}
"""Of shipped devices without rows of their own."""


@pytest.mark.parametrize("name", sorted({*shipped()} - {"cpu-host"}))
def test_a_shipped_cluster_has_the_fitted_figures_and_what_is_usual(name: str) -> None:
    cluster, fitted = load_cluster(name), tables()
    device = cluster.device
    is_fitted = device.name in fitted["scale"]
    if is_fitted:
        assert device.efficiency == fitted["scale"][device.name]
    else:
        family = next(family for part, family in FAMILIES.items() if part in device.name)
        assert device.efficiency == fitted["family_scale"][family]
    assert device.overhead_s == fitted["overhead_s"]
    assert device.error == unmeasured_error(is_fitted)
    assert usual_device(device) == device
    assert [usual_link(link) for link in cluster.links] == [*cluster.links]


OF_CLUSTERS = {
    load_cluster(name).device.name: load_cluster(name).device
    for name in shipped()
    if name != "titan"  # its file scales the K20X as a family, with the library of the paper
}


@pytest.mark.parametrize("key", [k for k, sheet in sheets().items() if sheet.name in OF_CLUSTERS])
def test_a_sheet_is_the_device_of_a_shipped_cluster(key: str) -> None:
    def figures(device: Device) -> Device:
        peaks = {dtype: float(f"{flops:.2g}") for dtype, flops in device.peak_flops.items()}
        return replace(device, peak_flops=peaks)

    assert figures(device_of(sheet_of(key))) == figures(OF_CLUSTERS[sheet_of(key).name])


def test_offers_have_the_links_of_files_and_of_sheets() -> None:
    for rate in (1, 10, 25, 100):
        file = load_cluster(f"ethernet-{rate}g")
        (offer,) = offers("a100", [rate])
        assert replace(offer, name=file.name, about=file.about, sources=file.sources) == file
    (offer,) = offers("h100", [100], per_node=8)
    assert offer.links[0] == load_cluster("dgx-h100").links[0]
    assert (offer.devices_per_node, offer.links[1].ports) == (8, 1)


def test_what_computes_alone_is_equally_fast_at_every_link() -> None:
    """A gain is of the exchange: computing is off by the same factor in both forecasts."""
    work = workload_of_model(ModelConfig("lenet"), None, 64, 8)
    slow, fast = offers("a100", [1, 100])

    def gain(better: Cluster, workers: int) -> Gain:
        pairs = ((on, forecast(work, on, workers, "tree")) for on in (better, slow))
        return gain_of(work, *pairs)

    for better, workers in ((fast, 1), (slow, 8)):
        same = gain(better, workers)
        assert (same.low, same.middle, same.high) == pytest.approx((0, 0, 0))
    both = gain(fast, 8)
    assert both.low < both.middle < both.high
    slow_s, fast_s = (forecast(work, on, 8, "tree").step_s for on in (slow, fast))
    assert both.middle == pytest.approx(slow_s / fast_s - 1)


def test_the_band_of_a_speedup_has_the_scatter_and_the_slow_down_of_workers() -> None:
    """With all else exact, its ends are forecasts on devices that scatter and slow down so."""
    work = workload_of_model(ModelConfig("lenet"), None, 64, 8)
    (usual,) = offers("a100", [10])
    link = replace(usual.links[0], error=0.0)

    def on(scatter: float, slowdown: float) -> Cluster:
        device = usual.device
        jitter, slowed = scatter * device.jitter, slowdown * device.exchange_slowdown
        device = replace(device, error=0.0, jitter=jitter, exchange_slowdown=slowed)
        return replace(usual, device=device, links=(link,))

    speedups = [
        forecast(work, cluster, 8, "ring").speedup
        for cluster in (on(*pair) for pair in product((0.5, 2), (1 / 3, 3)))
    ]
    device = replace(on(1, 1).device, jitter_error=1.0, slowdown_error=2.0)
    cluster = replace(usual, device=device, links=(link,))
    found = gain_of(work, *((cluster, forecast(work, cluster, n, "ring")) for n in (8, 1)))
    assert (1 + found.low, 1 + found.high) == pytest.approx((min(speedups), max(speedups)))


RESNET50 = workload_of_model(ModelConfig("resnet50"), None, 64, 64)


def published(word: str = "", channels_last: bool = False, batch: int = 64) -> Workload:
    work = replace(RESNET50, global_batch_size=batch, micro_batch_size=batch)
    return in_precision(work, word, channels_last)


def test_arithmetic_and_memory_format_decide_the_time() -> None:
    """On an A100: float32, tf32, half, half with the channels last, from slow to fast. Measured
    steps of float32 say nothing of tf32.
    """
    device = load_cluster("dgx-a100").device
    words: list[Any] = [(), ("tf32",), ("fp16",), ("bf16", True)]
    works = [published(*word) for word in words]
    assert [work.precision for work in works] == ["float32", "tf32", "float16", "bfloat16"]
    seconds = [micro_batch(work, device, 64).compute_s for work in works]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 3 * seconds[-1]
    device = replace(device, measured=(MeasuredStep("resnet50", 64, 1.0),))
    assert micro_batch(works[0], device, 64).compute_s == pytest.approx(1.0)
    assert micro_batch(works[1], device, 64).compute_s < 0.2


def test_the_first_line_says_arithmetic_and_micro_batch() -> None:
    words: dict[str, Any] = {"precision": "bf16", "channels_last": True}
    plan = firecaffe.plan(model="lenet", workers=1, cluster="dgx-a100", exchanges=["tree"], **words)
    first = " ".join(str(plan).split())
    assert "micro-batches of 256 in bfloat16 by autocast, channels last" in first
    assert "no micro-batch size is given: 256 is taken" in first


def test_a_micro_batch_that_is_not_given_is_the_largest_that_fits() -> None:
    device, memory, work = load_cluster("ec2-p3").device, 16e9, published()
    size = usual_micro_batch(work, replace(device, memory_bytes=memory))
    parts = [on_device(memory_bytes(published(batch=b), 1), device) for b in (size, 2 * size)]
    highs = [memory_band(part)[1] for part in parts]
    assert highs[0] <= memory < highs[1]
    for bytes_, expected in ((1e15, 256), (1.0, 1)):
        assert usual_micro_batch(work, replace(device, memory_bytes=bytes_)) == expected
    assert usual_micro_batch(work, load_cluster("cpu-host").device) == 8


@pytest.mark.parametrize("net", ["resnet50", "vgg19"])
def test_a_published_row_that_ran_fits_its_device(net: str) -> None:
    """Lambda's batches were chosen to fill the memory."""
    work = workload_of_model(ModelConfig(net), None, 8, 8)
    rows = [row for row in ROWS if row.net == net]
    assert rows
    for row in rows:
        autocast = row.precision if row.casts else ""
        ran = replace(work, micro_batch_size=row.batch, autocast=autocast)
        assert sum(memory_bytes(ran, 1).values()) <= SHEETS[row.device].memory_bytes, row


def test_a_plan_says_where_published_rates_contradict_it() -> None:
    def said(work: Workload, name: str) -> list[str]:
        """On a device of a third of the speed."""
        device = load_cluster(name).device
        return contradictions(work, replace(device, efficiency=device.efficiency / 3))

    work = published("fp16", channels_last=True, batch=128)
    assert said(work, "ec2-p3")[0].startswith("torchvision-exp has 1,154 ")
    assert all("P100" in line for line in said(published(), "dgx1-p100"))
    assert said(replace(work, model="other"), "ec2-p3") == []


def test_an_unknown_library_is_refused(tmp_path: Path) -> None:
    text = (FOLDER / "titan.toml").read_text("utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('library = "cudnn4"', 'library = "cudnn99"'), "utf-8")
    with pytest.raises(RecipeError, match=r"device\.library is 'cudnn99'; there are plain, cudnn4"):
        load_cluster(str(path))
