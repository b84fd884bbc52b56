"""Training speed against controls in the same run: a bare PyTorch loop, and DDP over Gloo.

    python -m benchmarks.training.against_loop                      # one worker against a bare loop
    torchrun --nproc-per-node 2 -m benchmarks.training.against_loop # workers against DDP over Gloo

Each pair trains the same network on the same samples in memory: our step, and the loop that a
user of torch would write. One worker: the bare loop accumulates over the same micro-batches.
Several: DDP takes each worker's share of the global batch at once. Before anything is timed both
must come to the same gradient (to rounding, without dropout; against DDP not where there is
BatchNorm, whose batches differ). Then blocks of steps alternate; the ratio of each
pair of neighboring blocks is taken, and its median reported. Both run with the same malloc
setting and one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kit.our_step import OurStep, route_of
from firecaffe.cluster.world import World, join
from firecaffe.data import Batches, DataConfig, SampleOrder, TensorDataset
from firecaffe.gradients.config import ExchangeConfig
from firecaffe.models import MODELS, build_model, classification_loss
from firecaffe.recipe.sections import TrainConfig
from firecaffe.runs.environment import cpu_name
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.local_ranks import meet_local_ranks

LEARNING_RATE = 0.01
NUM_SAMPLES = 4096
COLUMNS = (
    "network",
    "micro-batch",
    "global batch",
    "exchange",
    "images/s",
    "control's",
    "ratio, median",
    "ratios",
    "n",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["nin_small", "nin_cifar", "googlenet_small_bn"]
    )
    parser.add_argument("--micro-batch-sizes", nargs="+", type=int, default=[8, 16])
    parser.add_argument("--num-micro-batches", type=int, default=8)
    parser.add_argument("--exchange", default="tree")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--block-s", type=float, default=3.0, help="about how long a block lasts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with join("cpu") as world:
        if world.is_first:
            print(f"{cpu_name()}, torch {torch.__version__}, {world.world_size} worker(s)\n")
            print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for name in arguments.models:
            for micro_batch_size in arguments.micro_batch_sizes:
                row = compare(world, name, micro_batch_size, arguments)
                if world.is_first:
                    print(f"| {' | '.join(row)} |", flush=True)


def compare(
    world: World, name: str, micro_batch_size: int, arguments: argparse.Namespace
) -> list[str]:
    """Times one network at one micro-batch size; the cells of a row."""
    config = TrainConfig(
        global_batch_size=micro_batch_size * arguments.num_micro_batches,
        micro_batch_size=micro_batch_size,
    )
    dataset = make_dataset(name)
    order = SampleOrder(0, NUM_SAMPLES, config.global_batch_size, micro_batch_size)
    batches = Batches(dataset, order, DataConfig())
    ours = make_ours(world, make_network(name), batches, config, arguments.exchange)
    if world.world_size == 1:
        control: BareLoop | DdpLoop = BareLoop(make_network(name), dataset, order)
    else:
        control = DdpLoop(make_network(name), dataset, order, world)
    check_gradients(name, ours, control)
    steps = _steps_for(arguments.block_s, ours, world)
    pairs = []
    for block in range(arguments.blocks + 1):
        # Who goes first changes from block to block, so that neither always finds the cooler core.
        runs = (ours, control)[:: -1 if block % 2 else 1]
        times = {run: _time(run, block * steps, steps, world) for run in runs}
        if block:  # the first pair warms up
            pairs.append((times[ours], times[control]))
    ours.close()
    ratios = [control_s / our_s for our_s, control_s in pairs]
    images = steps * config.global_batch_size
    our_s, control_s = (statistics.median(times) for times in zip(*pairs, strict=True))
    return [
        name,
        str(micro_batch_size),
        str(config.global_batch_size),
        arguments.exchange,
        f"{images / our_s:,.0f}",
        f"{images / control_s:,.0f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f} to {max(ratios):.3f}",
        str(len(ratios)),
    ]


class BareLoop:
    """What a user of torch writes for one worker, over the same micro-batches."""

    def __init__(self, model: nn.Module, dataset: TensorDataset, order: SampleOrder) -> None:
        self.model, self.dataset, self.order = model, dataset, order
        self.optimizer = optim.SGD(model.parameters(), LEARNING_RATE, 0.9, foreach=True)

    def __call__(self, step: int) -> None:
        self.optimizer.zero_grad()
        for leaf in range(self.order.num_micro_batches):
            images, labels = _floats(self.dataset, self.order.micro_batch(step, leaf))
            loss = classification_loss(self.model(images), labels)
            (loss / self.order.num_micro_batches).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


class DdpLoop:
    """DistributedDataParallel over Gloo, each worker's share of the global batch at once."""

    def __init__(
        self, model: nn.Module, dataset: TensorDataset, order: SampleOrder, world: World
    ) -> None:
        self.model = DistributedDataParallel(model, process_group=world.group)
        self.dataset, self.order, self.world = dataset, order, world
        self.optimizer = optim.SGD(self.model.parameters(), LEARNING_RATE, 0.9, foreach=True)

    def __call__(self, step: int) -> None:
        leaves = range(self.world.rank, self.order.num_micro_batches, self.world.world_size)
        samples = torch.cat([self.order.micro_batch(step, leaf) for leaf in leaves])
        images, labels = _floats(self.dataset, samples)
        self.optimizer.zero_grad()
        classification_loss(self.model(images), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def make_ours(
    world: World, model: nn.Module, batches: Batches, config: TrainConfig, algorithm: str
) -> OurStep:
    words = ExchangeConfig(algorithm=algorithm)
    optimizer = optim.SGD(model.parameters(), LEARNING_RATE, 0.9, foreach=True)
    local = meet_local_ranks(world, words.timeout_s)
    shares = local is not None
    route = route_of(world, words, config.num_micro_batches, shared_memory=shares)
    exchange = Exchange(world, route, local)
    return OurStep(model, classification_loss, batches, config, optimizer, words, exchange)


def make_network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name)


