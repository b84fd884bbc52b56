"""The ranks of a training as a mesh: rows hold one model together, columns the same parts.

Networks of which a training has left this process a part, and that are no use as whole ones.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from weakref import WeakSet

from torch import nn

from firecaffe.cluster.group import Group, divide
from firecaffe.cluster.world import World
from firecaffe.errors import RecipeError
from firecaffe.recipe.parallel import Layout


@dataclass(frozen=True)
class Mesh:
    """This rank's groups; see `Layout`."""

    world: World
    row: Group
    stage: Group
    """Those that hold one stage of one model; of a model that is not in stages, the row."""
    line: Group
    """One of each stage, through which micro-batches go."""
    plane: Group
    """All lines of the same parts; they see all samples."""
    column: Group
    """Those that hold the same parts of the same stage."""
    sharers: Group
    """Those that share out the micro-batches of a step, and sum gradients over them."""

    @property
    def groups(self) -> list[Group]:
        """Over which what each rank has is summed one after the other, so that it counts once."""
        return [self.sharers] if self.sharers is self.world else [self.sharers, self.row]


def make_mesh(world: World, layout: Layout, resources: ExitStack) -> Mesh:
    """All ranks call it. resources: takes the groups."""
    alone = Group(0, 1, world.device, watch=world.watch, place=world.place)
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
    """Remembers that a network is whole no more."""
    _CUT_UP.add(network)


def check_is_whole(network: nn.Module) -> nn.Module:
    """The network that a function has returned. Raises: RecipeError if it was cut up before."""
    if network in _CUT_UP:
        kind = type(network).__name__
        raise RecipeError(
            "model() returned a network that a training has cut up before, by parallel.split or "
            f"parallel.stages; expected a new one each time: {kind}, or lambda: {kind}(…)"
        )
    return network
