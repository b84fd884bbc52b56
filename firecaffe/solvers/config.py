"""The recipe's [solver] section."""

from dataclasses import dataclass, field
from typing import Any, Literal

BY_ELEMENT = ("sgd", "nesterov", "adagrad", "adadelta", "rmsprop", "adam", "adamw")
"""Solvers that treat each weight by itself, so that a part is updated as the whole would be."""

BY_LAYER = (*BY_ELEMENT, "lars", "lamb")
"""Solvers that treat each parameter by itself, so that it does not matter who has the others."""

OF_PLAIN_MOMENTUM = ("sgd", "nesterov")
"""Solvers whose update is the rate times the gradient, or its momentum."""

OF_CAFFE = (*OF_PLAIN_MOMENTUM, "adam")
"""The solvers that Caffe has in a form of its own. Its others are torch's."""

MAY_L1 = ("sgd", "nesterov", "adagrad", "adadelta", "rmsprop", "adam")
"""The solvers whose decay may pull each weight by the same, toward 0: those of Caffe."""

MAY_DECOUPLE = ("sgd", "nesterov", "adagrad", "adadelta", "rmsprop")
"""The solvers whose decay may stand beside the update. Adam's form of it is adamw, lamb has no
other, and lars takes the length of the decay into account."""

MAY_CYCLE = ("sgd", "nesterov", "adam", "adamw", "lars", "lamb")
"""The solvers with a momentum that a policy may move."""

DROPPING = ("step", "multistep")
"""The policies whose rate drops."""


@dataclass(frozen=True)
class SolverConfig:
    """The optimizer and its learning rate.

    Args:
        type: sgd, nesterov, adagrad, adadelta, rmsprop, adam, adamw, lars or lamb; or a
            torch.optim.Optimizer of your own: package.module:Class, path/file.py:Class.
        args: What an optimizer of your own is made with beside the rate, as `args = { rho = 0.9 }`.
        base_lr: Learning rate before the policy; at `reference_batch_size`, where there is a scale.
        scale: How the rate grows with the batch: linear, sqrt or none. With it, warm-up begins at
            the rate of the reference.
        reference_batch_size: Global batch that base_lr is for (scale).
        lr_policy: fixed, step, exp, inv, multistep, poly or sigmoid, by Caffe's formulas; cosine;
            one_cycle.
        gamma: Factor or slope of the policy.
        power: Exponent of inv and poly.
        stepsize: Steps between two drops (step), or the middle (sigmoid).
        stepvalue: Steps at which the rate drops (multistep).
        pct_start: Share of the training over which the rate rises to base_lr (one_cycle).
        div_factor: What base_lr is divided by for the first rate (one_cycle).
        final_div_factor: What the first rate is divided by for the last (one_cycle).
        base_momentum: Momentum, or beta 1, at the highest rate: it falls from `momentum` as the
            rate rises, and comes back as it falls (one_cycle). 0: it stays.
        warmup_steps: Steps over which the rate rises linearly to the policy's.
        momentum: Momentum (sgd, nesterov, lars); decay of means (adadelta); beta 1 (adam, adamw,
            lamb).
        momentum2: Beta 2 (adam, adamw, lamb).
        momentum_form: torch (the rate outside the momentum; Adam's delta after its correction) or
            caffe (the rate inside; delta before the correction; sgd, nesterov, adam).
        momentum_correction: Scale Caffe's momentum with the rate where that changes.
        trust: Share of its weights that a layer may move by, before the rate (lars).
        rms_decay: Decay of the mean square (rmsprop).
        delta: Added to a denominator against division by zero (adagrad, adadelta, rmsprop,
            adam, adamw, lamb).
        weight_decay: Weight of the penalty, or of the decay beside it.
        decay_form: l2 or l1 (the decay is part of the gradient: it adds the weights, or their
            signs; l1: sgd, nesterov, adagrad, adadelta, rmsprop, adam); or decoupled (weights
            shrink by the rate times the decay, beside the update; the same solvers without adam).
            Adam's decoupled form is adamw; lamb has it always.
        lr_mult: Multipliers of the rate by pattern of a parameter's name, as `"*.bias" = 2`; the
            last match counts. `"@vector"` is all of one dimension: biases and normalization.
        decay_mult: Multipliers of the weight decay, likewise.
        clip_gradients: Largest L2 norm of the gradient; 0 does not clip.
    """

    type: str = "sgd"
    args: dict[str, Any] = field(default_factory=dict)
    base_lr: float = 0.01
    scale: str = "none"
    reference_batch_size: int = 0
    lr_policy: str = "fixed"
    gamma: float = 0.0
    power: float = 1.0
    stepsize: int = 0
    stepvalue: list[int] = field(default_factory=list)
    pct_start: float = 0.3
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    base_momentum: float = 0.0
    warmup_steps: int = 0
    momentum: float = 0.9
    momentum2: float = 0.999
    momentum_form: str = "torch"
    momentum_correction: bool = False
    trust: float = 0.001
    rms_decay: float = 0.99
    delta: float = 1e-8
    weight_decay: float = 0.0
    decay_form: Literal["l2", "l1", "decoupled"] = "l2"
    lr_mult: dict[str, float] = field(default_factory=dict)
    decay_mult: dict[str, float] = field(default_factory=dict)
    clip_gradients: float = 0.0


def needs_norms(solver: SolverConfig) -> bool:
    """Whether an update needs norms of whole parameters."""
    return bool(solver.clip_gradients) or solver.type not in BY_ELEMENT
