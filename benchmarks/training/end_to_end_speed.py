"""One rank of the end-to-end benchmark's cluster: every variant in turn, verified, then timed.

Started by `end_to_end speed`. Each rank holds every variant's network, optimizer and
exchange; blocks of steps take turns, and who goes first changes from round to round.
"""

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kit import raw_lines
from benchmarks.kit.our_step import OurStep, route_of
from benchmarks.training.end_to_end_recipe import (
    ALONE,
    BASE_LR,
    DDP,
    GLOBAL_BATCH_SIZE,
    OURS,
    RING,
    UNCOMPRESSED,
    make_network,
    make_recipe,
)
from firecaffe.cluster.world import World, join
from firecaffe.data import Batches, SampleOrder, TensorDataset
from firecaffe.exchange.leaves import leaf_share
from firecaffe.measure.exchange_times import conditions_since, read_counters
from firecaffe.models import classification_loss
from firecaffe.recipe.sections import Recipe
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.transport.exchange import Exchange

LARGEST_DIFFERENCE = 1e-4
"""Of two gradients that only rounding may part, relative to the norm."""

MIN_COSINE = 0.8
"""Between the gradient and what a codec has sent of it in VERIFY_STEPS steps."""

VERIFY_STEPS = 16
PLANNED_STEPS = 100_000
"""So far away is the end of the learning rate's decay, which no block gets near."""


@dataclass(frozen=True)
class Block:
    """Some steps of one variant, as all ranks together saw them."""

    variant: str
    round: int
    steps: int
    samples: int
    block_s: float
    exposed_s: float | None
    """Waited for communication after backward, mean over ranks; None where nobody tells."""
    sent_bytes: float
    """That a host put on its link, headers included, mean over hosts."""
    retransmitted_segments: int
    cpu_busy_share: float
    """Of the machine's processors, by anybody."""
    ranks_cpu_share: float
    """Of the machine's processors, by these ranks."""


class DdpStep:
    """DistributedDataParallel over Gloo: each host's share of the global batch at once."""

    def __init__(
        self, world: World, recipe: Recipe, data: TensorDataset, dropout: bool, alone: bool
    ) -> None:
        self.model = DistributedDataParallel(make_model(dropout), process_group=world.group)
        self.batches = make_batches(recipe, data)
        self.share = leaf_share(recipe.train.num_micro_batches, world.world_size, world.rank)
        self.optimizer = make_optimizer(dict(self.model.named_parameters()), recipe.solver)
        self.alone = alone

    def __call__(self, step: int, rate: float) -> None:
        parts = [self.batches.train_batch(step, leaf) for leaf in self.share]
        images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.alone else contextlib.nullcontext():
            classification_loss(self.model(images), labels).backward()  # type: ignore[no-untyped-call]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def close(self) -> None:
        pass


def make_step(
    world: World, variant: str, data: TensorDataset, dropout: bool = True
) -> OurStep | DdpStep:
    if variant in (DDP, ALONE):
        recipe = make_recipe(UNCOMPRESSED, 1, PLANNED_STEPS)
        return DdpStep(world, recipe, data, dropout, variant == ALONE)
    recipe = make_recipe(variant, 1, PLANNED_STEPS)
    model, batches = make_model(dropout), make_batches(recipe, data)
    optimizer = make_optimizer(dict(model.named_parameters()), recipe.solver)
    words = recipe.exchange
    exchange = Exchange(world, route_of(world, words, recipe.train.num_micro_batches))
    return OurStep(model, classification_loss, batches, recipe.train, optimizer, words, exchange)


def make_model(dropout: bool) -> nn.Module:
    """The same weights for every variant. Without dropout its gradient has no chance in it."""
    torch.manual_seed(0)
    model = make_network()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    return model


def make_batches(recipe: Recipe, data: TensorDataset) -> Batches:
    train = recipe.train
    order = SampleOrder(train.seed, len(data), train.global_batch_size, train.micro_batch_size)
    return Batches(data, order, recipe.data)


