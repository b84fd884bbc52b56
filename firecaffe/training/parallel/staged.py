"""A recipe's network, cut into stages, of which this rank has one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.models.drawing import named_tensors
from firecaffe.parallel.config import ParallelConfig
from firecaffe.parallel.stages import Stage, cut_stages
from firecaffe.training.evaluate import evaluating
from firecaffe.training.parallel.cut_up import mark_cut_up
from firecaffe.training.parallel.fresh import FreshNetwork, Own
from firecaffe.training.parallel.held import RowNetwork, outline_of
from firecaffe.training.parallel.mesh import Mesh
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
    """The whole network's parameters by all their names; those of other ranks on the meta device.
    """

    @property
    def row(self) -> dict[str, Any]:
        """What a run's record says of it."""
        return {
            "data": self.mesh.column.world_size,
            "stages": self.words.stages,
            "pipeline": self.words.pipeline,
        }

    def trained(self) -> dict[str, nn.Parameter]:
        """The whole network's trained parameters, in its order; those of others on meta."""
        first_name: dict[nn.Parameter, str] = {}
        for name, each in self.tied:
            first_name.setdefault(each, name)
        return {name: each for each, name in first_name.items() if each.requires_grad}


def check_stages(network: nn.Module, names: Sequence[str]) -> None:
    """Raises: RecipeError if the network cannot be cut so, in training or in evaluation."""
    _owners(*_cut(network, names))


def cut_network(
    fresh: FreshNetwork, words: ParallelConfig, mesh: Mesh
) -> tuple[nn.Module, StagedNetwork]:
    """Makes a network that is cut, with what this rank's stage needs. All ranks call it.

    Raises: RecipeError if it cannot be cut so.
    """
    own, begins = mesh.row.rank, words.stages

    def own_of(outline: nn.Module) -> Own:
        owners = _owners(*_cut(outline, begins))
        return {n: [] for n, each in named_tensors(outline) if owners.get(each, 0) != own}

    drawn = fresh.draw(mesh.world, own_of)
    network, others = drawn.network, drawn.other_weights
    wholes = dict(named_tensors(network))
    training, evaluation = _cut(network, begins)
    owners = _owners(training, evaluation)
    elsewhere = {name: each for name, each in wholes.items() if owners.get(each, 0) != own}
    outlines: dict[Tensor, nn.Parameter] = {}
    for each in elsewhere.values():
        if isinstance(each, nn.Parameter):
            meta = torch.empty_like(each, device="meta")
            outlines[each] = nn.Parameter(meta, requires_grad=each.requires_grad)
    tied = [
        (name, outlines.get(each, each))
        for name, each in network.named_parameters(remove_duplicate=False)
    ]
    mark_cut_up(network)
    _free(network, set(elsewhere.values()))
    places = {name: place for place, name in enumerate(wholes)}
    names = Names({}, places, frozenset(elsewhere))
    # A stage has places of its own for what a followed forward takes; these come first, for there
    # a micro-batch changes buffers.
    module = nn.ModuleList([training[own].module, evaluation[own].module, network])
    has_buffers = any(not isinstance(each, nn.Parameter) for each in wholes.values())
    outline = outline_of(wholes)
    return network, StagedNetwork(
        mesh,
        names,
        has_buffers,
        others,
        outline,
        words,
        training[own],
        evaluation[own],
        module,
        tied,
    )


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
