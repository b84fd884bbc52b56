"""A recipe's network, with its layers split.

A network that the ranks of a row hold together, each a part of its tensors.

Errors about split layers and stages, by the recipe's word that asked for them.
"""

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
from firecaffe.parallel.layers import SplitLayer
from firecaffe.parallel.own_samples import OwnSamples
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.split import choose_layers, own_pieces, split_layers
from firecaffe.parallel.tensor import whole
from firecaffe.training.parallel.mesh import Mesh, mark_cut_up
from firecaffe.training.parallel.pieces import FreshNetwork, Names, NumbersOfRow, Source
from firecaffe.training.piece import Numbers
from firecaffe.training.updates.spread import Part
from firecaffe.transport.local import LocalRanks, meet_local_ranks


@dataclass(frozen=True)
class RowNetwork:
    """What a training has beside such a network."""

    mesh: Mesh
    names: Names
    has_buffers: bool
    """Whether the whole network has any."""
    other_weights: list[int]
    """The ranks that had made other first weights than rank 0, whose are taken."""
    outline: dict[str, nn.Parameter]
    """The whole network's parameters, in its order, on the meta device."""

    @property
    def trained_outline(self) -> dict[str, nn.Parameter]:
        """Those that are trained."""
        return {name: each for name, each in self.outline.items() if each.requires_grad}

    def called(self, name: str) -> str:
        """The whole tensor's name, by this rank's of a part."""
        return self.names.source(name)[0].whole

    def part(self, name: str) -> Part:
        """What one of this rank's tensors is of the whole network's."""
        source, _ = self.names.source(name)
        if not source.cut:
            return Part(source.whole)
        return Part(source.whole, source.part, len(source.cut) - 1)

    def numbers_of_row(self, numbers: Numbers) -> Numbers:
        """Those that the ranks of the row keep together, by whole names. All of them ask."""
        return NumbersOfRow(numbers, self.names, self.mesh.row)


def outline_of(wholes: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters among some tensors, on the meta device."""
    return {
        name: nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        for name, each in wholes.items()
        if isinstance(each, nn.Parameter)
    }


FULLY_CONNECTED = ("neurons", "inputs")
"""The words of layers that one weird trick splits."""


@dataclass(frozen=True)
class SplitNetwork(RowNetwork):
    """A network whose layers are split."""

    group: PartGroup
    """The row, with its parts."""
    parameters: frozenset[nn.Parameter]
    """Those of which each rank of a row has a part."""
    chosen: dict[str, str]
    """The layers that are split, each with its word."""
    outlines: dict[str, nn.Parameter]
    """The trained parameters that other ranks have alone, on the meta device: patterns of names are
    those of the whole network."""

    @property
    def row(self) -> dict[str, Any]:
        """What a run's record says of it."""
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
    """The layers that a recipe splits; with no word for any, those that its scheme does.

    Raises: RecipeError, with the layer's name, if one cannot be split so.
    """
    choose, check = SCHEMES[words.scheme]
    chosen = choose_layers(model, words.split or choose(model, words.scheme))
    for name, word in chosen.items():
        check(name, word, model.get_submodule(name))
    return chosen


def _nothing(_: nn.Module, __: str) -> dict[str, str]:
    return {}


def _fully_connected(model: nn.Module, scheme: str) -> dict[str, str]:
    """By neurons and by inputs in turns; by inputs first if the first layer has fewer outputs than
    inputs, for what is narrower is sent whole.
    """
    linear = [name for name, each in model.named_modules() if type(each) is nn.Linear]
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
"""For each scheme which layers are split if nobody says, each with its word; and what checks one
that is.
"""


def split_network(
    fresh: FreshNetwork,
    words: ParallelConfig,
    mesh: Mesh,
    exchange: ExchangeConfig,
    resources: ExitStack,
) -> tuple[nn.Module, SplitNetwork]:
    """Makes a network whose layers are split; its outputs are whole. All ranks call it. resources:
    takes what has to be closed.

    Raises: RecipeError, with the layer's name, if one cannot be split so.
    """
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
    split_layers(model, chosen, group, drawn.pieces)
    model.register_forward_hook(give_whole)
    found = find_parts(model, group)
    names = Names(found.sources, {n: place for place, n in enumerate(wholes)}, found.elsewhere)
    outlines = {
        name: nn.Parameter(torch.empty_like(wholes[name], device="meta"))
        for name in sorted(found.elsewhere)
        if wholes[name].requires_grad
    }
    return model, SplitNetwork(
        mesh,
        names,
        has_buffers,
        drawn.other_weights,
        outline,
        group,
        found.parameters,
        chosen,
        outlines,
    )


@dataclass(frozen=True)
class SplitTensors:
    """What a rank has of a network's split layers."""

    sources: Mapping[str, Source]
    """Of the tensors that are here, by this rank's names."""
    parameters: frozenset[nn.Parameter]
    """Those of them that are cut."""
    elsewhere: frozenset[str]
    """The whole tensors that other ranks have alone."""


def find_parts(model: nn.Module, group: PartGroup) -> SplitTensors:
    """Finds the parts in a network whose layers are split."""
    sources: dict[str, Source] = {}
    parameters, elsewhere = set[nn.Parameter](), set[str]()
    for layer_name, layer in model.named_modules():
        if isinstance(layer, SplitLayer):
            own_names = {id(each): n for n, each in layer.state_dict(keep_vars=True).items()}
            for name, held in layer.held().items():
                whole_name = f"{layer_name}.{name}"
                if held.is_elsewhere:
                    elsewhere.add(whole_name)
                    continue
                for number, tensor in enumerate(held.own):
                    part = group.own.start + number
                    own = f"{layer_name}.{own_names[id(tensor)]}"
                    sources[own] = Source(whole_name, held.dim, held.cut, part)
                    if held.cut and isinstance(tensor, nn.Parameter):
                        parameters.add(tensor)
    return SplitTensors(sources, frozenset(parameters), frozenset(elsewhere))


def _group(
    row: Group, words: ParallelConfig, exchange: ExchangeConfig, resources: ExitStack
) -> PartGroup:
    if words.shares_samples:
        return PartGroup(row, words.num_parts)
    return OwnSamples(row, words.num_parts, _meet(row, exchange, resources))


def _meet(row: Group, words: ExchangeConfig, resources: ExitStack) -> LocalRanks | None:
    """The ranks of the row, if they may share memory."""
    is_one_host = row.local_world_size == row.world_size
    if not is_one_host or not words.shared_memory or row.device.type != "cpu":
        return None
    local = meet_local_ranks(row, words.timeout_s)
    if local is not None:
        resources.callback(local.close)
    return local


def give_whole(_: nn.Module, __: Any, outputs: Any) -> Any:
    return whole(outputs)


OF_LAYERS, OF_STAGES = "split", "stages"
"""What such errors begin with, which `firecaffe.split` and `cut_stages` raise too."""


@contextmanager
def in_words_of(words: ParallelConfig) -> Iterator[None]:
    """Names in the block's errors the word that the recipe has. Raises: RecipeError."""
    try:
        yield
    except RecipeError as error:
        of, _, said = str(error).partition(": ")
        word = {OF_LAYERS: words.word, OF_STAGES: "parallel.stages"}.get(of)
        if word is None:
            raise
        raise RecipeError(f"{word}: {said}") from error
