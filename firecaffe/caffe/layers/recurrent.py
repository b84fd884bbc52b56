"""Layers over sequences: RNN, LSTM, LSTMUnit, ContinuationIndicator. Time is the first axis.

`cont` is, for each step and stream, 1 if a sequence continues and 0 if one begins. Every forward
starts from a state of 0, or from the bottoms that expose_hidden adds. Caffe starts from the last
state of the previous batch, which is the same if each batch begins with cont 0. A state kept across
batches would make the result depend on the number of workers. Source: Caffe's API documentation
(caffe.berkeleyvision.org/doxygen); Donahue et al. 2014 (arXiv 1411.4389). The gates have the order
input, forget, output, candidate. An exposed state passes no gradient back, as in Caffe.
"""

import math
from abc import abstractmethod
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firecaffe.caffe.layers.spec import Function, Kind, Spec

MAX_STEPS = 10_000
"""The maximum steps of a sequence. Each is computed separately; Caffe makes layers of each."""


def unit(cell: Tensor, gates: Tensor, cont: Tensor) -> tuple[Tensor, Tensor]:
    into, forget, out, candidate = gates.chunk(4, -1)
    cell = cont * forget.sigmoid() * cell + into.sigmoid() * candidate.tanh()
    return cell, out.sigmoid() * cell.tanh()


class Recurrent(nn.Module):
    """A network whose forward(x, cont[, static][, states]) returns (T, N, D) and exposed states.

    The inputs are (T, N, …), (T, N), (N, …) and, if exposed, states of (1, N, D), h before others.
    The exposed states are the last ones.
    """

    states = 1
    gates = 1
    """Rows of weights for each number of h."""

    def __init__(self, inputs: int, static: int, num_output: int, expose: bool) -> None:
        """inputs, static: Number of values per step, and per sequence (0: no static input)."""
        super().__init__()
        rows = self.gates * num_output
        self.input_weight = nn.Parameter(torch.zeros(rows, inputs))
        self.bias = nn.Parameter(torch.zeros(rows))
        if static:
            self.static_weight = nn.Parameter(torch.zeros(rows, static))
        self.hidden_weight = nn.Parameter(torch.zeros(rows, num_output))
        self.has_static, self.expose = static > 0, expose

    def forward(self, values: Tensor, cont: Tensor, *more: Tensor) -> Tensor | tuple[Tensor, ...]:
        into = F.linear(values.flatten(2), self.input_weight, self.bias)
        if self.has_static:
            into = into + F.linear(more[0].flatten(1), self.static_weight)
        states = [into.new_zeros(values.shape[1], self.hidden_weight.shape[1])] * self.states
        if self.expose:
            states = [state.detach()[0] for state in more[-self.states :]]
        outputs = []
        for step, goes_on in zip(into.unbind(0), cont.unsqueeze(-1).unbind(0), strict=True):
            gates = step + F.linear(states[0] * goes_on, self.hidden_weight)
            states = self.next(states, gates, goes_on)
            outputs.append(states[0])
        top = self.top(torch.stack(outputs))
        return (top, *(state.detach()[None] for state in states)) if self.expose else top

    @abstractmethod
    def next(self, states: list[Tensor], gates: Tensor, cont: Tensor) -> list[Tensor]: ...

    def top(self, outputs: Tensor) -> Tensor:
        return outputs


class LSTM(Recurrent):
    states, gates = 2, 4

    def next(self, states: list[Tensor], gates: Tensor, cont: Tensor) -> list[Tensor]:
        cell, hidden = unit(states[1], gates, cont)
        return [hidden, cell]


class RNN(Recurrent):
    """A recurrent network, whose top is tanh(output_weight · h + output_bias).

    h is tanh(hidden_weight · cont · h + input_weight · x [+ static_weight · static] + bias).
    """

    def __init__(self, inputs: int, static: int, num_output: int, expose: bool) -> None:
        super().__init__(inputs, static, num_output, expose)
        self.output_weight = nn.Parameter(torch.zeros(num_output, num_output))
        self.output_bias = nn.Parameter(torch.zeros(num_output))

    def next(self, states: list[Tensor], gates: Tensor, cont: Tensor) -> list[Tensor]:
        return [gates.tanh()]

    def top(self, outputs: Tensor) -> Tensor:
        return F.linear(outputs, self.output_weight, self.output_bias).tanh()


