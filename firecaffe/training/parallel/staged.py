"""A recipe's network, cut into stages, of which this rank has one, or parts of its layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.models.drawing import named_tensors
from firecaffe.parallel.config import ParallelConfig
from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.split import own_pieces, split_layers
from firecaffe.parallel.stages import Stage, cut_stages
from firecaffe.training.evaluate import evaluating
from firecaffe.training.parallel.cut_up import mark_cut_up
from firecaffe.training.parallel.fresh import FreshNetwork, Own
from firecaffe.training.parallel.held import RowNetwork, outline_of
from firecaffe.training.parallel.mesh import Mesh
from firecaffe.training.parallel.network import chosen_layers, find_parts, give_whole
from firecaffe.training.parallel.pieces import Names


@dataclass(frozen=True)
class StagedNetwork(RowNetwork):
    """A network in stages. What other ranks have is no longer in its modules here."""

    words: ParallelConfig
    training: Stage
    """This rank's."""
    evaluation: Stage
    module: nn.Module
    """All places in which this rank has tensors: those of its stages, and the network."""
    tied: list[tuple[str, nn.Parameter]]
    """The whole network's parameters by all their names; those of which this rank does not have all
    on the meta device.
    """
    group: PartGroup
    """The ranks that hold this stage."""
    chosen: dict[str, str]
    """The layers of all stages that are split, each with its word."""

    @property
    def row(self) -> dict[str, Any]:
        """What a run's record says of it."""
        found = {
            "data": self.mesh.column.world_size,
            "stages": self.words.stages,
            "pipeline": self.words.pipeline,
        }
        if not self.chosen:
            return found
        size, parts = self.mesh.stage.world_size, self.group.num_parts
        return found | {"model": size, "parts": parts, "split": self.chosen}

    def trained(self) -> dict[str, nn.Parameter]:
        """The whole network's trained parameters, in its order; those of others on meta."""
        first_name: dict[nn.Parameter, str] = {}
        for name, each in self.tied:
            first_name.setdefault(each, name)
        return {name: each for each, name in first_name.items() if each.requires_grad}


def check_stages(network: nn.Module, words: ParallelConfig) -> None:
    """Raises: RecipeError if the network cannot be cut so, in training or in evaluation."""
    _owners(*_cut(network, words.stages))
    for name in _chosen(network, words):
        inside = next((each for each in words.stages if each.startswith(f"{name}.")), None)
        if inside is not None:
            raise RecipeError(
                f"stages: {inside} is in {name}, which is split; let the stage begin elsewhere"
            )


def cut_network(
    fresh: FreshNetwork, words: ParallelConfig, mesh: Mesh
) -> tuple[nn.Module, StagedNetwork]:
    """Makes a network that is cut, with what this rank's stage needs. All ranks call it.

    Raises: RecipeError if it cannot be cut so.
    """
    own, begins = mesh.line.rank, words.stages
    group = PartGroup(mesh.stage, words.num_parts if words.is_split else 1)

    def in_stage(chosen: Mapping[str, str], elsewhere: set[str]) -> dict[str, str]:
        """Those of some layers that are in this rank's stage."""
        others = {name.rpartition(".")[0] for name in elsewhere}
        return {
            name: word
            for name, word in chosen.items()
            if not any(f"{each}.".startswith(f"{name}.") for each in others)
        }

    def own_of(outline: nn.Module) -> Own:
        chosen, owners = _chosen(outline, words), _owners(*_cut(outline, begins))
        others = {name for name, each in named_tensors(outline) if owners.get(each, 0) != own}
        pieces = own_pieces(outline, in_stage(chosen, others), group)
        return {**dict.fromkeys(others, ()), **pieces}

    drawn = fresh.draw(mesh.world, own_of)
    network = drawn.network
    wholes = dict(named_tensors(network))
    chosen, (training, evaluation) = _chosen(network, words), _cut(network, begins)
    owners = _owners(training, evaluation)
    others = {name: each for name, each in wholes.items() if owners.get(each, 0) != own}
    split = in_stage(chosen, set(others))
    outline = outline_of(wholes)
    is_here = {
        name
        for name in wholes
        if name not in others and not any(name.startswith(f"{each}.") for each in split)
    }
    first_names = {each: name for name, each in reversed(wholes.items())}
    tied = [
        (name, each if first_names[each] in is_here else outline[first_names[each]])
        for name, each in network.named_parameters(remove_duplicate=False)
    ]
    mark_cut_up(network)
    _free(network, set(others.values()))
    # A stage has places of its own for what a followed forward takes; these come first, for there
    # a micro-batch changes buffers.
    places = [training[own].module, evaluation[own].module, network]
    _split(network, split, group, drawn.pieces, places)
    parts = find_parts(network, group)
    order = {name: place for place, name in enumerate(wholes)}
    names = Names(parts.sources, order, parts.elsewhere | others.keys())
    has_buffers = any(not isinstance(each, nn.Parameter) for each in wholes.values())
    return network, StagedNetwork(
        mesh,
        names,
        has_buffers,
        drawn.other_weights,
        outline,
        words,
        training[own],
        evaluation[own],
        nn.ModuleList(places),
        tied,
        group,
        chosen,
    )


def _chosen(network: nn.Module, words: ParallelConfig) -> dict[str, str]:
    return chosen_layers(network, words) if words.is_split else {}


def _split(
    network: nn.Module,
    chosen: Mapping[str, str],
    group: PartGroup,
    pieces: Mapping[str, Sequence[Tensor]],
    places: Sequence[nn.Module],
) -> None:
    """Puts split layers into a network, and into other places that have these layers. What a stage
    gives is whole.
    """
    if not chosen:
        return
    before = {name: network.get_submodule(name) for name in chosen}
    split_layers(network, chosen, group, pieces)
    for place in places:
        named = dict(place.named_modules(remove_duplicate=False))
        for name, layer in before.items():
            if named.get(name) is layer:
                place.set_submodule(name, network.get_submodule(name))
        place.register_forward_hook(give_whole)


def _cut(network: nn.Module, names: Sequence[str]) -> tuple[list[Stage], list[Stage]]:
    """The stages in training and in evaluation."""
    training = cut_stages(network, names)
    with evaluating(network):
        return training, cut_stages(network, names)


def _owners(training: Sequence[Stage], evaluation: Sequence[Stage]) -> Mapping[Tensor, int]:
    """The number of the stage that has each tensor. What none uses is not there.

    Raises: RecipeError if it is another one in evaluation than in training.
    """
    found: dict[Tensor, int] = {}
    for stage in (*training, *evaluation):
        for name, each in (*stage.module.named_parameters(), *stage.module.named_buffers()):
            if found.setdefault(each, stage.number) != stage.number:
                raise RecipeError(
                    f"stages: {name} is in stage {found[each]} in training and in stage "
                    f"{stage.number} in evaluation; let the next stage begin elsewhere"
                )
    return found


def _free(network: nn.Module, tensors: set[Tensor]) -> None:
    for module in network.modules():
        for held in (module._parameters, module._buffers):
            for name, each in held.items():
                if each in tensors:
                    held[name] = None
