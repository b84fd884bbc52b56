"""A network cut into stages: runs of its calls, one after the other.

A stage begins with a named module and has all calls of the network until the next stage begins, in
their order. So gradients are added, and dropout masks drawn, in the order of the whole network, and
the bits are the network's. torch.fx traces the network's forward, and that of each module inside
which a stage begins; their conditions on data cannot be traced. All other modules are called as
they are. A value for a later stage passes through the stages between.

The order in which each stage computes is a value too. A micro-batch goes forward through all stages
and then backward. Other micro-batches may be in other stages at the same time. Both orders leave a
stage idle for the same time; 1f1b holds fewer activations. Source: Huang et al. 2019 (GPipe, arXiv
1811.06965); Narayanan et al. 2019 (PipeDream, SOSP '19) and 2021 (arXiv 2104.04473): 1f1b with a
flush is PipeDream-Flush.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from firecaffe.errors import RecipeError

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Attributes in which a layer keeps hooks; the old form of weight_norm has one."""


@dataclass(frozen=True)
class Stage:
    number: int
    num_stages: int
    module: fx.GraphModule
    """The stage's modules, under the network's names; called with `takes`, returns a tuple."""
    takes: tuple[str, ...]
    """The values from the stage before, as torch.fx names them; none in the first stage."""
    gives: tuple[str, ...]
    """The values for the stage after; none in the last."""

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1


def cut_stages(network: nn.Module, names: Sequence[str]) -> list[Stage]:
    """Cut a network before each named module, as "features.6", in the order of its calls.

    Stages are for the present mode, training or evaluation; cut again for the other, with the same
    parameters. Raises: RecipeError if a name is no module or not called once, in order; a forward
    cannot be traced; or two stages would hold one parameter or buffer.
    """
    _check_names(network, names)
    before = set(vars(network))
    tracer = _trace(network, names)
    at = tracer.stage_of
    nodes = list(tracer.graph.nodes)
    for number, name in enumerate(("", *names)):
        if not any(at[node] == number and node.op in CALLS for node in nodes):
            where = f"the stage of {name}" if name else "the first stage"
            raise RecipeError(
                f"stages: {where} would be empty; leave out {name or names[0]}, or let the next "
                "stage begin later"
            )
    last = len(names)
    crossing = [
        [n for n in nodes if at[n] <= number and any(at[user] > number for user in n.users)]
        for number in range(last)
    ]
    stages = []
    for number in range(last + 1):
        takes = crossing[number - 1] if number else []
        gives = crossing[number] if number < last else None
        graph = _graph_of([node for node in nodes if at[node] == number], takes, gives)
        module = fx.GraphModule(network, graph, f"Stage{number}")
        _keep_names(module, network)
        named = (tuple(node.name for node in boundary or ()) for boundary in (takes, gives))
        stages.append(Stage(number, last + 1, module, *named))
    for name in set(vars(network)) - before:
        delattr(network, name)  # a tensor made by a forward; the stages hold it now
    _check_held_once(network, stages, [node for boundary in crossing for node in boundary])
    return stages


CALLS = ("call_module", "call_function", "call_method")


class _StageTracer(fx.Tracer):
    # Traces modules that contain the beginning of a stage, and notes the stage of each node.
    proxy_buffer_attributes = True

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names, self.stage = names, 0
        self.stage_of: dict[fx.Node, int] = {}
        # The modules that are being traced.
        self.inside = [""]

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # The network is called with its inputs only; other arguments have their defaults.
        inputs = self.create_proxy("placeholder", "inputs", (), {})
        return lambda network, given: network.forward(given), [self.root, inputs]

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not any(stage_name.startswith(f"{name}.") for stage_name in self.names)

    def call_module(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = self.path_of_module(module)
        if name in self.names:
            self._begin(name)
        self.inside.append(name)
        result = super().call_module(module, forward, args, kwargs)
        self.inside.pop()
        return result

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.stage_of[node] = self.stage
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, dict) and is_dataclass(a):
            # Networks of Hugging Face return these; torch.fx would make a plain dict.
            return self.create_node("call_function", type(a), (), super().create_arg(dict(a)))
        return super().create_arg(a)

    def _begin(self, name: str) -> None:
        place = self.names.index(name)
        if place < self.stage:
            raise RecipeError(
                f"stages: {name} is called more than once; a stage begins with a module that is "
                "called once"
            )
        if place > self.stage:
            raise RecipeError(
                f"stages: {name} is called before {self.names[self.stage]}; name modules in the "
                "order in which the network calls them"
            )
        self.stage += 1


