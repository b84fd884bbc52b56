"""The recipe's [solver] section, and which solvers can do what."""

from dataclasses import dataclass, field
from typing import Any, Literal

BY_ELEMENT = ("sgd", "nesterov", "adagrad", "adadelta", "rmsprop", "adam", "adamw")
"""Solvers that update each weight by itself, so that a part is updated like the whole tensor."""

BY_LAYER = (*BY_ELEMENT, "lars", "lamb")
"""Solvers that update each parameter by itself, wherever the other parameters are held."""

OF_PLAIN_MOMENTUM = ("sgd", "nesterov")
"""Solvers whose update is the rate times the gradient or times its momentum."""

OF_CAFFE = (*OF_PLAIN_MOMENTUM, "adam")
"""Solvers whose formulas differ in Caffe and torch. Caffe's other solvers are equal to torch's."""

MAY_L1 = ("sgd", "nesterov", "adagrad", "adadelta", "rmsprop", "adam")
"""Caffe's solvers, whose decay may pull each weight by the same amount toward 0."""

# adam has adamw for this, lamb always does it, and lars takes the decay's length into account.
MAY_DECOUPLE = ("sgd", "nesterov", "adagrad", "adadelta", "rmsprop")
"""Solvers whose decay may be applied separately from the update."""

MAY_CYCLE = ("sgd", "nesterov", "adam", "adamw", "lars", "lamb")
"""Solvers with a momentum that a policy may change."""

DROPPING = ("step", "multistep")


@dataclass(frozen=True)
class SolverConfig:
    """The optimizer and its learning rate.

    Args:
        type: sgd, nesterov, adagrad, adadelta, rmsprop, adam, adamw, lars or lamb; or your own
            torch.optim.Optimizer: package.module:Class, path/file.py:Class.
        args: Arguments of your own optimizer besides the rate, as `args = { rho = 0.9 }`.
        base_lr: Learning rate before the policy; with `scale`, the rate at `reference_batch_size`.
        scale: How the rate grows with the batch: linear, sqrt or none. With linear or sqrt, warm-up
            begins at the rate of the reference batch.
        reference_batch_size: Global batch that base_lr is meant for (scale).
        lr_policy: fixed, step, exp, inv, multistep, poly or sigmoid, by Caffe's formulas; cosine;
            one_cycle.
        gamma: Factor or slope of the policy.
        power: Exponent of inv and poly.
        stepsize: Steps between two drops (step), or the middle (sigmoid).
        stepvalue: Steps at which the rate drops (multistep).
        pct_start: Share of the training over which the rate rises to base_lr (one_cycle).
        div_factor: The first rate is base_lr divided by this (one_cycle).
        final_div_factor: The last rate is the first rate divided by this (one_cycle).
        base_momentum: Momentum, or beta 1, at the highest rate: it falls from `momentum` while the
            rate rises, and rises again while the rate falls (one_cycle). 0: it does not change.
        warmup_steps: Steps over which the rate rises linearly to that of the policy.
        momentum: Momentum (sgd, nesterov, lars); decay of means (adadelta); beta 1 (adam, adamw,
            lamb).
        momentum2: Beta 2 (adam, adamw, lamb).
        momentum_form: torch (the rate is outside the momentum; Adam's delta after its correction)
            or caffe (the rate is inside; delta before the correction; sgd, nesterov, adam). They
            differ when the rate changes, and for Adam if delta is not small.
        momentum_correction: Scale Caffe's momentum with the rate when the rate changes.
        trust: Share of its weights that a layer may move by, before the rate (lars).
        rms_decay: Decay of the mean square (rmsprop).
        delta: Added to a denominator against division by zero (adagrad, adadelta, rmsprop, adam,
            adamw, lamb).
        weight_decay: Weight of the penalty, or of the decoupled decay.
        decay_form: l2 or l1 (the decay is part of the gradient: it adds the weights, or their
            signs; l1: sgd, nesterov, adagrad, adadelta, rmsprop, adam); or decoupled (weights
            shrink by the rate times the decay, apart from the update; the same solvers without
            adam). Adam's decoupled form is adamw; lamb is always decoupled.
        lr_mult: Multipliers of the rate by pattern of a parameter's name, as `"*.bias" = 2`; the
            last match counts. `"@vector"` matches all of one dimension: biases and normalization.
        decay_mult: Multipliers of the weight decay, in the same form.
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
