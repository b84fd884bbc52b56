"""The kinds of split, and how each cuts its layers.

`ByPaths` splits a module of several paths, whose outputs are concatenated (`find_paths`). All ranks
compute what paths have in common (the squeeze of a Fire block). Each part is a run of consecutive
paths, so the outputs of the parts are the module's output in parts.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from firecaffe.cluster.agree import gather_text
from firecaffe.errors import RecipeError
from firecaffe.meta_kernels import on_meta
from firecaffe.parallel import flow
from firecaffe.parallel.cut import ROWS, Cut, cut, scaled
from firecaffe.parallel.find_paths import PATHS, NoPathsError, Paths, find_paths, share_paths
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.layers_in_parts import (
    ByBoth,
    ByInputs,
    ByOutputs,
    HeldShare,
    MadeParts,
    SplitLayer,
    SplitPlace,
    check_padding,
    over_rows,
)
from firecaffe.parallel.tensor import whole


class ByPaths(SplitLayer):
    """A module in runs of paths. `common` makes their inputs; outputs are joined along `dim`."""

    def __init__(self, place: SplitPlace, made: MadeParts, common: nn.Module, dim: int) -> None:
        super().__init__(place, made)
        self.common, self.dim = common, dim
        self._outline: dict[str, Tensor] = {}
        self._is_trained = False
        self._cuts_known: dict[object, Cut] = {}

    def outline(self, layer: nn.Module) -> None:
        self._outline = {
            name: torch.empty_like(tensor, device="meta")
            for name, tensor in layer.state_dict().items()
        }
        self._is_trained = any(parameter.requires_grad for parameter in layer.parameters())

    def held(self) -> dict[str, HeldShare]:
        local_tensors = {
            name: tensor
            for part in (self.common, *self.parts.values())
            for name, tensor in part.state_dict(keep_vars=True).items()
        }
        return {
            name: HeldShare(
                [local_tensors.get(name, tensor)], is_elsewhere=name not in local_tensors
            )
            for name, tensor in self._outline.items()
        }

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        taken = self.common(*whole(inputs), **whole(options))
        output_parts = self._each(*_copies(self.place.group, taken))
        if torch.is_grad_enabled() and (
            self._is_trained or any(y.requires_grad for y in output_parts)
        ):
            # Even without weights, because all ranks must run the same backward.
            output_parts = [
                y if y.requires_grad else y.detach().requires_grad_() for y in output_parts
            ]
        dim = self.dim % output_parts[0].ndim
        return self._in_parts(output_parts, self._cut(output_parts, dim, taken), dim)

    def _cut(self, output_parts: Sequence[Tensor], dim: int, taken: Sequence[Any]) -> Cut:
        # Ranks exchange the lengths once for each shape of the inputs.
        shapes = tuple(value.shape for value in taken if isinstance(value, Tensor))
        if shapes not in self._cuts_known:
            lengths = " ".join(str(part.shape[dim]) for part in output_parts[: len(self.parts)])
            of_all = gather_text(self.place.group.group, lengths)
            ends = accumulate(map(int, " ".join(of_all).split()), initial=0)
            self._cuts_known[shapes] = tuple(ends)
        return self._cuts_known[shapes]


def by_paths(layer: nn.Module, place: SplitPlace) -> ByPaths:
    paths = find_paths(layer)
    ends = share_paths(layer, paths, place.group.num_parts)
    parts = [
        _part_of_path(layer, paths, ends[number], ends[number + 1]) for number in place.group.own
    ]
    text = f"{type(layer).__name__} of {len(paths.own)} paths"
    made = ByPaths(place, MadeParts(text, parts, {}), _common(layer, paths), paths.dim)
    made.outline(layer)
    return made.train(layer.training)


def _common(layer: nn.Module, paths: Paths) -> fx.GraphModule:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in paths.common:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in paths.taken))
    return fx.GraphModule(layer, graph)


def _part_of_path(layer: nn.Module, paths: Paths, first: int, last: int) -> fx.GraphModule:
    graph = fx.Graph()
    made = {node: graph.placeholder(f"taken_{i}") for i, node in enumerate(paths.taken)}
    for node in paths.graph.nodes:
        if any(node in path for path in paths.own[first:last]):
            made[node] = graph.node_copy(node, made.__getitem__)
    ends = [made[end] for end in paths.ends[first:last]]
    graph.output(graph.call_function(torch.cat, (ends, paths.dim)))
    return fx.GraphModule(layer, graph)


def _copies(group: PartGroup, taken: Sequence[Any]) -> list[Sequence[Any]]:
    # Tensors are copied together: a rank whose paths need one of them goes backward through all.
    tensors = [value for value in taken if isinstance(value, Tensor)]
    wanted = [tensor.requires_grad for tensor in tensors]

    def copied(*wholes: Tensor) -> list[Tensor]:
        return [copy for tensor in wholes for copy in group.copies(tensor)]

    def summed(*gradients: Tensor) -> list[Tensor | None]:
        of_tensors = zip(_runs(gradients, len(gradients) // len(wanted)), wanted, strict=True)
        return [group.sum(parts) if is_wanted else None for parts, is_wanted in of_tensors]

    copies = flow.with_conjugate(copied, summed, *tensors)
    count = len(copies) // len(tensors)
    by_tensor = iter(_runs(copies, count))
    return [next(by_tensor) if isinstance(value, Tensor) else [value] * count for value in taken]


def _runs(values: Sequence[Any], length: int) -> list[Sequence[Any]]:
    return [values[start : start + length] for start in range(0, len(values), length)]


def _linear(_: nn.Module, inputs: int, outputs: int, groups: int, bias: bool) -> nn.Module:
    return nn.Linear(inputs, outputs, bias)


def _conv(whole: Any, inputs: int, outputs: int, groups: int, bias: bool) -> nn.Module:
    shape = whole.kernel_size, whole.stride, whole.padding, whole.dilation
    return nn.Conv2d(inputs, outputs, *shape, groups, bias, whole.padding_mode)


def _norm(whole: Any, inputs: int, outputs: int, groups: int, bias: bool) -> nn.Module:
    settings = whole.eps, whole.momentum, whole.affine, whole.track_running_stats
    made: nn.Module = type(whole)(outputs, *settings, bias=bias)
    return made


class SplitKind(NamedTuple):
    """A kind of layer: how to make a smaller one, and the attributes with its size."""

    make: Callable[[nn.Module, int, int, int, bool], nn.Module]
    """(whole layer, inputs, outputs, groups, whether it has a bias) -> a smaller layer."""
    inputs: str
    outputs: str
    groups: str
    dim: int
    """The dimension of inputs and outputs: from the last, or 1 for the second."""


KINDS: dict[type[nn.Module], SplitKind] = {
    nn.Linear: SplitKind(_linear, "in_features", "out_features", "", -1),
    nn.Conv2d: SplitKind(_conv, "in_channels", "out_channels", "groups", -3),
    nn.BatchNorm1d: SplitKind(_norm, "num_features", "num_features", "num_features", 1),
    nn.BatchNorm2d: SplitKind(_norm, "num_features", "num_features", "num_features", 1),
}
"""The layers that can be split. Their subclasses may do something else."""


BY_OUTPUTS = ("neurons", "filters")
"""The splits that cut a layer without groups between its outputs."""


def elements_of(layer: nn.Module, word: str) -> tuple[int, str]:
    """Return the number and the name of the elements that a split cuts a layer between."""
    if word == PATHS:
        return len(find_paths(layer).own), PATHS
    kind = KINDS[type(layer)]
    num_groups = getattr(layer, kind.groups, 1)
    if kind.groups == kind.outputs:
        return num_groups, "channels"
    if num_groups > 1:
        return num_groups, "groups"
    return getattr(layer, kind.outputs if word in BY_OUTPUTS else kind.inputs), word


def check_elements(name: str, layer: nn.Module, word: str, num_parts: int) -> None:
    """Check a layer. Raises: RecipeError if it cannot be cut into so many parts."""
    if word == ROWS:
        check_padding(name, layer)
        return
    size, what = elements_of(layer, word)
    if size < num_parts:
        what = what if size > 1 else what.removesuffix("s")
        raise RecipeError(
            f"split: {name} has {size} {what}, fewer than {num_parts} parts; "
            f"leave it out of split, or take parts={size} or fewer"
        )


def by_outputs(layer: nn.Module, place: SplitPlace) -> SplitLayer:
    kind = KINDS[type(layer)]
    outputs = cut(getattr(layer, kind.outputs), place.group.num_parts)
    cuts = {"weight": (0, outputs), "bias": (0, outputs)}
    return ByOutputs(place, _made(layer, place, cuts, outputs=outputs), outputs, kind.dim)


def by_inputs(layer: nn.Module, place: SplitPlace) -> SplitLayer:
    kind, bias = KINDS[type(layer)], layer.bias
    inputs = cut(getattr(layer, kind.inputs), place.group.num_parts)
    made = _made(layer, place, {"weight": (1, inputs)}, inputs, bias=False)
    assert bias is None or isinstance(bias, nn.Parameter)
    return ByInputs(place, made, inputs, kind.dim, bias)


def by_both(layer: nn.Module, place: SplitPlace) -> SplitLayer:
    kind = KINDS[type(layer)]
    num_groups = getattr(layer, kind.groups)
    groups = cut(num_groups, place.group.num_parts)
    inputs = scaled(groups, getattr(layer, kind.inputs) // num_groups)
    outputs = scaled(groups, getattr(layer, kind.outputs) // num_groups)
    cuts = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (0, outputs))
    made = _made(layer, place, cuts, inputs, outputs, groups)
    return ByBoth(place, made, inputs, outputs, kind.dim)


def conv(layer: nn.Module, place: SplitPlace, ungrouped: Callable[..., SplitLayer]) -> SplitLayer:
    return by_both(layer, place) if layer.groups != 1 else ungrouped(layer, place)


SPLITS: dict[str, dict[type[nn.Module], Callable[[nn.Module, SplitPlace], nn.Module]]] = {
    "neurons": {nn.Linear: by_outputs, nn.BatchNorm1d: by_both},
    "inputs": {nn.Linear: by_inputs},
    "filters": {nn.Conv2d: partial(conv, ungrouped=by_outputs), nn.BatchNorm2d: by_both},
    "channels": {nn.Conv2d: partial(conv, ungrouped=by_inputs)},
    ROWS: {nn.Conv2d: over_rows, nn.BatchNorm2d: over_rows},
    PATHS: {},
}
"""The kinds of split with their layers. A batch norm follows the outputs of the layer before it."""


def can_split(layer: nn.Module, word: str) -> bool:
    return type(layer) in SPLITS[word] or (word == PATHS and not why_not(layer, word))


def why_not(layer: nn.Module, word: str) -> str:
    """Return why a module does not consist of paths; empty if it does, and for other splits."""
    if word != PATHS:
        return ""
    try:
        find_paths(layer)
    except NoPathsError as error:
        return str(error)
    return ""


def make_split(layer: nn.Module, place: SplitPlace) -> nn.Module:
    return SPLITS[place.word].get(type(layer), by_paths)(layer, place)


def _made(
    layer: nn.Module,
    place: SplitPlace,
    cuts: Mapping[str, tuple[int, Cut]],
    inputs: Cut = (),
    outputs: Cut = (),
    groups: Cut = (),
    *,
    bias: bool = True,
) -> MadeParts:
    """Make this rank's parts of a layer. An empty cut of inputs, outputs or groups: all of them."""
    kind, whole, parts = KINDS[type(layer)], layer.state_dict(keep_vars=True), []
    ends = ((kind.inputs, inputs), (kind.outputs, outputs), (kind.groups, groups))
    for index, number in enumerate(place.group.own):
        num_inputs, num_outputs, num_groups = (
            of[number + 1] - of[number] if of else getattr(layer, name, 1) for name, of in ends
        )
        has_bias = bias and layer.bias is not None
        with on_meta():
            made = kind.make(layer, num_inputs, num_outputs, num_groups, has_bias)
        for name in made.state_dict():
            if pieces := place.pieces.get(f"{place.name}.{name}"):
                tensor = pieces[index]
            else:
                tensor = whole[name].detach()
                if name in cuts:
                    dim, of = cuts[name]
                    tensor = tensor.narrow(dim, of[number], of[number + 1] - of[number])
                # A copy, because alignment may change bits.
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            if name in made._parameters:
                tensor = nn.Parameter(tensor, requires_grad=whole[name].requires_grad)
            setattr(made, name, tensor)
        parts.append(made.train(layer.training))
    return MadeParts(str(layer), parts, cuts)
