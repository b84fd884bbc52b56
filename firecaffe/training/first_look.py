"""Examines a network before its first step, and restores its parameters and buffers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.group import Group
from firecaffe.data import Batch, Batches, num_samples
from firecaffe.data.dataset import map_batch
from firecaffe.errors import RecipeError
from firecaffe.inventory.attributes import (
    Digests,
    attributes_of,
    attributes_of_loss,
    carried_over,
    tensor_digest,
)
from firecaffe.inventory.findings import InEvaluation, Inventory, mean_of
from firecaffe.inventory.network_state import Changes, ForwardWatch, kinds_of
from firecaffe.inventory.world_queries import check_queries, world_queries
from firecaffe.tasks.task import leaves_labels_out
from firecaffe.training.evaluation import evaluating
from firecaffe.training.forward import Forward, match_format, seed_random

FACTOR, SUMMAND = 1 - 2**-6, 2**-20
"""How far weights are moved: a moving average of 0.9999 shows it in float32.

Towards 0, for some must not exceed 1. The summand is for tensors of zeros alone: among others,
zeros may mean something (a triangle, no edge).
"""


class FirstLook:
    """Examines what a network keeps, changes and draws at random, and what its loss averages over.

    Make it before the network's first forward, which may make changes that later ones do not.
    """

    def __init__(self, forward: Forward, keeps_frozen: bool = True) -> None:
        self.forward, self.keeps_frozen = forward, keeps_frozen
        self._watch = ForwardWatch(forward.model)
        self._frozen = {
            parameter: parameter.detach().clone()
            for parameter in forward.model.parameters()
            if not parameter.requires_grad
        }

    def of_parts(self, world: Group) -> None:
        """Check the first forwards of a network in parts. Raises: RecipeError on all ranks."""
        try:
            self._check_frozen(self._watch.changed_parameters())
            self._watch.check_buffers()
            line = ""
        except RecipeError as error:
            line = str(error)
        raise_first(world, line)

    def around(self, batches: Batches) -> Inventory:
        """Examine a whole network before and after micro-batches.

        From now on, frozen parameters that forward changes are treated as buffers. Raises: what the
        network raises; RecipeError, on all ranks, if other numbers of workers could get other bits.
        """
        self._watch.changed_parameters()
        self._watch.check_buffers()
        first, other = batches.train_batch(0, 0), _another(batches)
        self.forward.begin_step()
        self._put_back()
        evaluated = self._in_evaluation(first)
        begun = self._attributes()
        with world_queries() as asked:
            changes, outputs, value = self._at(first)
        check_queries(asked)
        after = self._attributes()
        with self._trained_moved():
            frozen = self._at(first if other is None else other)[0].frozen
        _, _, again = self._at(first)
        carried = carried_over(begun, after, self._attributes())
        repeats = again == value or not is_repeatable(self.forward)
        loss = mean_of("loss", self.forward.task.loss, outputs, first[1])
        changes = replace(changes, frozen=list(dict.fromkeys(changes.frozen + frozen)))
        self._check_frozen(changes.frozen)
        if changes.frozen:
            self.forward.keep(changes.frozen)
        kinds = kinds_of(self.forward.model)
        leaves_out = leaves_labels_out(self.forward.task.loss, first[1])
        return Inventory(kinds, changes, carried, repeats, loss, evaluated, asked, leaves_out)

    def _in_evaluation(self, batch: Batch) -> InEvaluation:
        # Evaluates a sample twice, because ranks evaluate different numbers of batches.
        forward, watch, digests = self.forward, ForwardWatch(self.forward.model), list[str]()
        inputs, _ = map_batch(lambda tensor: tensor[:1], batch)
        begun, attributes = self._attributes(), list[Digests]()
        for _ in range(2):
            seed_random(forward.config.seed, "evaluation", 0)
            with evaluating(forward.model), torch.no_grad():
                copies = tree_map(Tensor.clone, inputs)  # for a network that writes to its inputs
                outputs = forward.model(match_format(copies, forward.config))
            tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            digests += [",".join(map(tensor_digest, tensors))]
            attributes += [self._attributes()]
            forward.buffers.begin_micro_batch()
        if changed := watch.changed():
            raise RecipeError(
                f"an evaluation changes the parameter {changed[0]}, so that how often a rank "
                "evaluates decides it; expected that the optimizer alone does, or forward in "
                "training"
            )
        repeats = digests[0] == digests[1] or not is_repeatable(forward)
        return InEvaluation(carried_over(begun, *attributes), repeats)

    def _check_frozen(self, changed: Sequence[str]) -> None:
        if changed and not self.keeps_frozen:
            raise RecipeError(
                f"forward changes the parameter {changed[0]}, which is not trained; that is kept "
                "in synchrony.mode every_step and without [parallel] alone: make it a buffer"
            )

    def _at(self, batch: Batch) -> tuple[Changes, Any, str]:
        forward = self.forward
        mixed = forward.begin(*map_batch(Tensor.clone, batch), 0, 0)
        watch = ForwardWatch(forward.model)
        loss, outputs = forward.loss_of(mixed)
        changes = watch.changes()
        together = forward.buffers.together
        if name := next(filter(together.get, watch.changed_buffers()), ""):
            raise RecipeError(
                f"buffers {name} and {together[name]} share memory, and forward changes it; "
                "expected one buffer, and views of it made in forward"
            )
        self._put_back()
        return changes, outputs, tensor_digest(loss)

    def _attributes(self) -> Digests:
        of_loss = attributes_of_loss(self.forward.task.loss)
        return attributes_of(self.forward.model) | of_loss

    @contextmanager
    def _trained_moved(self) -> Iterator[None]:
        """Move the trained parameters in the block, as an update does.

        A teacher that begins as a copy of the network does not change before the network has.
        """
        weights = self.forward.model.parameters()
        trained = [weight for weight in weights if weight.requires_grad]
        kept = [weight.detach().clone() for weight in trained]
        with torch.no_grad():
            for weight in trained:
                weight.mul_(FACTOR) if weight.any() else weight.add_(SUMMAND)
        try:
            yield
        finally:
            with torch.no_grad():
                for weight, value in zip(trained, kept, strict=True):
                    weight.copy_(value)

    @torch.no_grad()
    def _put_back(self) -> None:
        self.forward.buffers.begin_micro_batch()
        for parameter, value in self._frozen.items():
            parameter.copy_(value)


def is_repeatable(forward: Forward) -> bool:
    return forward.device.type == "cpu" or forward.config.deterministic


def raise_first(world: Group, line: str) -> None:
    """Raise RecipeError on all ranks, with the first rank's line that is not empty."""
    if said := next(filter(None, gather_text(world, line)), ""):
        raise RecipeError(said)


def _another(batches: Batches) -> Batch | None:
    for step, leaf in ((0, 1), (1, 0)):
        if leaf < batches.order.num_micro_batches:
            batch = batches.train_batch(step, leaf)
            if num_samples(*batch):
                return batch
    return None
