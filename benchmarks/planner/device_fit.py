"""Fits the shares of `planner/library_rates.toml`, and two simpler models, to published rates.

Each number has a value to start from, and how far (a standard deviation, of its logarithm) it may
lie from it; these are set by hand, in START and SPREAD, before the rows speak. A table of a library
is drawn to what all libraries have in common, and a device's scale to 1. Rows that lie far off
count as their distance, not its square, so that a wrong row does not rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import least_squares

from benchmarks.planner.device_rows import (
    Array,
    Kernels,
    Row,
    groups_of,
    is_tensor,
    profile_of,
    vectors_of,
)
from firecaffe.models.kernel import CONVOLUTIONS, DEPTHWISE, KINDS, MULTIPLIES, NORM
from firecaffe.planner.compute_time import (
    BACKWARD_PASSES,
    CAST_BYTES,
    FORWARD_PASSES,
    UPDATE_PASSES,
)
from firecaffe.planner.library_rates import HALF
from firecaffe.planner.offers import Sheet

START = {
    "float32": (1.4, 0.8, 1.5, 0.6, 0.6, 0.3, 0.85, 0.5),
    "tensor": (0.8, 0.8, 0.8, 0.7, 0.6, 0.3, 0.8, 0.4),
}
"""Shares by class, in the order of MULTIPLIES: Winograd's transform saves 2.25 times the products
of a 3x3, of which half is taken here; what CUTLASS's page shows of large matrices is 0.8 to 0.9."""
START_REREAD = {"float32": 1.6, "tensor": 0.43}
"""A tile of 32 at 20 operations a byte, and of 64 at 150."""
START_MEMORY = 0.8
START_TRANSPOSES = 1.0
START_OVERHEAD_S = 5e-6
SPREAD = {
    "share": 0.4,
    "library": 0.25,
    "reread": 0.7,
    "memory": 0.2,
    "transposes": 0.3,
    "overhead": 0.7,
    "device": 0.25,
}
ROW_SPREAD = 0.08
"""How far published rates of one thing lie apart, as a share."""

N = len(MULTIPLIES)


@dataclass(frozen=True)
class Problem:
    """Rows, with what the fit needs of them as arrays."""

    sheets: dict[str, Sheet]
    rows: Sequence[Row]

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels.of(self.rows)

    @cached_property
    def groups(self) -> list[tuple[str, str]]:
        return groups_of(self.rows)

    @cached_property
    def devices(self) -> list[str]:
        return sorted({row.device for row in self.rows})

    @cached_property
    def group(self) -> Array:
        return np.array([self.groups.index((row.arithmetic, row.library)) for row in self.rows])

    @cached_property
    def device(self) -> Array:
        return np.array([self.devices.index(row.device) for row in self.rows])

    @cached_property
    def flops(self) -> Array:
        return np.array([self.sheets[row.device].flops[row.precision] for row in self.rows])

    @cached_property
    def memory(self) -> Array:
        return np.array([self.sheets[row.device].memory_bytes_per_s for row in self.rows])

    @cached_property
    def seconds(self) -> Array:
        return np.array([row.seconds for row in self.rows])

    @cached_property
    def weights(self) -> Array:
        return np.array([profile_of(row.net).weight_bytes / 4 for row in self.rows])

    @cached_property
    def is_fitted(self) -> Array:
        return np.array([row.is_fitted for row in self.rows])

    def column(self, name: str) -> Array:
        return np.array([getattr(row, name) for row in self.rows])


@dataclass(frozen=True)
class Values:
    """What is fitted, as read from one vector of logarithms."""

    common: Array
    """Shares by float32 or tensor, and by class."""
    shares: Array
    """By group and class."""
    reread: Array
    matrix_memory: float
    memory: float
    transposes: float
    overhead_s: float
    scales: Array
    """By device."""


