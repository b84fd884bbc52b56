"""Networks of which some layers are split over the ranks of a group."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from firecaffe.cluster.agree import agree, digest
from firecaffe.errors import RecipeError
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.layers_in_parts import HeldShare, Piece, SplitLayer, SplitPlace
from firecaffe.parallel.split_kinds import SPLITS, can_split, check_elements, make_split, why_not
from firecaffe.parallel.stages import HOOKS
from firecaffe.parallel.tensor import whole
from firecaffe.transport.collect import HeldPart, collect, list_wholes


class Split(nn.Module):
    """A network of which each rank of a group holds some parts.

    `firecaffe.adapt.split_layers` makes it.

    Call it like the network, on all ranks with the same samples. It returns the network's whole
    result on all. Parameters, gradients, `state_dict` and an optimizer's state are this rank's: its
    parts of split layers, as `module.classifier.0.parts.2.weight`, and the whole of other layers,
    equal on all ranks.
    """

    def __init__(self, module: nn.Module, group: PartGroup) -> None:
        super().__init__()
        self.module, self.group = module, group
        self._compared: set[bool] = set()

    # The compiler cannot trace a tensor in parts. torch.compiler.disable would load the compiler at
    # import, which takes a second per process. This way, the first call loads it.
    @_disable_dynamo
    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the network returns.

        Raises: AgreementError if ranks were first called with different inputs, or draw different
        random numbers; PeerLostError.
        """
        if self.group.group.world_size == 1 or self.training in self._compared:
            return whole(self.module(*inputs, **options))
        self._compared.add(self.training)
        tensors = [value for value in tree_leaves((inputs, options)) if isinstance(value, Tensor)]
        samples = digest((str(place), tensor) for place, tensor in enumerate(tensors))
        agree(
            self.group.group, {"what it gives the split network, which must be the same": samples}
        )
        before = _random_state(tensors)
        outputs = whole(self.module(*inputs, **options))
        draws = digest([("state", before)]) if not before.equal(_random_state(tensors)) else ""
        agree(self.group.group, {"the state of torch's random numbers, of which it draws": draws})
        return outputs

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Return the state of the network before the split, on the CPU of the group's first rank.

        All ranks must call it. Others send their parts, tensor by tensor, and get an empty state.

        Raises: PeerLostError.
        """
        group, own, state = self.group.group, self.group.own, {}
        for name, held in self._held():
            part = HeldPart(held.own[0].detach())
            if held.cut:
                rows = torch.cat([piece.detach() for piece in held.own], held.dim)
                ends = range(held.cut[own.start], held.cut[own.stop])
                part = HeldPart(rows, ends, held.cut[-1], dim=held.dim)
            parts = {} if held.is_elsewhere else {name: part}
            for _, tensor in collect(group, list_wholes(group, parts), parts):
                state[name] = tensor.clone()
        return state

    @torch.no_grad()
    def load_whole_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state from `whole_state_dict`, with any number of parts, or of the whole network.

        Each rank needs the whole state and uses its own parts.

        Raises: RecipeError if a tensor is missing, belongs nowhere or has another shape.
        """
        held = dict(self._held())
        if apart := held.keys() ^ state.keys():
            name = min(apart)
            where = "not in the state" if name in held else "not in the network"
            raise RecipeError(f"load_whole_state_dict: {name} is {where}")
        for name, entry in held.items():
            shape = list(entry.own[0].shape)
            if entry.cut:
                shape[entry.dim] = entry.cut[-1]
            if list(state[name].shape) != shape:
                given = tuple(state[name].shape)
                raise RecipeError(
                    f"load_whole_state_dict: {name} is {given}; the network's is {tuple(shape)}"
                )
        for name, entry in held.items():
            if not entry.cut:
                for part in entry.own:
                    part.copy_(state[name])
                continue
            parts = zip(self.group.own, entry.own, strict=True)
            for number, part in parts:
                part.copy_(state[name].narrow(entry.dim, entry.cut[number], part.shape[entry.dim]))

    def _held(self) -> Iterator[tuple[str, HeldShare]]:
        # The order must be equal on all ranks.
        layers = {
            f"{name}.": layer
            for name, layer in self.module.named_modules()
            if isinstance(layer, SplitLayer)
        }
        for prefix, layer in layers.items():
            for name, held in layer.held().items():
                yield prefix + name, held
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and not name.startswith(tuple(layers)):
                yield name, HeldShare([tensor])


