"""Forecasts compute times layer by layer, corrected by measurements on the device.

A layer's forward takes its arithmetic or its memory traffic, whichever is longer, plus the device's
overhead. Backward does as much again for the inputs and for the weights. The overhead does not
shrink with the batch, so small batches use less of the device (the "skinny" effect of Keuper and
Pfreundt 2016). t = work / rate + overhead is Hockney's efficiency rate · w / (w + w_half), with
w_half = overhead · rate.

Source: Williams, Waterman, Patterson 2009 (roofline); Hockney 1991 (half-performance length).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import log

import numpy as np

from firecaffe.planner.cluster import Device, MeasuredStep
from firecaffe.planner.workload import LayerWork, Workload

BACKWARD_CALLS = 2
"""Calls in backward of a layer with weights: the gradients of its inputs and of its weights."""

UPDATE_PASSES = 3
"""Passes over the weights for each vector of an update: weights, gradients and state."""

COPY_PASSES = 2

HALF_PRECISION = ("bfloat16", "float16")


@dataclass(frozen=True)
class MicroBatch:
    forward_s: float
    backward_s: tuple[float, ...]
    """Seconds by layer, from the last to the first, as gradients become ready."""

    @property
    def compute_s(self) -> float:
        return self.forward_s + sum(self.backward_s)


@lru_cache(maxsize=256)
def micro_batch(workload: Workload, device: Device, images: int) -> MicroBatch:
    """Time one micro-batch by the device's figures, and its measurements if there are any."""
    scale = correction(workload, device, images)
    times = [layer_s(layer, workload, device, images) for layer in workload.layers]
    forward_s = scale * sum(forward for forward, _ in times)
    return MicroBatch(forward_s, tuple(scale * backward for _, backward in reversed(times)))


def layer_s(
    layer: LayerWork, workload: Workload, device: Device, images: int
) -> tuple[float, float]:
    """Forward and backward of one layer on one micro-batch, by the device's figures alone."""
    flops, rate = _rates(workload, device)
    half = 0.5 if workload.autocast in HALF_PRECISION else 1.0
    moved = half * (layer.moved_bytes * images + layer.weight_bytes)
    forward_s = max(layer.flops * images / flops, moved / rate) + device.overhead_s
    if layer.flops:
        return forward_s, layer.backward_share * BACKWARD_CALLS * forward_s
    return forward_s, forward_s * 1.5 * (layer.backward_share > 0)


def update_s(workload: Workload, device: Device, share: float = 1.0) -> float:
    """Seconds of an update. share: of the weights, if the worker updates only some of them."""
    measured = [row.update_s for row in _rows(workload, device) if row.update_s]
    if measured:
        return share * float(np.median(measured))
    passes = UPDATE_PASSES * (1 + workload.optimizer_vectors)
    moved = share * passes * workload.parameter_bytes
    return moved / (device.memory_bytes_per_s * device.efficiency) + device.overhead_s


def data_s(workload: Workload, device: Device) -> float:
    """Seconds to fetch a micro-batch that is held in memory; 0 if that was not measured."""
    by_size = {row.micro_batch_size: row.data_s for row in _rows(workload, device)}
    if not by_size:
        return 0.0
    nearest = min(by_size, key=lambda size: abs(log(size / workload.micro_batch_size)))
    return by_size[nearest] * workload.micro_batch_size / nearest


def correction(workload: Workload, device: Device, images: int) -> float:
    """Measured over calculated time, interpolated in log size, constant beyond; 1 if unmeasured."""
    rows = sorted(_rows(workload, device), key=lambda row: row.micro_batch_size)
    if not rows:
        return 1.0
    bare = Device(**{**device.__dict__, "measured": ()})
    ratios = [
        row.compute_s / micro_batch(workload, bare, row.micro_batch_size).compute_s for row in rows
    ]
    sizes = [log(row.micro_batch_size) for row in rows]
    return float(np.interp(log(images), sizes, ratios))


def copies_s(workload: Workload, device: Device) -> float:
    """Seconds to copy gradients into buckets, which a measured micro-batch includes."""
    rate = device.memory_bytes_per_s * device.efficiency
    return COPY_PASSES * workload.parameter_bytes / rate


def is_measured(workload: Workload, device: Device) -> bool:
    return bool(_rows(workload, device))


def error_of(workload: Workload, device: Device) -> float:
    rows = _rows(workload, device)
    return max((row.error for row in rows), default=device.error)


def _rows(workload: Workload, device: Device) -> list[MeasuredStep]:
    return [
        row
        for row in device.measured
        if (row.model, row.autocast) == (workload.model, workload.autocast)
    ]


def _rates(workload: Workload, device: Device) -> tuple[float, float]:
    dtype = workload.autocast if workload.autocast in HALF_PRECISION else "float32"
    other = "float16" if dtype == "bfloat16" else "bfloat16"
    peaks = device.peak_flops
    peak = peaks.get(dtype) or (dtype != "float32" and peaks.get(other)) or peaks["float32"]
    return peak * device.efficiency, device.memory_bytes_per_s * device.efficiency
