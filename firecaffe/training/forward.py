"""The forward pass of one micro-batch: its loss, and what goes along with its gradients.

A network whose micro-batches are computed by code that torch.compile has made for it.

Code is made for each size of a micro-batch, and for no size in general: else a worker that has met
a short micro-batch would go on with other code than one that has not, and come to other bits. It is
used for training alone; evaluations compute as without it. The wrapper is not the network: names of
parameters stay as they are.

Fixes what decides the bits of a micro-batch on a rank: threads, kernels, random numbers.
"""

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from firecaffe.data import num_samples
from firecaffe.errors import RecipeError
from firecaffe.generators import generators_kept, seed_generators
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.recipe.config import TrainConfig
from firecaffe.tasks import Task
from firecaffe.training.mix import Mixed, Mixing


def compiled(model: nn.Module) -> Callable[..., Any]:
    """The network's forward pass, compiled when it is first called with a size.

    Raises: RecipeError if there is no compiler.
    """
    check_compiler(next(model.parameters()).device.type)
    # If there were too many sizes torch would go on without its code, and say so to nobody.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    made: Callable[..., Any] = torch.compile(model, dynamic=False)
    return made


def check_compiler(device: str) -> None:
    """Raises: RecipeError if torch finds no C++ compiler, which it needs on a CPU."""
    if device != "cpu":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise RecipeError(
            "train.compile is true, and torch finds no C++ compiler here, which it needs on a CPU: "
            "install g++, or name yours in the variable CXX"
        ) from None


