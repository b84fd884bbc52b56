"""The mesh of ranks: a row holds one model together, a column holds the same parts."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from weakref import WeakSet

from torch import nn

from firecaffe.cluster.group import Group, divide
from firecaffe.cluster.world import World
from firecaffe.errors import RecipeError
from firecaffe.recipe.worker_numbers import RankLayout


@dataclass(frozen=True)
class Mesh:
    world: World
    row: Group
    stage: Group
    """The ranks that hold one stage of one model; the row if the model is not in stages."""
    line: Group
    """One rank of each stage; micro-batches pass through them."""
    plane: Group
    """All lines with the same parts; they see all samples."""
    column: Group
    """The ranks that hold the same parts of the same stage."""
    sharers: Group
    """The ranks that share out the micro-batches of a step, and sum gradients over them."""

    @property
    def groups(self) -> list[Group]:
        """The groups to sum over, one after the other, so that each rank's value counts once."""
        return [self.sharers] if self.sharers is self.world else [self.sharers, self.row]


def make_mesh(world: World, layout: RankLayout, resources: ExitStack) -> Mesh:
    """Make the mesh; all ranks call it."""
    alone = Group(0, 1, world.device, watch=world.watch)
    if layout.model == 1:
        return Mesh(world, alone, alone, alone, world, world, world)

    def group(parts: Sequence[range]) -> Group:
        return resources.enter_context(divide(world, parts))

    row, column = group(layout.rows), group(layout.columns)
    if layout.stages == 1:
        stage, line, plane = row, alone, column
    elif layout.stages == layout.model:
        stage, line, plane = alone, row, world
    else:
        stage, line, plane = map(group, (layout.of_stages, layout.lines, layout.planes))
    sharers = world if layout.ranks_of_a_sharer == 1 else column
    return Mesh(world, row, stage, line, plane, column, sharers)


_CUT_UP: WeakSet[nn.Module] = WeakSet()


def mark_cut_up(network: nn.Module) -> None:
    _CUT_UP.add(network)


def check_is_whole(network: nn.Module) -> nn.Module:
    """Return a network. Raises: RecipeError if a training has cut it up before."""
    if network in _CUT_UP:
        kind = type(network).__name__
        raise RecipeError(
            "model() returned a network that a training has cut up before, by parallel.split or "
            f"parallel.stages; expected a new one each time: {kind}, or lambda: {kind}(…)"
        )
    return network
