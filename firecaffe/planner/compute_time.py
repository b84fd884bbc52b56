"""Forecasts compute times kernel by kernel, corrected by measurements on the device.

A kernel's time is that of its multiplications at a share of the device's peak, if it has any, plus
that of its bytes at a share of the memory rate, plus the device's overhead. The shares are those of
the device's library: see `library_rates`. Backward multiplies as much again for the inputs and for
the weights. The overhead does not shrink with the batch, so small batches use less of the device
(the "skinny" effect of Keuper and Pfreundt 2016).

Source: Williams, Waterman, Patterson 2009 (roofline); Hockney 1991 (half-performance length).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log

import numpy as np

from firecaffe.data.dataset import tree_text
from firecaffe.exchange.schedule import BYTES_PER_ELEMENT
from firecaffe.models.kernel import CONVOLUTIONS, DEPTHWISE, ELEMENTWISE, MULTIPLIES, NORM, Kernel
from firecaffe.planner.cluster import STANDS_FOR, Device, MeasuredStep
from firecaffe.planner.library_rates import HALF, Rates, rates_of, tables
from firecaffe.planner.workload import LayerWork, Workload
from firecaffe.value_checks import digits_of

BACKWARD_CALLS = 2
"""Calls in backward of a layer with weights: the gradients of its inputs and of its weights."""

UPDATE_PASSES = 3
"""Passes over the weights for each vector of an update: weights, gradients and state."""

COPY_PASSES = 2

FORWARD_PASSES = {ELEMENTWISE: 1.0, NORM: 1.5}
BACKWARD_PASSES = {ELEMENTWISE: 1.5, NORM: 2.5}
"""Passes over what a kernel reads and writes. A norm reads its inputs for the statistics, too; its
backward reads inputs and gradients twice."""

CAST_BYTES = 6
"""To read a float32 and write it in half, or the other way."""

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
    forward_s, backward_s = layers_s(workload.layers, workload, device, images, scale)
    return MicroBatch(forward_s, backward_s[::-1])


def layers_s(
    layers: Sequence[LayerWork], workload: Workload, device: Device, images: int, scale: float
) -> tuple[float, tuple[float, ...]]:
    """Forward of all layers, and backward of each, times `scale`."""
    times = [layer_s(layer, workload, device, images) for layer in layers]
    return scale * sum(forward for forward, _ in times), tuple(scale * s for _, s in times)


def layer_s(
    layer: LayerWork, workload: Workload, device: Device, images: int
) -> tuple[float, float]:
    """Forward and backward of one layer on one micro-batch, by the device's figures alone."""
    forward_s = backward_s = 0.0
    for _, forward, backward in kernels_s(layer, workload, device, images):
        forward_s += forward
        backward_s += backward
    return forward_s, backward_s


def kernels_s(
    layer: LayerWork, workload: Workload, device: Device, images: int
) -> Iterator[tuple[str, float, float]]:
    """Yield the class, forward and backward of each kernel of a layer; casts are element-wise."""
    on = DeviceRates.of(workload.precision, workload.channels_last, device)
    share = layer.backward_share
    for kernel in layer.whole_kernels:
        own_s, backward_s = on.kernel_s(kernel, images), 0.0
        if kernel.kind in MULTIPLIES:
            wanted = BACKWARD_CALLS * share
            calls = wanted if kernel.has_input_gradient else max(0.0, wanted - 1)
            backward_s = calls * (own_s + device.overhead_s)
        elif share:
            passes = BACKWARD_PASSES[kernel.kind] / FORWARD_PASSES[kernel.kind]
            backward_s = passes * own_s + device.overhead_s
        yield kernel.kind, own_s + device.overhead_s, backward_s
    if on.arithmetic == HALF:  # weights are cast, and their gradients cast back
        cast_s = CAST_BYTES * layer.weight_bytes / BYTES_PER_ELEMENT / on.memory
        yield ELEMENTWISE, cast_s, cast_s * (share > 0)


