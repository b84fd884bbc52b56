"""One step: this worker's micro-batches forward and backward, the exchange, the update."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim

from firecaffe.data import SampleOrder
from firecaffe.errors import NotFiniteError
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.recipe.config import TrainConfig
from firecaffe.solvers.optimizer import set_rate
from firecaffe.training.arithmetic import seed_random

Loss = Callable[[Any, Tensor], Tensor]
"""(the network's outputs, labels) -> the mean loss of the samples, a scalar."""

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Timings:
    """Where one rank's time of one step, counted from 1, went; in seconds."""

    step: int
    data_s: float
    compute_s: float
    exposed_communication_s: float
    exchange_s: float
    update_s: float
    step_s: float


@dataclass(frozen=True)
class Votes:
    """What a rank wants done after a step. One vote decides, and all ranks know it: votes are
    summed with the gradients, so that they cost no message of their own.
    """

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepResult:
    """One step over all workers."""

    samples: int
    loss: float
    top1: float
    top5: float
    timings: Timings
    votes: Votes = Votes()


class TrainBatches(Protocol):
    """What a step is fed with: `data.Batches`, or who fetches them ahead."""

    @property
    def order(self) -> SampleOrder: ...

    def train_batch(self, step: int, leaf: int) -> tuple[Tensor, Tensor]: ...


class Stepper:
    """Runs steps on this rank. Its state is the model's, the optimizer's and the scaler's."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: TrainBatches,
        config: TrainConfig,
        share: range,
    ) -> None:
        """share: this worker's micro-batches of every step; see `exchange.leaves.leaf_share`."""
        self.model = model
        self.loss = loss
        self.batches = batches
        self.config = config
        self.buffers = BufferChanges(model)
        self.share = share
        self.device = next(model.parameters()).device
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._dtype = AUTOCAST.get(config.autocast)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.autocast == "float16")

    def run(
        self,
        step: int,
        learning_rate: float,
        optimizer: optim.Optimizer,
        reducer: GradientReducer,
        clip_gradients: float,
        vote: Callable[[], Votes] = Votes,
    ) -> StepResult:
        """Trains step `step`, counted from 0, and leaves every rank with the same weights.

        vote: asked before the last backward. Raises: PeerLostError; NotFiniteError on all ranks,
        whose weights are those of before the step then.
        """
        start = time.perf_counter()
        samples = self.batches.order.samples_in_step(step)
        total_weight = samples / self.config.micro_batch_size
        reducer.begin_step(total_weight)
        self._seen.clear()
        self.buffers.begin_step()
        data_s = 0.0
        for leaf in self.share:
            before_data = time.perf_counter()
            images, labels = self.batch(step, leaf)
            data_s += time.perf_counter() - before_data
            self.buffers.begin_micro_batch()
            loss, tail = self.forward(images, labels, step, leaf)
            counts = self._counts(vote()) if leaf == self.share[-1] else None
            reducer.add(leaf, loss, tail, counts)
        before_wait = time.perf_counter()
        totals = reducer.finish_step()
        before_update = time.perf_counter()
        loss_sums, *buffer_sums = totals.tail
        mean_loss = loss_sums.item() / total_weight
        self._check_finite(mean_loss, reducer)
        self._update(learning_rate, optimizer, clip_gradients)
        self.buffers.finish_step(buffer_sums, total_weight)
        top1, top5, stop, save = totals.counts.tolist()
        end = time.perf_counter()
        timings = Timings(
            step=step + 1,
            data_s=data_s,
            compute_s=before_wait - start - data_s,
            exposed_communication_s=totals.exposed_s,
            exchange_s=totals.exchange_s,
            update_s=end - before_update,
            step_s=end - start,
        )
        return StepResult(
            samples,
            mean_loss,
            top1 / samples,
            top5 / samples,
            timings,
            Votes(stop > 0, save > 0),
        )

    def batch(self, step: int, leaf: int) -> tuple[Tensor, Tensor]:
        images, labels = self.batches.train_batch(step, leaf)
        if self.config.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images, labels

    def forward(
        self, images: Tensor, labels: Tensor, step: int, leaf: int
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The loss to differentiate and the tail of one micro-batch: its loss and the changes to
        buffers.

        A micro-batch without samples (at the end of an epoch) has no loss and a tail of zeros.
        """
        if len(labels) == 0:
            return None, self.empty_tail()
        seed_random(self.config.seed, "dropout", step, leaf)
        if self._dtype is None:
            outputs = self.model(images)
            loss = self.loss(outputs, labels)
        else:
            with torch.autocast(self.device.type, self._dtype):
                outputs = self.model(images)
                loss = self.loss(outputs, labels)
        # A short micro-batch weighs less; a full one is not multiplied, which keeps it cheap.
        weight = len(labels) / self.config.micro_batch_size
        if weight != 1:
            loss = loss * weight
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        self._seen.append((logits.detach(), labels))
        # A copy: the loss may be a view of what backward needs, and the tail is added to in place.
        tail = [loss.detach().float().reshape(1).clone(), *self.buffers.take(leaf, weight)]
        return self.scaler.scale(loss), tail

    def empty_counts(self) -> Tensor:
        """Samples whose label came first, and among the first five; votes to stop, and to save."""
        return torch.zeros(4, device=self.device)

    def empty_tail(self) -> list[Tensor]:
        """The tail of a micro-batch without samples."""
        return [torch.zeros(1, device=self.device), *self.buffers.no_changes()]

    def _counts(self, votes: Votes) -> Tensor:
        """Counts of all this worker's samples of the step, and its votes.

        Whole numbers have the same sum in any order, so they need not be counted leaf by leaf.
        """
        counts = self.empty_counts()
        counts[2:] = torch.tensor([votes.stop, votes.save])
        if self._seen:
            logits, labels = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
            counts[:2] = count_correct(logits, labels)
        return counts

    def _check_finite(self, loss: float, reducer: GradientReducer) -> None:
        """By the sums over all ranks, so that all decide alike. Raises: NotFiniteError."""
        is_finite = math.isfinite(loss)
        if is_finite and self.scaler.is_enabled():
            return  # gradients that overflow by their scale are the scaler's to skip
        layer = reducer.first_not_finite()
        if layer:
            raise NotFiniteError(
                f"the loss is {loss:.4g}; the first gradient in network order that is not finite "
                f"is that of {layer}"
            )
        if not is_finite:
            raise NotFiniteError(f"the loss is {loss:.4g}, though all gradients are finite")

    def _update(
        self, learning_rate: float, optimizer: optim.Optimizer, clip_gradients: float
    ) -> None:
        set_rate(optimizer, learning_rate)
        self.scaler.unscale_(optimizer)
        if clip_gradients:
            parameters = self.model.parameters()
            norm = nn.utils.clip_grad_norm_(parameters, clip_gradients, foreach=True)
            if not self.scaler.is_enabled() and not bool(norm.isfinite()):
                raise NotFiniteError("the norm of the gradient is beyond float32")
        self.scaler.step(optimizer)
        self.scaler.update()


def count_correct(outputs: Any, labels: Tensor) -> Tensor:
    """How many samples have their label first, and among the first five: float32, shape (2,)."""
    logits = outputs if isinstance(outputs, Tensor) else outputs[0]
    best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
    by_place = best.sum(0, dtype=torch.float32)
    return torch.stack([by_place[0], by_place.sum()])
