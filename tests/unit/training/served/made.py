"""A server of a small network and its synchronous counterpart, for fixed lists of events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from firecaffe.cluster.world import World
from firecaffe.data import Batch, Batches, DataConfig, SampleOrder, TensorDataset
from firecaffe.data.train_batches import TrainBatches
from firecaffe.exchange.route import find_route
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.config import TrainConfig
from firecaffe.synchrony.config import SynchronyConfig
from firecaffe.synchrony.events import Event, Pull, Push
from firecaffe.synchrony.leaf_queue import Leaf
from firecaffe.synchrony.server_policies import Policy, Update, Work
from firecaffe.tasks import CLASSIFICATION
from firecaffe.training.forward import Forward
from firecaffe.training.modes.every_step import empty_counts, steps_of_whole
from firecaffe.training.served.build_served import leaves_of
from firecaffe.training.served.coder import Coder
from firecaffe.training.served.server import Server
from firecaffe.training.served.server_memory import ServerMemory
from firecaffe.training.served.server_steps import Progress, ServedStepper
from firecaffe.training.served.work_gradient import Computed
from firecaffe.transport.exchange import Exchange

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


@dataclass
class Events:
    """Brings a list of events."""

    events: Iterator[Event]

    def next(self) -> Event:
        return next(self.events)


class Made:
    """The parts of a training of one worker."""

    def __init__(
        self,
        net: nn.Module,
        data: TensorDataset,
        config: TrainConfig,
        optimizer: optim.Optimizer,
        loss: Any = CLASSIFICATION.loss,
    ) -> None:
        self.net, self.optimizer = net, optimizer
        self.order = SampleOrder(
            config.seed, len(data), config.global_batch_size, config.micro_batch_size
        )
        self.batches: TrainBatches = Batches(data, self.order, DataConfig())
        counts = CLASSIFICATION.counts if loss is CLASSIFICATION.loss else None
        self.forward = Forward(net, replace(CLASSIFICATION, loss=loss, counts=counts), config)
        self.named = dict(net.named_parameters())
        leaves = config.num_micro_batches
        self.reducer = GradientReducer(
            self.named,
            list(reversed(range(len(self.named)))),
            self.forward.empty_tail(),
            empty_counts(self.forward),
            leaves,
            Exchange(World(0, 1, torch.device("cpu")), find_route("tree", leaves, 1)),
            bucket_bytes=100,
        )
        made = self.forward, self.batches, optimizer, self.reducer, range(leaves)
        self.stepper = steps_of_whole(*made)

    def served(self, words: SynchronyConfig, events: Iterable[Event], steps: int) -> ServedStepper:
        memory = ServerMemory(self.net, self.named, squares=words.compensate == "delay")
        learners = set(range(words.learners))
        made = self.named, self.optimizer, memory, words, learners, self.forward.buffers
        server = Server(*made)
        plan = leaves_of(self.order, 0, steps)
        source = Events(iter(events))
        computed = Computed(server, self.forward, self.batches, Coder())
        return ServedStepper(self.stepper, server, source, computed, plan, Progress())

    def tensors(self) -> dict[str, Tensor]:
        """Weights, buffers and what the optimizer keeps."""
        found = {**self.named, **dict(self.net.named_buffers())}
        for name, parameter in self.named.items():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"{name}/{key}"] = value
        return {name: each.detach().clone() for name, each in found.items()}


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
            work = Work(count, leaf, version - staleness)
            pulls.setdefault(work.version, []).append(work)
            works[-1].append(work)
            count += 1
    for version, group in enumerate(works):
        yield from (Pull(0.0, work) for work in pulls.get(version, []))
        *others, last = group
        yield from (Push(0.0, work, True) for work in others)
        yield Push(0.0, last, True, Update(version + 1, tuple(group)))
