"""Times steps of a recipe on this device, with the same parts as a training.

The planner uses the times of a micro-batch's forward and backward, which torch's profiler splits by
type of layer, of fetching it, and of the update. No other worker takes part, except in an exchange
whose result is not used.
"""

import dataclasses
import re
import threading
import time
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from firecaffe.cluster.calls import Worker
from firecaffe.cluster.world import World
from firecaffe.data import Batches, Dataset, SampleOrder, TensorDataset, open_data
from firecaffe.data.dataset import tree_text
from firecaffe.errors import DataError
from firecaffe.exchange.route import find_route
from firecaffe.gradients.probe import run_probe
from firecaffe.gradients.reducer import GradientReducer
from firecaffe.gradients.threads import begin_thread
from firecaffe.models.layer_costs import profile_on
from firecaffe.models.network import make_network
from firecaffe.planner.calibrate import relative_spread
from firecaffe.planner.cluster import MeasuredStep
from firecaffe.planner.recipe_workload import workload_of
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.tasks import task_of
from firecaffe.training.forward import Forward, arithmetic, naming_kernels
from firecaffe.training.given_parts import Parts, build_network, task_for
from firecaffe.training.modes.every_step import empty_counts, steps_of_whole
from firecaffe.training.outcome import StepResult
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.link import finish
from firecaffe.transport.local_ranks import LocalRanks

MAX_MICRO_BATCHES = 4
"""The most micro-batches of a timed step: enough that the step's fixed time is a small share."""

MIN_STEPS, WARM_UP = 7, 2

RATE = 1e-6
"""Factor on the recipe's learning rate: at the full rate, some networks would diverge."""


@dataclass(frozen=True)
class StepTimes:
    """Samples of one micro-batch's times, in seconds."""

    micro_batch_size: int
    micro_batches: int
    compute_s: tuple[float, ...]
    data_s: tuple[float, ...]
    update_s: tuple[float, ...]
    memory_bytes: int
    """The most memory in use on a GPU; on a CPU this process's resident memory."""
    inputs: str = ""
    """A sample's dtype and shape."""

    @property
    def images_per_s(self) -> float:
        return self.micro_batch_size / (median(self.compute_s) + median(self.data_s))

    def measured(self, recipe: CheckedRecipe) -> MeasuredStep:
        return MeasuredStep(
            model=recipe.model.label,
            micro_batch_size=self.micro_batch_size,
            compute_s=median(self.compute_s),
            data_s=median(self.data_s),
            update_s=median(self.update_s),
            autocast=recipe.train.autocast,
            inputs=self.inputs,
            error=max(relative_spread(self.compute_s), 0.01),
        )


def time_steps(
    recipe: CheckedRecipe,
    device: torch.device,
    micro_batch_size: int,
    least_s: float,
    micro_batches: int = MAX_MICRO_BATCHES,
) -> StepTimes:
    """Time steps of so many micro-batches for `least_s` seconds, and MIN_STEPS at least."""
    train = dataclasses.replace(
        recipe.train,
        micro_batch_size=micro_batch_size,
        global_batch_size=micro_batches * micro_batch_size,
    )
    with arithmetic(train, device), naming_kernels():
        return _timed(dataclasses.replace(recipe, train=train), device, least_s, micro_batches)


def _timed(
    recipe: CheckedRecipe, device: torch.device, least_s: float, micro_batches: int
) -> StepTimes:
    train, micro_batch_size = recipe.train, recipe.train.micro_batch_size
    data = dataset_of(recipe, train.global_batch_size)
    model = build_network(recipe, Parts(), data, device)
    order = SampleOrder(train.seed, len(data), train.global_batch_size, micro_batch_size)
    batches = Batches(data, order, recipe.data, device)
    world = World(0, 1, device)
    forward = Forward(model, task_for(recipe, None, None, data), train)

    def first_backward() -> Tensor:
        forward.begin_step()
        value, _ = forward(*batches.train_batch(0, 0), step=0, leaf=0)
        assert value is not None
        torch.autograd.backward(value)
        return value

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(named, recipe.solver)
    reducer = GradientReducer(
        named,
        run_probe(forward.buffers, named, first_backward, world).ready_order,
        forward.empty_tail(),
        empty_counts(forward),
        micro_batches,
        Exchange(world, find_route("tree", micro_batches, 1)),
        recipe.exchange.bucket_bytes,
    )
    stepper = steps_of_whole(forward, batches, optimizer, reducer, range(micro_batches))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    results: list[StepResult] = []
    start_s = time.perf_counter()
    try:
        while len(results) < MIN_STEPS + WARM_UP or time.perf_counter() - start_s < least_s:
            results.append(stepper.run(len(results), RATE * recipe.solver.base_lr).read())
    finally:
        reducer.close()
    timings = [result.timings for result in results[WARM_UP:]]
    used = (
        torch.cuda.max_memory_allocated(device)
        if device.type == "cuda"
        else psutil.Process().memory_info().rss
    )
    return StepTimes(
        micro_batch_size,
        micro_batches,
        tuple(timing.compute_s / micro_batches for timing in timings),
        tuple(timing.data_s / micro_batches for timing in timings),
        tuple(timing.update_s for timing in timings),
        used,
        tree_text(batches.layout.inputs),
    )


