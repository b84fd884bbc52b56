"""The findings about a network and its loss, as lines for people and as a record."""

from dataclasses import asdict, dataclass
from typing import Any

from firecaffe.inventory.forward_watch import Changes
from firecaffe.inventory.loss_trial import MEAN, WHOLE
from firecaffe.inventory.network_state import Kinds
from firecaffe.value_checks import some_of


@dataclass(frozen=True)
class Inventory:
    kinds: Kinds
    changes: Changes
    carried: list[str]
    """Attributes of modules that forward carries over to the next micro-batch."""
    repeats: bool
    """Whether the same micro-batch gave the same loss a second time."""
    loss: str

    @property
    def doubts(self) -> list[str]:
        """Reasons why another number of workers may not give the same bits."""
        reasons = []
        if self.carried:
            reasons.append(
                f"forward carries over {some_of(self.carried)}, which are neither parameters nor "
                "buffers: no checkpoint and no other worker has them; register_buffer, or "
                "get_extra_state and set_extra_state"
            )
        if not self.repeats:
            reasons.append(
                "the network came to another loss for the same micro-batch, asked twice: it draws "
                "from its own generator, or keeps state that is not seen"
            )
        return reasons

    @property
    def notes(self) -> list[str]:
        """Lines about state that is handled in a way people may not expect."""
        kinds, changes, notes = self.kinds, self.changes, list[str]()
        if kinds.extra:
            notes.append(
                f"extra state of {some_of(kinds.extra)}: kept as the first micro-batch of a step "
                "leaves it"
            )
        if changes.frozen:
            notes.append(
                f"forward changes {some_of(changes.frozen)}, not trained: averaged over a step's "
                "micro-batches, as buffers are"
            )
        for name, rows in changes.in_places.items():
            notes.append(
                f"warning: forward writes {rows} of the buffer {name}, and a step averages what "
                "its micro-batches write: a memory of samples is not filled as by one process, "
                "unless micro_batch_size is global_batch_size"
            )
        for name, step in changes.steps.items():
            notes.append(
                f"warning: forward moves the buffer {name} by {step}, once a step, as the first "
                "micro-batch does"
            )
        if self.loss not in (MEAN, WHOLE):
            notes.append(f"the loss: {self.loss}; expected the mean of the samples")
        if self.loss == WHOLE:
            notes.append(
                "the loss is one of each micro-batch as a whole: train.micro_batch_size decides "
                "it, as it decides BatchNorm"
            )
        return notes

    @property
    def lines(self) -> list[str]:
        kinds = self.kinds
        lines = [
            f"parameters: {len(kinds.trained)} trained, {len(kinds.frozen)} not"
            + (f", {len(kinds.shared)} of several names" if kinds.shared else ""),
            f"buffers: {len(kinds.averaged)} averaged over a step's micro-batches, "
            f"{len(kinds.counted)} of whole numbers, as the first micro-batch leaves them",
            f"random numbers: {', '.join(self.changes.draws) or 'none'}"
            + (", seeded for each micro-batch" if self.changes.draws else ""),
            f"loss: {self.loss}",
        ]
        return [*lines, *self.notes, *(f"warning: {doubt}" for doubt in self.doubts)]

    @property
    def row(self) -> dict[str, Any]:
        kinds = self.kinds
        return {
            "trained": len(kinds.trained),
            "frozen": len(kinds.frozen),
            "shared": kinds.shared,
            "buffers_averaged": len(kinds.averaged),
            "buffers_counted": len(kinds.counted),
            "extra_state": kinds.extra,
            "carried_over": self.carried,
            "repeats": self.repeats,
            "loss": self.loss,
            **{f"forward_{name}": value for name, value in asdict(self.changes).items()},
        }
