"""A recipe's network with split layers, and errors that name the recipe's setting."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.cluster.group import Group
from firecaffe.errors import RecipeError
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models.drawing import named_tensors
from firecaffe.parallel.config import AUTO, ONE_WEIRD_TRICK, ParallelConfig
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.layer_split import choose_layers, own_pieces, replace_layers
from firecaffe.parallel.layers_in_parts import SplitLayer
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.parallel.tensor import whole
from firecaffe.training.parallel.cut_pieces import FreshNetwork, Names, PieceSource
from firecaffe.training.parallel.mesh import Mesh, mark_cut_up
from firecaffe.transport.local_ranks import LocalRanks, meet_local_ranks


@dataclass(frozen=True)
class RowNetwork:
    mesh: Mesh
    names: Names
    has_buffers: bool
    replaced_ranks: list[int]
    outline: dict[str, nn.Parameter]
    """The whole network's parameters, in its order, on the meta device."""


def outline_of(wholes: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {
        name: nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
        for name, tensor in wholes.items()
        if isinstance(tensor, nn.Parameter)
    }


FULLY_CONNECTED = ("neurons", "inputs")


@dataclass(frozen=True)
class SplitNetwork(RowNetwork):
    group: PartGroup
    parameters: frozenset[nn.Parameter]
    """The parameters of which each rank of a row has a part."""
    chosen: dict[str, str]
    """The split layers, each with its value of `parallel.split`."""
    outlines: dict[str, nn.Parameter]
    """Trained parameters that only other ranks have, on meta, so that name patterns match them."""

    @property
    def row(self) -> dict[str, Any]:
        mesh = self.mesh
        return {
            "data": mesh.column.world_size,
            "model": mesh.row.world_size,
            "scheme": "none" if self.own_samples is None else ONE_WEIRD_TRICK,
            "parts": self.group.num_parts,
            "split": self.chosen,
        }

    @property
    def own_samples(self) -> OwnSamples | None:
        """The row, if its ranks have samples of their own."""
        return self.group if isinstance(self.group, OwnSamples) else None


def chosen_layers(model: nn.Module, words: ParallelConfig) -> dict[str, str]:
    """Return the layers that a recipe names, or else its scheme splits. Raises: RecipeError."""
    choose, check = SCHEMES[words.scheme]
    chosen = choose_layers(model, words.split or choose(model, words.scheme))
    for name, word in chosen.items():
        check(name, word, model.get_submodule(name))
    return chosen


def _nothing(_: nn.Module, __: str) -> dict[str, str]:
    return {}


def _fully_connected(model: nn.Module, scheme: str) -> dict[str, str]:
    """Split by neurons and inputs in turn: the narrower side of the first layer is sent whole."""
    linear = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    if not linear:
        raise RecipeError(f"parallel.scheme {scheme}: the network has no fully connected layer")
    first: Any = model.get_submodule(linear[0])
    shift = int(first.out_features < first.in_features)
    return {name: FULLY_CONNECTED[(place + shift) % 2] for place, name in enumerate(linear)}


def _any_layer(_: str, __: str, ___: nn.Module) -> None:
    pass


def _only_linear(name: str, word: str, layer: nn.Module) -> None:
    if type(layer) is not nn.Linear:
        raise RecipeError(
            f"parallel.split has {name} by {word}: one_weird_trick splits fully connected layers "
            "alone; leave it out, or take parallel.scheme none"
        )


SCHEMES: dict[
    str,
    tuple[Callable[[nn.Module, str], dict[str, str]], Callable[[str, str, nn.Module], None]],
] = {
    "none": (_nothing, _any_layer),
    ONE_WEIRD_TRICK: (_fully_connected, _only_linear),
    AUTO: (_fully_connected, _any_layer),
}
"""For each scheme, the layers that it splits by default, and the check of a split layer."""


def split_network(
    fresh: FreshNetwork,
    words: ParallelConfig,
    mesh: Mesh,
    exchange: ExchangeConfig,
    resources: ExitStack,
) -> tuple[nn.Module, SplitNetwork]:
    """Make a network with split layers and whole outputs. All call it. Raises: RecipeError."""
    group = _group(mesh.stage, words, exchange, resources)
    drawn = fresh.draw(
        mesh.world, lambda outline: own_pieces(outline, chosen_layers(outline, words), group)
    )
    model = drawn.network
    wholes = dict(named_tensors(model))
    has_buffers = any(True for _ in model.buffers())
    outline = outline_of(wholes)
    chosen = chosen_layers(model, words)
    mark_cut_up(model)
    replace_layers(model, chosen, group, drawn.pieces)
    model.register_forward_hook(whole_outputs)
    sources, parameters, elsewhere = find_parts(model, group)
    names = Names(sources, {n: place for place, n in enumerate(wholes)}, elsewhere)
    outlines = {
        name: nn.Parameter(torch.empty_like(wholes[name], device="meta"))
        for name in sorted(elsewhere)
        if wholes[name].requires_grad
    }
    return model, SplitNetwork(
        mesh,
        names,
        has_buffers,
        drawn.replaced_ranks,
        outline,
        group,
        parameters,
        chosen,
        outlines,
    )


def find_parts(
    model: nn.Module, group: PartGroup
) -> tuple[dict[str, PieceSource], frozenset[nn.Parameter], frozenset[str]]:
    """Return parts by name, their parameters, and the whole tensors that only other ranks have."""
    sources: dict[str, PieceSource] = {}
    parameters, elsewhere = set[nn.Parameter](), set[str]()
    for layer_name, layer in model.named_modules():
        if isinstance(layer, SplitLayer):
            own_names = {id(entry): n for n, entry in layer.state_dict(keep_vars=True).items()}
            for name, held in layer.held().items():
                whole_name = f"{layer_name}.{name}"
                if held.is_elsewhere:
                    elsewhere.add(whole_name)
                    continue
                for number, tensor in enumerate(held.own):
                    part = group.own.start + number if held.cut else 0
                    local_name = f"{layer_name}.{own_names[id(tensor)]}"
                    sources[local_name] = PieceSource(whole_name, held.dim, held.cut, part)
                    if held.cut and isinstance(tensor, nn.Parameter):
                        parameters.add(tensor)
    return sources, frozenset(parameters), frozenset(elsewhere)


def _group(
    row: Group, parallel: ParallelConfig, exchange: ExchangeConfig, resources: ExitStack
) -> PartGroup:
    if parallel.shares_samples:
        return PartGroup(row, parallel.num_parts)
    return OwnSamples(row, parallel.num_parts, _meet(row, exchange, resources))


def _meet(row: Group, exchange: ExchangeConfig, resources: ExitStack) -> LocalRanks | None:
    is_one_host = row.local_world_size == row.world_size
    if not is_one_host or not exchange.shared_memory or row.device.type != "cpu":
        return None
    local = meet_local_ranks(row, exchange.timeout_s)
    if local is not None:
        resources.callback(local.close)
    return local


def whole_outputs(_: nn.Module, __: Any, outputs: Any) -> Any:
    return whole(outputs)


OF_LAYERS, OF_STAGES = "split", "stages"
"""The prefixes of errors that `firecaffe.adapt.split_layers` and `cut_stages` raise, too."""


@contextmanager
def naming_settings(words: ParallelConfig) -> Iterator[None]:
    """Name the recipe's setting in the block's RecipeErrors."""
    try:
        yield
    except RecipeError as error:
        of, _, said = str(error).partition(": ")
        word = {OF_LAYERS: words.word, OF_STAGES: "parallel.stages"}.get(of)
        if word is None:
            raise
        raise RecipeError(f"{word}: {said}") from error
