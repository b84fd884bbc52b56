"""The ranks of a training as a mesh: rows hold one model together, columns the same parts."""

from contextlib import ExitStack
from dataclasses import dataclass

from firecaffe.cluster.group import Group, divide
from firecaffe.cluster.world import World
from firecaffe.recipe.parallel import Layout


@dataclass(frozen=True)
class Mesh:
    """This rank's groups. Without a split a row is one rank, and the others are the world."""

    world: World
    row: Group
    column: Group
    sharers: Group
    """Those that share out the micro-batches of a step, and sum gradients over them."""

    @property
    def groups(self) -> list[Group]:
        """Over which what each rank has is summed one after the other, so that it counts once."""
        return [self.sharers] if self.sharers is self.world else [self.sharers, self.row]


def make_mesh(world: World, layout: Layout, resources: ExitStack) -> Mesh:
    """All ranks call it. resources: takes the groups."""
    if layout.model == 1:
        alone = Group(0, 1, world.device, watch=world.watch, place=world.place)
        return Mesh(world, alone, world, world)
    row = resources.enter_context(divide(world, layout.rows))
    column = resources.enter_context(divide(world, layout.columns))
    return Mesh(world, row, column, world if layout.ranks_of_a_sharer == 1 else column)