def choose_layers(model: nn.Module, words: Mapping[str, str]) -> dict[str, str]:
    """Return the split of each chosen layer. Raises: RecipeError if one cannot be split so."""
    # If several patterns match a layer, the last one decides.
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    chosen: dict[str, str] = {}
    for pattern, word in words.items():
        if word not in SPLITS:
            known = ", ".join(SPLITS)
            raise RecipeError(f"split: {pattern!r} is to be split by {word!r}; known are {known}")
        matching = [name for name in named if fnmatchcase(name, pattern)]
        fitting = [name for name in matching if can_split(named[name], word)]
        inner = [name for name in matching if _outer(name, fitting)]
        fitting = [name for name in fitting if name not in inner]
        for name in matching:
            has_weights = bool(list(named[name].parameters(recurse=False)))
            if has_weights and name not in (*fitting, *inner):
                raise RecipeError(f"split: {name} {_split_advice(named[name], word)}")
        if not fitting:
            raise RecipeError(f"split: {_no_match(named, pattern, word)}")
        for name in fitting:
            chosen.pop(name, None)
            chosen[name] = word
    for name in chosen:
        if outer := _outer(name, chosen):
            raise RecipeError(
                f"split: {name} is in {outer}, which is split by {chosen[outer]}; name one of them"
            )
        _check_layer(model, named, name)
    return chosen


def check_parts(model: nn.Module, chosen: Mapping[str, str], num_parts: int) -> None:
    for name, word in chosen.items():
        check_elements(name, model.get_submodule(name), word, num_parts)


def own_pieces(
    model: nn.Module, chosen: Mapping[str, str], group: PartGroup
) -> dict[str, list[Piece]]:
    """Return this rank's pieces, one per part, of tensors that it will not have whole.

    A tensor that only others hold has none. `model` is on the meta device. Raises: RecipeError.
    """
    check_parts(model, chosen, group.num_parts)
    pieces: dict[str, list[Piece]] = {}
    for name, word in chosen.items():
        layer = make_split(model.get_submodule(name), SplitPlace(name, word, group))
        for tensor_name, held in layer.held().items() if isinstance(layer, SplitLayer) else ():
            if held.cut:
                ends = [range(held.cut[part], held.cut[part + 1]) for part in group.own]
                pieces[f"{name}.{tensor_name}"] = [(held.dim, rows) for rows in ends]
            elif held.is_elsewhere:
                pieces[f"{name}.{tensor_name}"] = []
    return pieces


def replace_layers(
    model: nn.Module,
    chosen: Mapping[str, str],
    group: PartGroup,
    pieces: Mapping[str, Sequence[Tensor]] | None = None,
) -> Split:
    """Replace layers by split ones. `pieces` is the data of stand-ins. Raises: RecipeError."""
    check_parts(model, chosen, group.num_parts)
    made = {}
    for name, word in chosen.items():
        place = SplitPlace(name, word, group, pieces or {})
        made[name] = make_split(model.get_submodule(name), place)
    for name, layer in made.items():
        # Code that still calls the whole layer, through its own reference, must fail.
        whole_layer = model.get_submodule(name)
        whole_layer._parameters.clear()
        whole_layer._modules.clear()
        model.set_submodule(name, layer)
    return Split(model, group)


def _outer(name: str, names: Iterable[str]) -> str | None:
    return next((outer for outer in names if name.startswith(f"{outer}.")), None)


def _split_advice(layer: nn.Module, word: str) -> str:
    kind = type(layer).__name__
    others = [other for other in SPLITS if can_split(layer, other)]
    would = f"it can be by {' or '.join(others)}" if others else "leave it out of the pattern"
    return f"is a {kind}, which cannot be split by {word}; {would}"


def _no_match(named: Mapping[str, nn.Module], pattern: str, word: str) -> str:
    if pattern in named and (reason := why_not(named[pattern], word)):
        return f"{pattern} cannot be split by {word}: {reason}"
    can = [name for name, layer in named.items() if can_split(layer, word)]
    if pattern in named and any(name.startswith(f"{pattern}.") for name in can):
        return f"{pattern} is no layer but has some; say {pattern + '.*'!r}"
    if not can:
        return f"{pattern!r} is to be split by {word}; the network has no layer that can be"
    close = difflib.get_close_matches(pattern, can, n=1)
    shown = close or [*can[:4], *(["…"] if len(can) > 4 else [])]
    return f"{pattern!r} matches no layer that can be split by {word}, as {', '.join(shown)}"


def _check_layer(model: nn.Module, named: Mapping[str, nn.Module], name: str) -> None:
    layer = named[name]
    if any(getattr(layer, hooks) for hooks in HOOKS) or any(map(_has_hooks, layer.parameters())):
        raise RecipeError(
            f"split: {name} has hooks, which would be lost; register them after split, or leave "
            f"{name} out of it"
        )
    inner = set(layer.modules())
    for other, module in named.items():
        if other != name and module is layer:
            raise RecipeError(
                f"split: {name} is {other} too; a layer that stands twice stays whole"
            )
        for weight in layer.parameters():
            if module not in inner and any(
                weight is parameter for parameter in module._parameters.values()
            ):
                raise RecipeError(
                    f"split: {name} shares a parameter with {other}; leave it out of split"
                )


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _random_state(tensors: list[Tensor]) -> Tensor:
    on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    host = torch.get_rng_state()
    return host if on_gpu is None else torch.cat([host, torch.cuda.get_rng_state(on_gpu)])
