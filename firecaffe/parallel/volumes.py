"""The numbers that each worker sends in a step: a layer's gradients, or activations if it is split.

They are for one layer by itself, from whole input to whole output. Each worker holds one part, or
an equal number of parts that form a branch of the tree. Source: docs/explanation/splitting.md;
Iandola et al. 2016 (FireCaffe) for |W| against |D|.
"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Sizes:
    weights: int
    inputs: int
    """Numbers of the input, per sample."""
    outputs: int
    input_elements: int
    """Elements that the input can be cut between: features, channels, or groups."""
    output_elements: int
    input_has_gradient: bool
    """False if nothing before the layer is trained, as for a network's first layer."""


def sum_numbers(workers: int, numbers: float) -> float:
    """Return what each worker sends to sum a vector on all workers; the mean if parts differ."""
    return 2 * (workers - 1) * numbers / workers


def gather_numbers(workers: int, numbers: float, elements: int) -> float:
    """Return what each sends to gather a tensor's parts on all: as much as the largest part."""
    return (workers - 1) * ceil(elements / workers) * numbers / elements


def data_numbers(layer: Sizes, workers: int) -> float:
    """Data parallelism, for a batch of any size: the weights' gradients are summed."""
    return sum_numbers(workers, layer.weights)


def by_outputs(layer: Sizes, workers: int) -> float:
    """Neurons or filters, per sample: outputs are gathered, gradients of inputs summed."""
    forward = gather_numbers(workers, layer.outputs, layer.output_elements)
    return forward + layer.input_has_gradient * sum_numbers(workers, layer.inputs)


def by_inputs(layer: Sizes, workers: int) -> float:
    """Inputs or channels, per sample: outputs are summed, gradients of inputs gathered."""
    backward = gather_numbers(workers, layer.inputs, layer.input_elements)
    return sum_numbers(workers, layer.outputs) + layer.input_has_gradient * backward


def by_both(layer: Sizes, workers: int) -> float:
    """Groups, which see only their own inputs, per sample: both are gathered."""
    forward = gather_numbers(workers, layer.outputs, layer.output_elements)
    backward = gather_numbers(workers, layer.inputs, layer.input_elements)
    return forward + layer.input_has_gradient * backward


def by_paths(workers: int, inputs: float, largest: float) -> float:
    """Paths: outputs are gathered, as many as the largest; gradients of all inputs are summed."""
    return (workers - 1) * largest + sum_numbers(workers, inputs)


def by_rows(workers: int, weights: int, halo: float) -> float:
    """Rows of images: weight gradients are summed; halos (`halo` per border) go there and back."""
    return sum_numbers(workers, weights) + 2 * (workers - 1) * halo / workers


def norm_by_rows(workers: int, weights: int, channels: int, has_gradient: bool) -> float:
    """Batch norm by rows: sums of weight gradients, means and variances (and their gradients)."""
    sums = 4 if has_gradient else 2
    return sum_numbers(workers, weights) + sums * sum_numbers(workers, channels)


def most_samples(by_data: float, a_sample: float) -> int:
    """Return the largest batch with fewer activations than gradients in a step; 0 if none."""
    return max(0, ceil(by_data / a_sample) - 1)