@contextmanager
def arithmetic(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Fixes threads and kernels for this process in the block. Afterwards they are as they were
    before, and so are the generators, which the block seeds: torch's, python's and numpy's global
    one. The variable that tells cuBLAS its workspace stays: it is read once.

    On a GPU with `deterministic`: no benchmarking of kernels (it may choose others on each worker),
    no TF32, and an error from torch if an operation has no deterministic kernel.

    Source: PyTorch's notes on reproducibility; cuBLAS, "Results reproducibility".
    """
    with ExitStack() as before:
        before.enter_context(generators_kept())
        before.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        before.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.threads)
        if device.type == "cuda" and config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            before.enter_context(_deterministic())
        yield


@contextmanager
def _deterministic() -> Iterator[None]:
    """Kernels of a GPU that always come to the same bits."""
    # Filling fresh memory guards against reading it unwritten; it costs time and no bits.
    wanted = (
        (torch.utils.deterministic, "fill_uninitialized_memory"),
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "allow_tf32"),
    )
    with ExitStack() as before:
        for holder, name in wanted:
            _keep(holder, name, before)
            setattr(holder, name, False)
        before.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        yield


def _keep(holder: Any, name: str, before: ExitStack) -> None:
    """Lets a switch of torch's have, at the end, the value that it has now."""
    try:
        before.callback(setattr, holder, name, getattr(holder, name))
    except RuntimeError:  # TF32 that was set by its newer name, which the older one cannot read
        for part in (holder.conv, holder.rnn) if holder is torch.backends.cudnn else (holder,):
            before.callback(setattr, part, "fp32_precision", part.fp32_precision)


def cost_of_determinism(micro_batch: Callable[[], object], repeats: int = 5) -> float:
    """The ratio of a micro-batch's time with deterministic kernels to its time without, on this
    GPU.

    Medians of `repeats`, alternating, after one run of each that is not counted.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(repeats + 1):
        for deterministic in (True, False):
            torch.use_deterministic_algorithms(deterministic)
            torch.backends.cudnn.benchmark = not deterministic
            torch.cuda.synchronize()
            start = time.perf_counter()
            micro_batch()
            torch.cuda.synchronize()
            if repeat:
                seconds[deterministic].append(time.perf_counter() - start)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    return statistics.median(seconds[True]) / statistics.median(seconds[False])


def seed_random(seed: int, *what: str | int) -> None:
    """Seeds torch's generators, python's `random` and numpy's global one by purpose, such as (seed,
    "dropout", step, micro-batch).

    The purpose takes the place of a generator's state: nothing has to be saved, and no rank enters
    it.
    """
    key = key_of(seed, *what)
    seed_generators(key_of(seed, "python", *what), key_of(seed, "numpy", *what), key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)


def key_of(seed: int, *what: str | int) -> int:
    """The seed of a generator for one purpose, 63 bits."""
    text = " ".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Forward:
    """A network, a task and an arithmetic. The state is the network's and the loss scale."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        mixing: Mixing | None = None,
        is_split: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """mixing: what is done to a micro-batch before it goes into the network; None: nothing.
        is_split: whether layers of it are. device: None: that of the weights.
        """
        self.model, self.task, self.config = model, task, config
        self._run = compiled(model) if config.compile else model
        self.mixing = mixing or Mixing(config.seed)
        self.device = device or next(model.parameters()).device
        self.buffers = BufferChanges(model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.autocast == "float16")
        self.counts = self.no_counts()
        """What the task counts of this worker's samples of the step so far. Whole numbers have the
        same sum in any order, so they do not go through the tree.
        """
        self.arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext
        """What is around a forward."""
        if config.autocast in AUTOCAST:
            dtype = AUTOCAST[config.autocast]
            # A cast that is kept sums the gradients of a layer's calls in the shorter type. Torch
            # keeps none of a layer whose ranks have samples of their own, so none may be kept.
            keeps = not is_split
            self.arithmetic = partial(torch.autocast, self.device.type, dtype, cache_enabled=keeps)
        self._first_leaf = 0

    def begin_step(self, first_leaf: int = 0) -> None:
        """Begins a step, all micro-batches of which start from the same buffers. first_leaf: the
        number of the first of them.
        """
        self._first_leaf = first_leaf
        self.counts = self.no_counts()
        self.buffers.begin_step()

    def __call__(
        self, inputs: Any, targets: Any, step: int, leaf: int
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The loss to differentiate, and the tail: the loss by itself, and the changes to buffers.

        A micro-batch without samples (at the end of an epoch) has no loss and a tail of zeros.
        """
        self.buffers.begin_micro_batch()
        samples = num_samples(inputs, targets)
        if samples == 0:
            return None, self.empty_tail()
        loss, outputs, mixed = self._loss(inputs, targets, step, leaf)
        loss = self.weighted(loss, samples)
        self.count(outputs, mixed)
        return self.scaler.scale(loss), self.tail(loss, leaf, samples)

    def begin(self, inputs: Any, targets: Any, step: int, leaf: int) -> Mixed:
        """A micro-batch as it goes into the network; torch's generators begin anew for it."""
        mixed = self.mixing(inputs, targets, step, leaf)
        seed_random(self.config.seed, "dropout", step, leaf)
        return mixed

    def weighted(self, loss: Tensor, samples: int) -> Tensor:
        """The loss of so many samples: a short micro-batch weighs less."""
        weight = self._weight(samples)
        # A full one is not multiplied, which keeps it cheap.
        return loss if weight == 1 else loss * weight

    @torch.no_grad()
    def count(self, outputs: Any, mixed: Mixed) -> None:
        """Adds what the task counts of a micro-batch."""
        if self.task.counts is not None:
            self.counts = self.counts + self.task.counts.count(outputs, mixed.counted)

    def tail(self, loss: Tensor | None, leaf: int, samples: int) -> list[Tensor]:
        """What goes along with the gradients of the micro-batch that just ran. loss: as it is
        weighted; None if another rank knows it.
        """
        value = torch.zeros(1, device=self.device)
        if loss is not None:
            # A copy: it may be a view of what backward needs, and the tail is added to in place.
            value = loss.detach().float().reshape(1).clone()
        return [value, *self.buffers.take(leaf - self._first_leaf, self._weight(samples))]

    def _weight(self, samples: int) -> float:
        return samples / self.config.micro_batch_size

    def keep(self, parameters: Sequence[str]) -> None:
        """Keeps parameters as buffers are kept: those, not trained, that forward changes."""
        self.buffers = BufferChanges(self.model, parameters)

    def go_along(self, inputs: Any, targets: Any, step: int, leaf: int) -> None:
        """Computes a micro-batch forward and backward, and leaves nothing of it: for ranks that
        wait at the same layers.
        """
        loss, _, _ = self._loss(inputs, targets, step, leaf)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)
        self.buffers.begin_micro_batch()

    def _loss(self, inputs: Any, targets: Any, step: int, leaf: int) -> tuple[Tensor, Any, Mixed]:
        """The mean loss of the samples, the network's outputs, and what they were made of."""
        mixed = self.begin(inputs, targets, step, leaf)
        return *self.loss_of(mixed), mixed

    def loss_of(self, mixed: Mixed) -> tuple[Tensor, Any]:
        """The mean loss of a micro-batch as `begin` gives it, and the network's outputs."""
        with self.arithmetic():
            outputs = self._run(laid_out(mixed.inputs, self.config))
            return mixed.loss(self.task.loss, outputs), outputs

    def no_counts(self) -> Tensor:
        """What the task counts of no samples."""
        return torch.zeros(len(self.task.counted), device=self.device)

    def empty_tail(self) -> list[Tensor]:
        """The tail of a micro-batch without samples."""
        return [torch.zeros(1, device=self.device), *self.buffers.no_changes()]


def lay_out(model: nn.Module, config: TrainConfig) -> None:
    """Brings the weights into the memory layout of a recipe."""
    if config.channels_last:
        # torch's annotations do not have it.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def laid_out(inputs: Any, config: TrainConfig) -> Any:
    """The inputs in the memory layout of the weights: images, and what else is of floats and has
    four dimensions.
    """
    return tree_map(_channels_last, inputs) if config.channels_last else inputs


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
