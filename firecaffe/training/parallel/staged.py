"""A recipe's network, cut into stages, of which this rank has one, or parts of its layers.

Between stages, a tensor in parts stays in parts: each worker sends its parts to the worker of the
next stage that has the same parts. So the next stage computes part by part, as without stages.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from firecaffe.errors import RecipeError
from firecaffe.models.drawing import named_tensors
from firecaffe.parallel.config import ParallelConfig
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.layer_split import own_pieces, replace_layers
from firecaffe.parallel.stages import Stage, cut_stages
from firecaffe.parallel.tensor import TensorInParts, whole
from firecaffe.training.evaluation import evaluating
from firecaffe.training.parallel.cut_pieces import FreshNetwork, Names, Own
from firecaffe.training.parallel.mesh import Mesh, mark_cut_up
from firecaffe.training.parallel.split_network import (
    RowNetwork,
    chosen_layers,
    find_parts,
    outline_of,
)
from firecaffe.user_code import failed

PARTS = "firecaffe: parts of a tensor"
"""The first key of a dictionary that stands for a tensor in parts between stages."""


def pass_in_parts(stage: Stage, group: PartGroup) -> None:
    """Let a stage take and return tensors in parts; the last stage returns whole ones."""

    def take(_: nn.Module, taken: tuple[Any, ...]) -> Any:
        return tree_map(lambda value: _in_parts(value, group), taken, is_leaf=_stands_for_parts)

    def give(_: nn.Module, __: Any, given: Any) -> Any:
        return whole(given) if stage.is_last else tree_map_only(TensorInParts, _to_dict, given)

    stage.module.register_forward_pre_hook(take)
    stage.module.register_forward_hook(give)


def _to_dict(tensor: TensorInParts) -> dict[str, Any]:
    tensor.check_autograd()
    return {PARTS: tensor.own, "cut": tensor.cut, "dim": tensor.cut_dim, "maker": tensor.maker}


def _stands_for_parts(value: Any) -> bool:
    return isinstance(value, dict) and PARTS in value


def _in_parts(value: Any, group: PartGroup) -> Any:
    if not _stands_for_parts(value):
        return value
    return TensorInParts(group, value[PARTS], value["cut"], value["dim"], value["maker"])


@dataclass(frozen=True)
class StagedNetwork(RowNetwork):
    """A network in stages. What only other ranks have is no longer in its modules here."""

    words: ParallelConfig
    training: Stage
    evaluation: Stage
    module: nn.Module
    """All modules with tensors of this rank: those of its stages, and the network."""
    tied: list[tuple[str, nn.Parameter]]
    """The network's parameters by all their names; those not whole on this rank are on meta."""
    group: PartGroup
    chosen: dict[str, str]
    """The split layers of all stages, each with its value of `parallel.split`."""

    @property
    def row(self) -> dict[str, Any]:
        row = {
            "data": self.mesh.column.world_size,
            "stages": self.words.stages,
            "pipeline": self.words.pipeline,
        }
        if not self.chosen:
            return row
        size, parts = self.mesh.stage.world_size, self.group.num_parts
        return row | {"model": size, "parts": parts, "split": self.chosen}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the network's trained parameters, in its order; those of others on meta."""
        first_name: dict[nn.Parameter, str] = {}
        for name, parameter in self.tied:
            first_name.setdefault(parameter, name)
        return {n: p for p, n in first_name.items() if p.requires_grad}


def check_stages(network: nn.Module, words: ParallelConfig) -> None:
    """Raise RecipeError if the network cannot be cut so, in training or in evaluation."""
    _plan_stage(network, words, 0)


