"""Which layers of a net judge what the network says: its losses and accuracies, and all that needs
the targets.
"""

from dataclasses import dataclass
from math import prod

from firecaffe.caffe.graph import Graph, Source, Step


@dataclass(frozen=True)
class Judged:
    """A net in one phase, in two parts."""

    network: tuple[Step, ...]
    """The layers that need the samples alone."""
    judges: tuple[Step, ...]
    """The others: those that need a target, and the losses."""
    blobs: tuple[str, ...]
    """What the judges take from the network, in the order in which they first do."""
    targets: tuple[Source, ...]
    """What the samples should give: all tops of the data layers but the first."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The targets that are one number a sample, as far as the file says their shape."""
        shaped = [(each.blob, each.shape) for each in self.targets]
        return tuple(blob for blob, shape in shaped if shape and prod(shape[1:]) == 1)

    @property
    def maps(self) -> tuple[str, ...]:
        """The targets that have a data layer of their own, as images of labels have."""
        return tuple(each.blob for each in self.targets if each.is_first)

    @property
    def losses(self) -> tuple[Step, ...]:
        return tuple(each for each in self.judges if each.is_loss)

    @property
    def main_loss(self) -> Step | None:
        """That of the largest weight, the last of several; None if there is no loss."""
        found = None
        for each in self.losses:
            if found is None or max(each.loss_weights) >= max(found.loss_weights):
                found = each
        return found


def judged(graph: Graph) -> Judged:
    """The two parts of a graph."""
    targets = graph.sources[1:]
    theirs = {each.blob for each in targets}
    network: list[Step] = []
    judges: list[Step] = []
    blobs: dict[str, None] = {}
    for step in graph.steps:
        needs_target = theirs.intersection(step.bottoms)
        if not (needs_target or step.is_loss or step.kind.is_loss or step.kind.takes_targets):
            network.append(step)
            continue
        blobs.update(dict.fromkeys(each for each in step.bottoms if each not in theirs))
        theirs.update(step.tops)
        judges.append(step)
    return Judged((*network,), (*judges,), (*blobs,), targets)