@dataclass(frozen=True)
class DeviceRates:
    """A device's rates in one arithmetic, with its library's shares of them."""

    arithmetic: str
    rates: Rates
    flops: float
    memory: float
    channels_last: bool

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, precision: str, channels_last: bool, device: Device) -> "DeviceRates":
        flops, memory = _rates(precision, device)
        arithmetic = HALF if precision in HALF_PRECISION else precision
        rates = rates_of(device.library, arithmetic)
        return cls(arithmetic, rates, flops, memory, channels_last)

    def kernel_s(self, kernel: Kernel, images: int) -> float:
        """Seconds of one call, without the overhead."""
        rates, size = self.rates, 2 if self.arithmetic == HALF else BYTES_PER_ELEMENT
        if kernel.kind not in MULTIPLIES:
            size = BYTES_PER_ELEMENT if kernel.in_float32 else size
            passes = FORWARD_PASSES[kernel.kind]
            return passes * size * kernel.moved * images / (self.memory * rates.memory)
        moved = size * (kernel.moved * images + kernel.weights)
        if kernel.kind == DEPTHWISE:
            return moved / (self.memory * rates.shares[DEPTHWISE])
        side = min(kernel.side, kernel.rows * images) if kernel.rows else kernel.side
        reread = rates.reread * self.flops / self.memory / side if side else 0.0
        multiplies_s = kernel.flops * images / (self.flops * rates.shares[kernel.kind])
        seconds = multiplies_s * (1 + reread) + moved / (self.memory * rates.matrix_memory)
        if kernel.kind in CONVOLUTIONS and not self.channels_last:
            passes = 2 * rates.transposes
            seconds += passes * size * kernel.moved * images / (self.memory * rates.memory)
        return seconds


def update_s(workload: Workload, device: Device, share: float = 1.0) -> float:
    """Seconds of an update. share: of the weights, if the worker updates only some of them."""
    measured = [row.update_s for row in _rows(workload, device) if row.update_s]
    if measured:
        return share * float(np.median(measured))
    passes = UPDATE_PASSES * (1 + workload.optimizer_vectors)
    moved = share * passes * workload.parameter_bytes
    return moved / device.memory_rate + device.overhead_s


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
    bare = replace(device, measured=())
    ratios = [
        row.compute_s / micro_batch(workload, bare, row.micro_batch_size).compute_s for row in rows
    ]
    sizes = [log(row.micro_batch_size) for row in rows]
    return float(np.interp(log(images), sizes, ratios))


def copies_s(workload: Workload, device: Device) -> float:
    """Seconds to copy gradients into buckets, which a measured micro-batch includes."""
    return COPY_PASSES * workload.parameter_bytes / device.memory_rate


def doubts_of(workload: Workload, device: Device) -> list[str]:
    """Describe where a forecast assumes other arithmetic or memory layout than was asked for."""
    said, peaks = [], device.peak_flops
    if not _peak(workload.precision, peaks):
        said.append(f"{device.name} has no rate of {workload.precision}; that of float32 is taken")
    if workload.channels_last and is_measured(workload, device):
        said.append("measured steps do not name their memory format; they are taken as they are")
    return said


def contradictions(work: Workload, device: Device) -> list[str]:
    """Return a line for each published rate of one device that is outside the forecast's band."""
    said, error = [], error_of(work, device)
    alike = {
        "device": device.name,
        "model": work.model,
        "precision": work.precision,
        "channels_last": work.channels_last,
    }
    for rate in tables().get("known", ()):
        if not alike.items() <= rate.items():
            continue
        batch, images_per_s = rate["batch"], rate["images_per_s"]
        step_s = micro_batch(work, device, batch).compute_s + update_s(work, device)
        published_s = batch / images_per_s
        if not (1 - error) * step_s <= published_s <= (1 + error) * step_s:
            said.append(
                f"{rate['source']} has {digits_of(images_per_s, 4)} images/s of {work.model} on "
                f"one {device.name} with a batch of {batch}; the forecast is "
                f"{digits_of(batch / step_s, 4)}, within {error:.0%}"
            )
    return said


def is_measured(workload: Workload, device: Device) -> bool:
    return bool(_rows(workload, device))


def error_of(workload: Workload, device: Device) -> float:
    rows = _rows(workload, device)
    return max((row.error for row in rows), default=device.error)


def _rows(workload: Workload, device: Device) -> list[MeasuredStep]:
    asked = workload.model, workload.autocast, workload.tf32
    inputs = "", tree_text(workload.layout.inputs)
    return [
        row
        for row in device.measured
        if (row.model, row.autocast, row.tf32) == asked and row.inputs in inputs
    ]


def _rates(precision: str, device: Device) -> tuple[float, float]:
    peak = _peak(precision, device.peak_flops) or device.peak_flops["float32"]
    return peak * device.efficiency, device.memory_rate


def _peak(precision: str, peaks: Mapping[str, float]) -> float | None:
    """Find a peak; see `STANDS_FOR`."""
    return peaks.get(precision) or peaks.get(STANDS_FOR.get(precision, precision))
