"""A server of a small network, for fixed lists of events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from firecaffe.data import Batch, TensorDataset
from firecaffe.data.batches import TrainBatches
from firecaffe.recipe.sections import TrainConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Pull, Push
from firecaffe.synchrony.server_policies import Leaf, Policy, Update, Work
from firecaffe.training.modes.served.coder import Coder
from firecaffe.training.modes.served.served_mode import leaves_of
from firecaffe.training.modes.served.server import Server, late_rule
from firecaffe.training.modes.served.server_memory import ServerMemory
from firecaffe.training.modes.served.server_steps import Progress, ServedStepper
from firecaffe.training.modes.served.work_gradient import LazyContributions, loss_scale
from tests.kit.training_steps import Worker, uncounted

CURVATURE = torch.tensor([1.0, 0.5, 2.0])


class Quadratic(nn.Module):
    """f(w) = Σ h (w - x)² / 2 for a sample x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

    def forward(self, samples: Tensor) -> Tensor:
        return self.w - samples


def quadratic_loss(differences: Tensor, _: Tensor) -> Tensor:
    return (CURVATURE * differences.square()).sum(1).mean() / 2


def quadratic(optimizer: Any = None) -> Worker:
    """Of twelve samples, one a leaf, in three steps. optimizer: a function of its weights."""
    net = Quadratic()
    samples = torch.linspace(-1, 1, 36).reshape(12, 3)
    data = TensorDataset(samples, torch.zeros(12, dtype=torch.int64))
    config = TrainConfig(global_batch_size=4, micro_batch_size=1, seed=3)
    chosen = optim.SGD(net.parameters(), 1.0) if optimizer is None else optimizer(net.w)
    return Worker(net, data, chosen, config, uncounted(quadratic_loss))


@dataclass
class Events:
    events: Iterator[Event]

    def next(self) -> Event:
        return next(self.events)


def served(
    parts: Worker, words: SynchronyConfig, events: Iterable[Event], steps: int
) -> ServedStepper:
    learners, forward = set(range(words.learners)), parts.forward
    made = parts.net, parts.named, words.compensate == "delay", partial(loss_scale, forward)
    memory = ServerMemory(*made)
    own = parts.named, parts.stepper.update.applier, memory, words, learners, forward.buffers
    server = Server(*own, parts.order, late_rule=late_rule(words.compensate, memory, parts.named))
    plan = leaves_of(parts.order, 0, steps)
    computed = LazyContributions(server, forward, parts.batches, Coder())
    return ServedStepper(parts.stepper, server, Events(iter(events)), computed, plan, Progress())


class Some:
    """Batches of which some leaves are empty, as if their samples were not there."""

    def __init__(self, batches: TrainBatches, dropped: Sequence[Leaf]) -> None:
        self._batches, self._dropped = batches, dropped
        self.order: Any = self
        self.micro_batch_size = batches.order.micro_batch_size

    def samples_in_step(self, step: int) -> int:
        lost = [leaf for leaf in self._dropped if leaf.step == step]
        return self._batches.order.samples_in_step(step) - len(lost) * self.micro_batch_size

    def train_batch(self, step: int, leaf: int) -> Batch:
        inputs, targets = self._batches.train_batch(step, leaf)
        return (inputs[:0], targets[:0]) if Leaf(step, leaf) in self._dropped else (inputs, targets)


def in_order(policy: Policy, order: Sequence[int]) -> Iterator[Event]:
    """The events of a policy whose learners are done in an order, from 0 on again after its end;
    who has no work is left out.
    """
    works: dict[int, Work] = {}
    turn = 0
    while True:
        for learner in sorted(policy.learners - works.keys()):
            work = policy.begin(learner)
            if work is not None:
                works[learner] = work
                yield Pull(0.0, work)
        if not works:
            return
        learner = order[turn % len(order)]
        turn += 1
        if learner in works:
            work = works.pop(learner)
            counts = policy.contribute(work)
            yield Push(0.0, work, counts, policy.commit())


def late(updates: Sequence[Sequence[tuple[Leaf, int]]]) -> Iterator[Event]:
    """Events whose updates are of given leaves, each with the staleness of its gradient; a learner
    for each gradient.
    """
    pulls: dict[int, list[Work]] = {}
    works: list[list[Work]] = []
    count = 0
    for version, update in enumerate(updates):
        works.append([])
        for leaf, staleness in update:
            work = Work(count, *leaf, version - staleness)
            pulls.setdefault(work.version, []).append(work)
            works[-1].append(work)
            count += 1
    for version, group in enumerate(works):
        yield from (Pull(0.0, work) for work in pulls.get(version, []))
        *others, last = group
        yield from (Push(0.0, work, True, None) for work in others)
        yield Push(0.0, last, True, Update(version + 1, tuple(group), ()))