def rank_program(data: TensorDataset, rounds: int, steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    with join("cpu") as world:
        variants = (ALONE, DDP, RING, *OURS)
        found = verify(world, data)
        if world.is_first:
            raw_lines.append(out, {"kind": "verified", "steps": VERIFY_STEPS, "results": found})
        running = {variant: make_step(world, variant, data) for variant in variants}
        rate = BASE_LR / 10  # All variants train on; none is to diverge.
        for number in range(rounds + 1):
            turn = number % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                block = time_block(world, variant, running[variant], number * steps, steps, rate)
                if number and world.is_first:  # the first round warms up
                    raw_lines.append(out, {"kind": "block", **asdict(block)})
        for step in running.values():
            step.close()


def verify(world: World, data: TensorDataset) -> dict[str, dict[str, float]]:
    """Over the same batch with the same weights, again and again: what every variant's optimizer is
    given is DDP's gradient, to rounding; a codec's, added up over the steps, has its direction.

    Raises: SystemExit where one is not.
    """
    reference = mean_gradient(world, DDP, data, 1)
    found: dict[str, dict[str, float]] = {}
    for variant in (RING, *OURS):
        is_coded = variant not in (RING, UNCOMPRESSED)
        gradient = mean_gradient(world, variant, data, VERIFY_STEPS if is_coded else 1)
        difference = float((gradient - reference).norm() / reference.norm())
        cosine = float(torch.cosine_similarity(gradient, reference, dim=0))
        found[variant] = {"relative_difference": difference, "cosine": cosine}
        # A comparison with NaN is false.
        right = cosine >= MIN_COSINE if is_coded else difference <= LARGEST_DIFFERENCE
        if not right:
            raise SystemExit(f"{variant}: differs from DDP's gradient: {found[variant]}")
    return found


def mean_gradient(world: World, variant: str, data: TensorDataset, steps: int) -> Tensor:
    """Of `steps` steps that do not move the weights: float64, shape (parameters,)."""
    step = make_step(world, variant, data, dropout=False)
    total = torch.zeros(1, dtype=torch.float64)
    for _ in range(steps):
        step(0, 0.0)
        gradients = [p.grad.flatten() for p in step.model.parameters() if p.grad is not None]
        total = total + torch.cat(gradients).double()
    step.close()
    return total / steps


def time_block(
    world: World,
    variant: str,
    step: OurStep | DdpStep,
    first: int,
    steps: int,
    rate: float,
) -> Block:
    """Between two barriers."""
    dist.barrier(group=world.group)
    before, sent_before = read_counters(), _sent_bytes()
    start = time.perf_counter()
    done = [step(number, rate) for number in range(first, first + steps)]
    dist.barrier(group=world.group)
    block_s = time.perf_counter() - start
    sent = _sent_bytes() - sent_before
    conditions = conditions_since(before)
    exposed = [one.timings.exposed_communication_s for one in done if one is not None]
    own = [
        sum(exposed),
        sent,
        conditions.retransmitted_segments or 0,
        conditions.process_cpu_share,
    ]
    sums = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(sums, group=world.group)
    exposed_s, sent_bytes, retransmitted, ranks_share = sums.tolist()
    return Block(
        variant=variant,
        round=first // steps,
        steps=steps,
        samples=steps * GLOBAL_BATCH_SIZE,
        block_s=block_s,
        exposed_s=exposed_s / world.world_size if exposed else None,
        sent_bytes=sent_bytes / world.world_size,
        retransmitted_segments=int(retransmitted),
        cpu_busy_share=conditions.cpu_busy_share,
        ranks_cpu_share=ranks_share,
    )


def _sent_bytes() -> int:
    """On all links of this host but its loopback."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(counter.bytes_sent for name, counter in counters.items() if name != "lo")