def make_dataset(name: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SAMPLES, *MODELS[name].input_CHW)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, MODELS[name].num_classes, (NUM_SAMPLES,), generator=generator)
    return TensorDataset(images, labels, MODELS[name].num_classes)


def _floats(dataset: TensorDataset, samples: Tensor) -> tuple[Tensor, Tensor]:
    images, labels = dataset.batch(samples)
    return images.float().div_(255), labels


def check_gradients(name: str, ours: OurStep, control: BareLoop | DdpLoop) -> None:
    """Trains the first step on both sides and compares all gradients.

    Raises: SystemExit where they differ by more than rounding. Only a network with BatchNorm may
    against DDP, whose batches are other ones.
    """
    found, expected = first_gradient(ours), first_gradient(control)
    difference = float((found - expected).norm() / expected.norm())
    if difference > 1e-4 and not (isinstance(control, DdpLoop) and has_batch_norm(ours.model)):
        raise SystemExit(f"{name}: gradients differ by {difference:.2e}")


def first_gradient(run: OurStep | BareLoop | DdpLoop) -> Tensor:
    """All gradients of step 0 as one vector, without dropout, whose noise differs by design."""
    dropouts = [(m, m.p) for m in run.model.modules() if isinstance(m, nn.Dropout)]
    for dropout, _ in dropouts:
        dropout.p = 0.0
    run(0)
    for dropout, p in dropouts:
        dropout.p = p
    return torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None])


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def _steps_for(block_s: float, run: Callable[[int], object], world: World) -> int:
    """Steps of a block; rank 0 decides."""
    start = time.perf_counter()
    run(1)
    steps = torch.tensor(max(2, round(block_s / (time.perf_counter() - start))))
    if world.group is not None:
        torch.distributed.broadcast(steps, 0, group=world.group)
    return int(steps)


def _time(run: Callable[[int], object], first: int, steps: int, world: World) -> float:
    """Seconds of a block of steps, between two barriers."""
    if world.group is not None:
        torch.distributed.barrier(group=world.group)
    start = time.perf_counter()
    for step in range(first, first + steps):
        run(step % (NUM_SAMPLES // 1024))
    if world.group is not None:
        torch.distributed.barrier(group=world.group)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
