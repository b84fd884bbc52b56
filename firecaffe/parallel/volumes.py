"""What each worker sends in a step: a layer's gradients, or its activations if it is split.

In numbers, not bytes, and of one layer by itself: it is given its whole input and its whole output
is wanted. Each worker holds one part, or equally many that make a whole branch of the tree.

Source: docs/parallel.md; Iandola et al. 2016 (FireCaffe) for |W| against |D|.
"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Sizes:
    """A layer, as far as it decides what is sent."""

    weights: int
    """Numbers that are trained."""
    inputs: int
    """Numbers of its input, of one sample."""
    outputs: int
    input_elements: int
    """Elements that its input can be cut between: features, channels, or groups."""
    output_elements: int
    input_has_gradient: bool
    """False if nothing before it is trained, as of a network's first layer."""


def sum_numbers(workers: int, numbers: float) -> float:
    """What each of the workers sends until all have the sum of everybody's vector; the mean over
    workers, if they do not divide its numbers.
    """
    return 2 * (workers - 1) * numbers / workers


def gather_numbers(workers: int, numbers: float, elements: int) -> float:
    """What each sends until all have all parts of a tensor of which each has some elements: as much
    as the one with the most.
    """
    return (workers - 1) * ceil(elements / workers) * numbers / elements


def halo_numbers(workers: int, numbers: float, elements: int, halo: int) -> float:
    """What each sends until the parts of a tensor have their halos; the mean over workers, for the
    first and the last send on one side alone.

    elements: of all parts. halo: elements that a part sees of its neighbours, on both sides
    together; no worker has fewer than it sends.
    """
    return (workers - 1) * halo * numbers / elements / workers


def data_numbers(layer: Sizes, workers: int) -> float:
    """By data, for a batch of any size: the sum of the weights' gradients."""
    return sum_numbers(workers, layer.weights)


def by_outputs(layer: Sizes, workers: int) -> float:
    """Neurons or filters, for each sample: outputs are gathered, gradients of inputs summed."""
    forward = gather_numbers(workers, layer.outputs, layer.output_elements)
    return forward + layer.input_has_gradient * sum_numbers(workers, layer.inputs)


def by_inputs(layer: Sizes, workers: int) -> float:
    """Inputs or channels, for each sample: outputs are summed, gradients of inputs gathered."""
    backward = gather_numbers(workers, layer.inputs, layer.input_elements)
    return sum_numbers(workers, layer.outputs) + layer.input_has_gradient * backward


def by_both(layer: Sizes, workers: int) -> float:
    """Groups, which see their own inputs alone, for each sample: both are gathered."""
    forward = gather_numbers(workers, layer.outputs, layer.output_elements)
    backward = gather_numbers(workers, layer.inputs, layer.input_elements)
    return forward + layer.input_has_gradient * backward


def by_paths(workers: int, inputs: float, largest: float) -> float:
    """Paths of a module: outputs are gathered, gradients of what the paths take are summed.

    inputs: numbers that the paths take, all together. largest: outputs of the worker with the most,
    for as many are sent by each.
    """
    return (workers - 1) * largest + sum_numbers(workers, inputs)


def by_rows(workers: int, weights: int, halo: float) -> float:
    """Rows of images: the gradients of the weights are summed; halos go there and back.

    halo: numbers that cross the border of two workers, both ways together.
    """
    return sum_numbers(workers, weights) + 2 * (workers - 1) * halo / workers


def norm_by_rows(workers: int, weights: int, channels: int, has_gradient: bool) -> float:
    """A batch normalization by rows: the sums of its means and variances, of their gradients if
    that of the input is wanted, and of the gradients of its weights.
    """
    sums = 4 if has_gradient else 2
    return sum_numbers(workers, weights) + sums * sum_numbers(workers, channels)


def most_samples(by_data: float, a_sample: float) -> int:
    """The largest batch, of all workers together, with which activations are fewer than gradients;
    0 if there is none.

    by_data: numbers of a step. a_sample: numbers for each sample, more than 0.
    """
    return max(0, ceil(by_data / a_sample) - 1)