def _lstm_unit(cell: Tensor, gates: Tensor, cont: Tensor) -> tuple[Tensor, Tensor]:
    """One step of an LSTM: (1, N, D), (1, N, 4 · D) and (1, N) to the next c and h."""
    return unit(cell, gates, cont.unsqueeze(-1))


class ContinuationIndicator(nn.Module):
    """Return (T, N) ones, with zeros at the first step: each batch begins new sequences."""

    def __init__(self, steps: int, streams: int) -> None:
        super().__init__()
        self.register_buffer("cont", torch.ones(steps, streams), persistent=False)
        self.cont: Tensor
        self.cont[0] = 0

    def forward(self) -> Tensor:
        return self.cont


def recurrent(spec: Spec, kind: type[Recurrent]) -> Recurrent:
    expose = spec.param.flag("expose_hidden")
    exposed = kind.states if expose else 0
    spec.check_bottoms(2 + exposed, 3 + exposed)
    spec.check_tops(1 + exposed)
    values, cont = tuple(spec.bottoms[0]), tuple(spec.bottoms[1])
    num_output = spec.positive("num_output")
    if len(values) < 2 or cont != values[:2]:
        raise spec.error(
            f" has the bottoms {values} and {cont}; expected "
            "(steps, streams, …) and (steps, streams)"
        )
    if not 1 <= values[0] <= MAX_STEPS:
        raise spec.error(f" has {values[0]} steps; expected 1 to {MAX_STEPS:,}")
    for bottom in spec.bottoms[len(spec.bottoms) - exposed :]:
        if tuple(bottom) != (1, values[1], num_output):
            raise spec.error(
                f" starts from the state {tuple(bottom)}; expected {(1, values[1], num_output)}"
            )
    static = 0
    if len(spec.bottoms) > 2 + exposed:
        static = math.prod(spec.bottoms[2][1:])
        if spec.bottoms[2][0] != values[1]:
            raise spec.error(
                f" has static values for {spec.bottoms[2][0]} streams; expected {values[1]}"
            )
    module = kind(math.prod(values[2:]), static, num_output, expose)
    for name, tensor in module.named_parameters():
        spec.fill("bias_filler" if name.endswith("bias") else "weight_filler", tensor)
    return module


def lstm_unit(spec: Spec) -> Function:
    spec.check_tops(2)
    for bottom, axes in enumerate((3, 3, 2)):
        spec.check_axes(axes, bottom)
    _, streams, size = spec.bottoms[0]
    if tuple(spec.bottoms[1]) != (1, streams, 4 * size) or tuple(spec.bottoms[2]) != (1, streams):
        raise spec.error(
            f" has the bottoms {tuple(map(tuple, spec.bottoms))}; "
            "expected (1, N, D), (1, N, 4 · D) and (1, N)"
        )
    return Function(_lstm_unit)


def continuation_indicator(spec: Spec) -> ContinuationIndicator:
    return ContinuationIndicator(spec.positive("time_step"), spec.positive("batch_size"))


LSTM_BLOBS = ("input_weight", "bias", "static_weight", "hidden_weight")
RNN_BLOBS = (*LSTM_BLOBS, "output_weight", "output_bias")
IGNORED = ("debug_info",)

LAYERS = {
    "ContinuationIndicator": Kind(
        continuation_indicator, "continuation_indicator_param", (), bottoms=(0,)
    ),
    "LSTM": Kind(
        partial(recurrent, kind=LSTM), "recurrent_param", LSTM_BLOBS, bottoms=(), ignored=IGNORED
    ),
    "LSTMUnit": Kind(lstm_unit, "", (), bottoms=(3,)),
    "RNN": Kind(
        partial(recurrent, kind=RNN), "recurrent_param", RNN_BLOBS, bottoms=(), ignored=IGNORED
    ),
}
