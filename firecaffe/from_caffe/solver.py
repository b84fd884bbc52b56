"""Convert a solver's update rule, rate policy, clipping and decay to the section [solver].

Source: BVLC/caffe, src/caffe/proto/caffe.proto (SolverParameter, its defaults) and
src/caffe/solvers. Checked against a real Caffe.
"""

from typing import Any

from firecaffe.caffe.message import Message
from firecaffe.from_caffe.import_report import Report

TYPES = {
    "SGD": "sgd",
    "Nesterov": "nesterov",
    "AdaGrad": "adagrad",
    "RMSProp": "rmsprop",
    "AdaDelta": "adadelta",
    "Adam": "adam",
}
"""Caffe's solvers by name, in the order of the old enum solver_type."""

ENUM = tuple(name.upper() for name in TYPES)

ITS_FORM = ("SGD", "Nesterov", "Adam")
"""The solvers whose formula differs from torch's."""

NUMBERS: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum",),
    "Nesterov": ("momentum",),
    "AdaGrad": ("delta",),
    "RMSProp": ("rms_decay", "delta"),
    "AdaDelta": ("momentum", "delta"),
    "Adam": ("momentum", "momentum2", "delta"),
}

NO_MOMENTUM = ("AdaGrad", "RMSProp")
"""The solvers for which Caffe refuses a momentum."""

DEFAULTS = {
    "momentum": 0.0,
    "momentum2": 0.999,
    "rms_decay": 0.99,
    "delta": 1e-8,
    "gamma": 0.0,
    "power": 0.0,
}
"""Caffe's defaults. A recipe's differ, so all are written to it."""

POLICIES: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "step": ("gamma", "stepsize"),
    "exp": ("gamma",),
    "inv": ("gamma", "power"),
    "multistep": ("gamma", "stepvalue"),
    "poly": ("power",),
    "sigmoid": ("gamma", "stepsize"),
}

REGULARIZATIONS = ("L2", "L1")


def read_update(solver: Message, iter_size: int, report: Report) -> dict[str, Any]:
    """Return the section [solver] without multipliers. Raises CaffeError if it is unsupported."""
    return {
        **_type(solver, report),
        **_rate(solver, report),
        **_decay(solver, report),
        **_clip(solver, iter_size, report),
    }


def _type(solver: Message, report: Report) -> dict[str, Any]:
    kind, field = _kind(solver)
    settings: dict[str, Any] = {"type": TYPES[kind]}
    if solver.number("momentum") and kind in NO_MOMENTUM:
        raise solver.error(
            f"momentum is {solver.number('momentum'):g} with type {kind}, which has none; Caffe "
            "refuses it too",
            solver.line_of("momentum"),
        )
    settings |= {name: solver.number(name, DEFAULTS[name]) for name in NUMBERS[kind]}
    if kind in ITS_FORM:
        settings["momentum_form"] = "caffe"
    if kind == "Nesterov" and not settings["momentum"]:
        settings["type"] = "sgd"
        report.differs(solver, field, "Nesterov without a momentum is the same as sgd")
    listed = ", ".join(f"{name} {settings[name]:g}" for name in NUMBERS[kind])
    report.became(
        solver, field, f"{kind}: solver.type {settings['type']}, {listed}, in Caffe's form"
    )
    _without_effect(
        solver, set(DEFAULTS) - {"gamma", "power"}, NUMBERS[kind], f"type {kind}", report
    )
    return settings


def _kind(solver: Message) -> tuple[str, str]:
    if not solver.has("solver_type"):
        kind = solver.text("type", "SGD")
        if kind not in TYPES:
            raise solver.error(
                f'type is "{kind}"; expected one of {", ".join(TYPES)}', solver.line_of("type")
            )
        return kind, "type"
    if solver.has("type"):
        raise solver.error(
            "both type and solver_type, which Caffe refuses; expected one of them",
            solver.line_of("solver_type"),
        )
    return list(TYPES)[ENUM.index(solver.choice("solver_type", ENUM, "SGD"))], "solver_type"


def _rate(solver: Message, report: Report) -> dict[str, Any]:
    policy = solver.text("lr_policy")
    if policy not in POLICIES:
        problem = f'lr_policy is "{policy}"' if policy else "there is no lr_policy"
        raise solver.error(
            f"{problem}; expected one of {', '.join(POLICIES)}", solver.line_of("lr_policy")
        )
    if not solver.has("base_lr"):
        raise solver.error("there is no base_lr; expected the learning rate")
    settings: dict[str, Any] = {"base_lr": solver.number("base_lr"), "lr_policy": policy}
    for name in POLICIES[policy]:
        if name == "stepvalue":
            settings[name] = solver.integers(name)
        elif name == "stepsize":
            settings[name] = solver.integer(name)
        else:
            settings[name] = solver.number(name, DEFAULTS[name])
    if policy == "multistep" and not settings["stepvalue"]:
        settings = {"base_lr": settings["base_lr"], "lr_policy": "fixed"}
        report.differs(solver, "lr_policy", "multistep without a stepvalue is fixed")
    listed = ", ".join(f"{name} {value}" for name, value in settings.items())
    report.became(solver, "lr_policy", f"the rate: {listed}, by Caffe's formula")
    names = {name for needed in POLICIES.values() for name in needed}
    _without_effect(solver, names, POLICIES[policy], f"lr_policy {policy}", report)
    return settings


def _without_effect(
    solver: Message, names: set[str], taken: tuple[str, ...], choice: str, report: Report
) -> None:
    for name in sorted(names - {*taken}):
        if solver.has(name):
            report.became(solver, name, f"{name} has no effect with {choice}, in Caffe neither")


def _decay(solver: Message, report: Report) -> dict[str, Any]:
    form = solver.text("regularization_type", "L2")
    if form not in REGULARIZATIONS:
        raise solver.error(
            f'regularization_type is "{form}"; expected L2 or L1',
            solver.line_of("regularization_type"),
        )
    decay = solver.number("weight_decay")
    if not decay:
        return {}
    report.became(
        solver, "weight_decay", f"{form} penalty: solver.weight_decay {decay:g}, after the clip"
    )
    return {"weight_decay": decay} | ({"decay_form": "l1"} if form == "L1" else {})


def _clip(solver: Message, iter_size: int, report: Report) -> dict[str, Any]:
    clip = solver.number("clip_gradients", -1.0)
    if clip < 0:
        return {}
    if clip == 0:
        raise solver.error(
            "clip_gradients is 0, which makes every gradient 0; leave it out not to clip",
            solver.line_of("clip_gradients"),
        )
    what = f"solver.clip_gradients {clip / iter_size:g}"
    if iter_size > 1:
        what += (
            f": Caffe clips the sum of {iter_size} passes to {clip:g} and divides it then, here "
            "the mean is clipped"
        )
    report.became(solver, "clip_gradients", what)
    return {"clip_gradients": clip / iter_size}