def cut_network(
    fresh: FreshNetwork, words: ParallelConfig, mesh: Mesh
) -> tuple[nn.Module, StagedNetwork]:
    """Make a network in stages. All ranks call it. Raises: RecipeError if it cannot be cut so."""
    local_stage, group = mesh.line.rank, PartGroup(mesh.stage, words.num_parts)

    def own_of(outline: nn.Module) -> Own:
        of_stage = _plan_stage(outline, words, local_stage)
        pieces = own_pieces(outline, of_stage.split, group)
        return {**dict.fromkeys(of_stage.elsewhere, ()), **pieces}

    drawn = fresh.draw(mesh.world, own_of)
    network = drawn.network
    wholes = dict(named_tensors(network))
    of_stage = _plan_stage(network, words, local_stage)
    outline = outline_of(wholes)
    tied = _tied(network, wholes, of_stage, outline)
    mark_cut_up(network)
    _free(network, {wholes[name] for name in of_stage.elsewhere})
    # A stage has separate modules for what a traced forward uses. They come first, because a
    # micro-batch changes buffers there.
    stages = [of_stage.training, of_stage.evaluation]
    places = [*(stage.module for stage in stages), network]
    _split(network, of_stage.split, group, drawn.pieces, places)
    if of_stage.chosen:
        for stage in stages:
            pass_in_parts(stage, group)
    sources, _, of_others = find_parts(network, group)
    order = {name: place for place, name in enumerate(wholes)}
    has_buffers = any(not isinstance(tensor, nn.Parameter) for tensor in wholes.values())
    return network, StagedNetwork(
        mesh,
        Names(sources, order, of_others | of_stage.elsewhere),
        has_buffers,
        drawn.replaced_ranks,
        outline,
        words,
        of_stage.training,
        of_stage.evaluation,
        nn.ModuleList(places),
        tied,
        group,
        of_stage.chosen,
    )


@dataclass(frozen=True)
class _StagePlan:
    training: Stage
    evaluation: Stage
    elsewhere: frozenset[str]
    """The tensors of other stages. Tensors that no stage uses are in the first one."""
    chosen: dict[str, str]

    @property
    def split(self) -> dict[str, str]:
        others = {name.rpartition(".")[0] for name in self.elsewhere}
        return {
            name: word
            for name, word in self.chosen.items()
            if not any(f"{other}.".startswith(f"{name}.") for other in others)
        }


def _plan_stage(network: nn.Module, parallel: ParallelConfig, number: int) -> _StagePlan:
    training, evaluation = _cut(network, parallel.stages)
    owners = _owners(training, evaluation)
    elsewhere = {n for n, tensor in named_tensors(network) if owners.get(tensor, 0) != number}
    chosen = chosen_layers(network, parallel)
    for name in chosen:
        inside = next((stage for stage in parallel.stages if stage.startswith(f"{name}.")), None)
        if inside is not None:
            raise RecipeError(
                f"stages: {inside} is in {name}, which is split; let the stage begin elsewhere"
            )
    return _StagePlan(training[number], evaluation[number], frozenset(elsewhere), chosen)


def _tied(
    network: nn.Module,
    wholes: Mapping[str, Tensor],
    of_stage: _StagePlan,
    outline: Mapping[str, nn.Parameter],
) -> list[tuple[str, nn.Parameter]]:
    is_here = {
        name
        for name in wholes
        if name not in of_stage.elsewhere
        and not any(name.startswith(f"{layer}.") for layer in of_stage.split)
    }
    first_name = {tensor: name for name, tensor in wholes.items()}
    named = network.named_parameters(remove_duplicate=False)
    return [(n, t if first_name[t] in is_here else outline[first_name[t]]) for n, t in named]


def _split(
    network: nn.Module,
    chosen: Mapping[str, str],
    group: PartGroup,
    pieces: Mapping[str, Sequence[Tensor]],
    places: Sequence[nn.Module],
) -> None:
    before = {name: network.get_submodule(name) for name in chosen}
    replace_layers(network, chosen, group, pieces)
    for place in places:
        named = dict(place.named_modules(remove_duplicate=False))
        for name, layer in before.items():
            if named.get(name) is layer:
                place.set_submodule(name, network.get_submodule(name))


def _cut(network: nn.Module, names: Sequence[str]) -> tuple[list[Stage], list[Stage]]:
    training = cut_stages(network, names)
    with ExitStack() as stack:
        try:
            stack.enter_context(evaluating(network))
        except RuntimeError as error:
            said = "stages: the network's train(), which may not write to weights of other stages"
            raise failed(f"{said} (as LoRA that merges),", error) from error
        return training, cut_stages(network, names)


def _owners(training: Sequence[Stage], evaluation: Sequence[Stage]) -> Mapping[Tensor, int]:
    owners: dict[Tensor, int] = {}
    for stage in (*training, *evaluation):
        for name, tensor in (*stage.module.named_parameters(), *stage.module.named_buffers()):
            if owners.setdefault(tensor, stage.number) != stage.number:
                raise RecipeError(
                    f"stages: {name} is in stage {owners[tensor]} in training and in stage "
                    f"{stage.number} in evaluation; let the next stage begin elsewhere"
                )
    return owners


def _free(network: nn.Module, tensors: set[Tensor]) -> None:
    for module in network.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor in tensors:
                    held[name] = None