def time_steps_beside_exchange(
    recipe: CheckedRecipe,
    world: World,
    local: LocalRanks | None,
    micro_batch_size: int,
    least_s: float,
    micro_batches: int,
) -> StepTimes:
    """Time steps while vectors of a bucket's length are summed. Raises: PeerLostError."""
    # A ring keeps all ports busy both ways; a tree would slow its ranks less.
    exchange = Exchange.of_vectors(world, "ring" if local is None else "tree", local)
    vector = exchange.empty(max(1, recipe.exchange.bucket_bytes // 4), torch.float32, world.device)
    is_over = threading.Event()
    # A separate stream on a GPU, as in training, so that backward does not wait for it.
    stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    finish(world.device)

    def sum_until_over() -> None:
        with torch.cuda.stream(stream):
            while True:
                vector[0] = 0.0 if is_over.is_set() else 1.0
                exchange.all_reduce(vector)
                if float(vector[0]) == 0.0:
                    return

    thread = Worker("exchange", partial(begin_thread, world.device))
    summed = thread.submit(sum_until_over)
    try:
        timed = time_steps(recipe, world.device, micro_batch_size, least_s, micro_batches)
    finally:
        is_over.set()
        thread.close()
    summed.result()
    return timed


def dataset_of(recipe: CheckedRecipe, least: int) -> Dataset:
    """Open the recipe's training data, or make noise of its shape if it is missing or small."""
    try:
        train = open_data(recipe.data).train
        if len(train) >= least:
            return train
    except DataError:
        pass
    work = workload_of(recipe)
    if not work.num_classes or not work.layout.channels:
        return TensorDataset(*work.layout.dummy_batch(2 * least))
    images = torch.randint(0, 256, (2 * least, *work.layout.inputs.shape), dtype=torch.uint8)
    # A user's own network may have fewer outputs than are usual for such images.
    labels = torch.zeros(2 * least, dtype=torch.long)
    return TensorDataset(images, labels, work.num_classes)


OPERATIONS = {
    "convolution": r"conv",
    "fully connected": r"addmm|::mm\b|linear|matmul|bmm",
    "pooling": r"pool",
    "normalization": r"norm",
    "activation": r"relu|threshold|softmax|sigmoid|tanh|clamp",
    "dropout": r"dropout|bernoulli",
}
"""Types by a pattern in an operation's name; the first match counts, and no match is `other`."""

MODULES = {
    "convolution": r"Conv",
    "fully connected": r"Linear",
    "pooling": r"Pool|_pool",
    "normalization": r"Norm|Response",
    "activation": r"ReLU|Softmax|Tanh|Sigmoid",
    "dropout": r"Dropout",
}
OTHER = "other"
PASSES = 3


@dataclass(frozen=True)
class LayerTypes:
    time_s: dict[str, float]
    memory_bytes: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        return {"time_by_type_s": self.time_s, "output_bytes_by_type": self.memory_bytes}


def by_layer_type(recipe: CheckedRecipe, device: torch.device, micro_batch_size: int) -> LayerTypes:
    """Profile PASSES forwards and backwards of a micro-batch, after one that is not profiled."""
    work = workload_of(recipe)
    model = make_network(recipe.model, work.num_classes or None, work.layout.channels).to(device)
    inputs, targets = work.layout.dummy_batch(micro_batch_size, device)
    loss = task_of(recipe.task, work.num_classes or None).loss

    def run() -> None:
        torch.autograd.backward(loss(model(inputs), targets))

    run()
    is_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as seen:
        for _ in range(PASSES):
            run()
    time_s = dict.fromkeys((*OPERATIONS, OTHER), 0.0)
    for row in seen.key_averages():
        own_us = row.self_device_time_total if is_gpu else row.self_cpu_time_total
        time_s[type_of(row.key, OPERATIONS)] += own_us / 1e6 / PASSES
    profiled = profile_on(model, inputs)
    memory_bytes = dict.fromkeys((*MODULES, OTHER), 0.0)
    for layer in profiled.layers:
        memory_bytes[type_of(layer.kind, MODULES)] += layer.output_activation_bytes
    return LayerTypes(time_s, memory_bytes)


def type_of(name: str, types: dict[str, str]) -> str:
    for kind, pattern in types.items():
        if re.search(pattern, name):
            return kind
    return OTHER
