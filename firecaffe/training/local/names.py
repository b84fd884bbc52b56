"""The names of what replicas have, of a network that a row of ranks holds.

By this rank's names a replica has `3/parameter/classifier.1.parts.2.weight`, or with what its
optimizer keeps of that `3/optimizer/classifier.1.parts.2.weight/momentum_buffer`. In a checkpoint
they are rows of `3/parameter/classifier.1.weight`, and so on, as one rank has it.
"""

from dataclasses import dataclass

from firecaffe.training.local.replicas import NUMBERS, SCALE
from firecaffe.training.parallel.pieces import Names, Source

KINDS = ("parameter", "buffer", "optimizer", NUMBERS, SCALE)
"""In the order in which a replica tells its tensors."""


@dataclass(frozen=True)
class NamesOfReplicas:
    """See `training.parallel.pieces.Naming`. Tensors are in order of replicas, then of kinds, then
    of the network.
    """

    names: Names

    def source(self, path: str) -> tuple[Source, str]:
        of_replica, own = _cut(path)
        if not own:
            return Source(path), path
        source, whole = self.names.source(own)
        return source, of_replica + whole

    def own(self, path: str) -> list[str]:
        of_replica, whole = _cut(path)
        return [of_replica + own for own in self.names.own(whole)] if whole else [path]

    def place(self, path: str) -> int:
        number, kind, *_ = path.split("/")
        _, whole = _cut(path)
        first = (int(number) * len(KINDS) + KINDS.index(kind)) * len(self.names.places)
        return first + (self.names.place(whole) if whole else 0)


def _cut(path: str) -> tuple[str, str]:
    """Which replica's what it is, as `3/optimizer/`, and the rest of the path: of numbers none."""
    number, kind, *rest = path.split("/", 2)
    return f"{number}/{kind}/", "".join(rest)