def _trace(network: nn.Module, names: Sequence[str]) -> _StageTracer:
    tracer, before = _StageTracer(names), torch.get_rng_state()
    try:
        tracer.trace(network)
    except RecipeError:
        raise
    except Exception as error:
        where = tracer.inside[-1] or type(network).__name__
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RecipeError(
            f"stages: what {where} calls cannot be followed ({reason}); let no stage begin inside "
            "it, take what depends on data out of its forward into its own module, or make it "
            "an nn.Sequential of stages"
        ) from error
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise RecipeError(
            "stages: random numbers are drawn beside the network's modules, in a forward inside "
            "which a stage begins; draw them in another module"
        )
    if tracer.stage < len(names):
        mode = "training" if network.training else "evaluation"
        raise RecipeError(f"stages: {names[tracer.stage]} is not called in {mode}")
    return tracer


def _graph_of(
    nodes: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Sequence[fx.Node] | None
) -> fx.Graph:
    # `gives` is None for the network's outputs, which are among the nodes.
    graph = fx.Graph()
    made = {node: graph.placeholder(node.name) for node in takes}
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    if gives is not None:
        graph.output(tuple(made[node] for node in gives))
    return graph


def _keep_names(module: fx.GraphModule, network: nn.Module) -> None:
    # torch.fx registers tensors that are no buffers of the network; make them plain attributes.
    buffers = dict(network.named_buffers(remove_duplicate=False))
    for prefix, part in module.named_modules():
        for name in list(part._buffers):
            if ".".join(filter(None, (prefix, name))) not in buffers:
                setattr(part, name, part._buffers.pop(name))


def _check_names(network: nn.Module, names: Sequence[str]) -> None:
    known = [name for name, _ in network.named_modules(remove_duplicate=False) if name]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise RecipeError(f"stages: {name} is named twice")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            shown = close or [*known[:4], *(["…"] if len(known) > 4 else [])]
            raise RecipeError(
                f"stages: {name!r} is no module of the network, as {', '.join(shown)}"
            )
    for name, module in network.named_modules():
        is_followed = not name or any(stage_name.startswith(f"{name}.") for stage_name in names)
        if is_followed and any(getattr(module, hooks) for hooks in HOOKS):
            raise RecipeError(
                f"stages: {name or 'the network'} has hooks, which would be lost; remove them, or "
                "let no stage begin inside it"
            )


def _check_held_once(
    network: nn.Module, stages: Sequence[Stage], crossing: Sequence[fx.Node]
) -> None:
    tensors = {
        name: tensor
        for kind in (network.named_parameters, network.named_buffers)
        for name, tensor in kind(remove_duplicate=False)
    }
    for node in crossing:
        if node.op == "get_attr" and node.target in tensors:
            raise RecipeError(_held_twice(str(node.target), str(node.target)))
    holder: dict[torch.Tensor, tuple[int, str]] = {}
    for stage in stages:
        for name, tensor in (*stage.module.named_parameters(), *stage.module.named_buffers()):
            number, other = holder.setdefault(tensor, (stage.number, name))
            if number != stage.number:
                raise RecipeError(_held_twice(name, other))


def _held_twice(name: str, other: str) -> str:
    which = f"{name} is used" if name == other else f"{other} and {name} are one tensor, used"
    return f"stages: {which} in two stages; let no stage begin between them"


class Action(NamedTuple):
    is_forward: bool
    micro_batch: int


def gpipe(num_stages: int, num_micro_batches: int, stage: int) -> tuple[Action, ...]:
    """Return forward of all m micro-batches, then backward of all; m are held at once."""
    numbers = range(num_micro_batches)
    return (*(Action(True, n) for n in numbers), *(Action(False, n) for n in numbers))


def one_forward_one_backward(
    num_stages: int, num_micro_batches: int, stage: int
) -> tuple[Action, ...]:
    """Return a forward per later stage, then both in turn; stage k of K holds at most K - k."""
    ahead = min(num_stages - stage - 1, num_micro_batches)
    actions = [Action(True, n) for n in range(ahead)]
    for backward in range(num_micro_batches):
        if backward + ahead < num_micro_batches:
            actions.append(Action(True, backward + ahead))
        actions.append(Action(False, backward))
    return tuple(actions)


Order = Callable[[int, int, int], tuple[Action, ...]]
"""(stages, micro-batches, stage) -> that stage's actions. Backward has the order of forward."""

ORDERS: dict[str, Order] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def idle_share(num_stages: int, num_micro_batches: int) -> Fraction:
    """Return a stage's idle share of a step, (K - 1) / (m + K - 1), for equal stages."""
    return Fraction(num_stages - 1, num_micro_batches + num_stages - 1)


def most_held(actions: Sequence[Action]) -> int:
    held = most = 0
    for action in actions:
        held += 1 if action.is_forward else -1
        most = max(most, held)
    return most
