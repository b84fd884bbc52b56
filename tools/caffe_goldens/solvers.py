"""Trainings of the whole net: every type of solver, every policy, and what a step is made of.

Standard library and numpy only, as cases.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import RandomState

from tools.caffe_goldens.cases import Case, drawn, scaled
from tools.caffe_goldens.nets import WHOLE

ITERATIONS = 12
LOOKS = (1, 3, 12)
"""The iterations after which the weights are kept."""
BATCH, CLASSES = 4, 5
SHAPE = (3, 10, 10)
DATA = f"""
layer {{
  name: "data" type: "MemoryData" top: "data" top: "label"
  memory_data_param {{ batch_size: {BATCH} channels: 3 height: 10 width: 10 }}
}}
"""
NET = WHOLE.replace("DATA", DATA)
FROZEN = NET.replace("lr_mult: 1 decay_mult: 1 } param { lr_mult: 2", "lr_mult: 0 } param {", 1)
"""The first layer's weights stay: its gradient is no part of what is clipped."""


class Training(NamedTuple):
    name: str
    words: str
    """Of the solver, without its net."""
    iter_size: int = 1
    net: str = NET

    @property
    def solver(self) -> str:
        return (
            f"max_iter: {ITERATIONS}\niter_size: {self.iter_size}\nsolver_mode: CPU\n{self.words}\n"
        )


RATE = "base_lr: 0.05"
FIXED = f'{RATE} lr_policy: "fixed"'
DECAY = "weight_decay: 0.02"
MOMENTUM = f"momentum: 0.9 {DECAY}"

TRAININGS = [
    Training("plain", FIXED),
    Training("decay", f"{FIXED} {DECAY}"),
    Training("momentum", f"{FIXED} {MOMENTUM}"),
    Training("step", f'{RATE} lr_policy: "step" gamma: 0.5 stepsize: 3 {MOMENTUM}'),
    Training("exp", f'{RATE} lr_policy: "exp" gamma: 0.8 {MOMENTUM}'),
    Training("inv", f'{RATE} lr_policy: "inv" gamma: 0.1 power: 0.75 {MOMENTUM}'),
    Training(
        "multistep",
        f'{RATE} lr_policy: "multistep" gamma: 0.3 stepvalue: 2 stepvalue: 5 stepvalue: 9 '
        f"{MOMENTUM}",
    ),
    Training("poly", f'{RATE} lr_policy: "poly" power: 0.5 {MOMENTUM}'),
    Training("sigmoid", f'{RATE} lr_policy: "sigmoid" gamma: 0.5 stepsize: 5 {MOMENTUM}'),
    Training("iter_size", f"{FIXED} {MOMENTUM}", iter_size=2),
    Training("clip", f"{FIXED} {MOMENTUM} clip_gradients: 0.5"),
    Training("clip_iter_size", f"{FIXED} {MOMENTUM} clip_gradients: 0.8", iter_size=2),
    Training("clip_frozen", f"{FIXED} {MOMENTUM} clip_gradients: 0.5", net=FROZEN),
    Training("l1", f'{FIXED} {MOMENTUM} regularization_type: "L1"'),
    Training("nesterov", f'type: "Nesterov" {FIXED} {MOMENTUM}'),
    Training(
        "nesterov_step",
        f'type: "Nesterov" {RATE} lr_policy: "step" gamma: 0.5 stepsize: 3 {MOMENTUM} '
        "clip_gradients: 0.8",
        iter_size=2,
    ),
    Training("adagrad", f'type: "AdaGrad" {FIXED} {DECAY} delta: 0.0001'),
    Training(
        "rmsprop",
        f'type: "RMSProp" base_lr: 0.002 lr_policy: "fixed" {DECAY} rms_decay: 0.95 delta: 0.0001',
    ),
    Training(
        "adadelta",
        f'type: "AdaDelta" base_lr: 1 lr_policy: "fixed" momentum: 0.95 delta: 0.00001 {DECAY}',
    ),
    Training(
        "adam",
        f'type: "Adam" base_lr: 0.002 lr_policy: "fixed" momentum: 0.9 momentum2: 0.99 '
        f"delta: 0.0001 {DECAY}",
    ),
    Training(
        "adam_inv",
        f'type: "Adam" base_lr: 0.003 lr_policy: "inv" gamma: 0.1 power: 0.75 momentum: 0.8 '
        f'momentum2: 0.999 delta: 0.0001 {DECAY} regularization_type: "L1"',
        iter_size=2,
    ),
    Training("old_form", f"solver_type: NESTEROV {FIXED} {MOMENTUM}"),
]


def samples(training: Training) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 3, 10, 10) and labels (N) in the order in which the training takes them."""
    random = RandomState(24)
    number = 2 * BATCH * ITERATIONS
    images = random.randint(-128, 128, (number, *SHAPE)) / 64
    labels = random.randint(0, CLASSES, number)
    taken = training.iter_size * BATCH * ITERATIONS
    return images[:taken].astype(np.float32), labels[:taken].astype(np.float32)


def start(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The first values of a parameter, LAYER/PLACE."""
    return drawn(Case("start", "", draws={name: scaled(0.25)}), name, shape)