class ByClass:
    """The planner's model: shares by class of kernel."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        groups, devices = len(problem.groups), len(problem.devices)
        parts = [
            (np.log([START["float32"], START["tensor"]]).ravel(), SPREAD["share"]),
            (np.zeros(groups * N), SPREAD["library"]),
            (np.log([*START_REREAD.values()]), SPREAD["reread"]),
            (np.log([START_MEMORY, START_MEMORY]), SPREAD["memory"]),
            (np.log([START_TRANSPOSES]), SPREAD["transposes"]),
            (np.log([START_OVERHEAD_S]), SPREAD["overhead"]),
            (np.zeros(devices), SPREAD["device"]),
        ]
        self.start = np.concatenate([start for start, _ in parts])
        self.spread = np.concatenate([np.full(len(start), wide) for start, wide in parts])
        self.ends = np.cumsum([len(start) for start, _ in parts])
        self.mode = np.array([int(is_tensor(arithmetic)) for arithmetic, _ in problem.groups])
        self._tensor = np.array([is_tensor(row.arithmetic) for row in problem.rows]).astype(int)

    def values(self, vector: Array) -> Values:
        common, own, reread, memory, transposes, overhead, scales = np.split(vector, self.ends[:-1])
        common = common.reshape(2, N)
        matrix_memory, other = np.exp(memory)
        return Values(
            common=np.exp(common),
            shares=np.exp(common[self.mode] + own.reshape(-1, N)),
            reread=np.exp(reread),
            matrix_memory=float(matrix_memory),
            memory=float(other),
            transposes=float(np.exp(transposes[0])),
            overhead_s=float(np.exp(overhead[0])),
            scales=np.exp(scales),
        )

    def seconds(self, vector: Array) -> Array:
        found, on, all_ = self.values(vector), self.problem, self.problem.kernels
        at = all_.row
        rates = found.scales[on.device]
        flops, memory = (on.flops * rates)[at], (on.memory * rates)[at]
        size = np.where(on.column("arithmetic") == HALF, 2.0, 4.0)
        shares = np.concatenate([found.shares, np.ones((len(found.shares), 2))], 1)
        share = shares[on.group[at], all_.kind]
        moved = size[at] * (all_.moved + all_.weights)
        reread = found.reread[self._tensor[at]] * flops / memory / all_.side
        multiplies_s = all_.flops / (flops * share) * (1 + reread)
        multiplies_s += moved / (memory * found.matrix_memory)
        turned = self._turned * 2 * found.transposes
        multiplies_s += turned * size[at] * all_.moved / (memory * found.memory)
        deep_s = moved / (memory * share)
        is_deep = all_.kind == KINDS.index(DEPTHWISE)
        own_size = np.where(self._in_float32, 4.0, size[at])
        passes_s = self._passes * own_size * all_.moved / (memory * found.memory)
        kernel_s = all_.calls * np.where(is_deep, deep_s, multiplies_s)
        kernel_s = np.where(all_.kind < N, kernel_s, passes_s) + all_.calls * found.overhead_s
        total = np.add.reduceat(all_.count * kernel_s, all_.starts)
        casts = on.column("casts") * 2 * CAST_BYTES
        vectors = np.array([vectors_of(row.net) for row in on.rows])
        updates = on.column("has_update") * UPDATE_PASSES * (1 + vectors) * 4
        result: Array = total + (casts + updates) * on.weights / (on.memory * rates)
        return result

    @cached_property
    def _turned(self) -> Array:
        on, kind = self.problem, self.problem.kernels.kind
        is_convolution = (kind < len(CONVOLUTIONS)) & (kind != KINDS.index(DEPTHWISE))
        last = on.column("channels_last")[on.kernels.row]
        half = on.column("arithmetic")[on.kernels.row] == HALF
        return np.asarray(is_convolution & ~last & half, dtype=float)

    @cached_property
    def _in_float32(self) -> Array:
        on = self.problem
        return on.kernels.in_float32 & on.column("casts")[on.kernels.row]

    @cached_property
    def _passes(self) -> Array:
        norm, other = (FORWARD_PASSES[kind] + BACKWARD_PASSES[kind] for kind in KINDS[N:])
        return np.where(self.problem.kernels.kind == KINDS.index(NORM), norm, other)


class ByFlops(ByClass):
    """A control: seconds are operations over a share of the peak, one for each arithmetic."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.start = np.concatenate([np.log([0.4, 0.2]), np.zeros(len(problem.devices))])
        self.spread = np.concatenate([[1.0, 1.0], np.full(len(problem.devices), SPREAD["device"])])

    def seconds(self, vector: Array) -> Array:
        on, all_ = self.problem, self.problem.kernels
        flops = np.add.reduceat(all_.count * all_.calls * all_.flops, all_.starts)
        result: Array = flops / on.flops / np.exp(vector[self._tensor] + vector[2:][on.device])
        return result


class ByRoofline(ByClass):
    """The planner's earlier model: each kernel the longer of arithmetic and memory, at one share
    of both for each arithmetic."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        devices = len(problem.devices)
        self.start = np.concatenate([np.log([0.4, 0.4, 5e-6]), np.zeros(devices)])
        self.spread = np.concatenate([[1.0, 1.0, 1.0], np.full(devices, SPREAD["device"])])

    def seconds(self, vector: Array) -> Array:
        on, all_ = self.problem, self.problem.kernels
        share = np.exp(vector[self._tensor] + vector[3:][on.device])[all_.row]
        size = np.where(on.column("arithmetic") == HALF, 2.0, 4.0)[all_.row]
        products_s = all_.flops / on.flops[all_.row]
        moved_s = size * (all_.moved + all_.weights) / on.memory[all_.row]
        calls = np.where(all_.kind < N, all_.calls, 2.5)
        kernel_s = np.maximum(products_s, moved_s) / share * calls + all_.calls * np.exp(vector[2])
        result: Array = np.add.reduceat(all_.count * kernel_s, all_.starts)
        return result


def fit(model: ByClass, mask: Array, start: Array | None = None) -> Array:
    """Fit to the rows of the mask. start: a vector that is near, which then moves a few steps."""
    seconds = model.problem.seconds

    def residuals(vector: Array) -> Array:
        off = np.log(model.seconds(vector) / seconds)[mask] / ROW_SPREAD
        off = np.sign(off) * np.sqrt(8 * (np.sqrt(1 + off**2 / 4) - 1))
        return np.concatenate([off, (vector - model.start) / model.spread])

    given = model.start if start is None else start
    steps = 60 if start is None else 8
    found = least_squares(residuals, given, max_nfev=steps, ftol=1e-5, xtol=1e-5)
    return np.asarray(found.x, dtype=float)


def left_out(model: ByClass, whole: Array, by: str) -> Array:
    """Errors of each row, forecast by a fit without the rows of the same network or family.

    Without its family, a device's scale is 1, for nothing draws it from there.
    """
    problem = model.problem
    keys, errors = problem.column(by), np.full(len(problem.rows), np.nan)
    for key in np.unique(keys):
        of_key = keys == key
        if by == "family":
            vector = fit(model, problem.is_fitted & ~of_key)
        else:
            vector = fit(model, problem.is_fitted & ~of_key, whole)
        errors[of_key] = (model.seconds(vector) / problem.seconds - 1)[of_key]
    return errors
