"""The forward pass of one micro-batch: its loss, and what is summed along with its gradients.

It fixes what decides the bits of a micro-batch on a rank: threads, kernels, random numbers.

torch.compile makes code for each micro-batch size, never for dynamic sizes: a worker that has had a
short micro-batch would continue with other code than the others, and get other bits. Evaluations
run uncompiled. The network itself is not replaced, so the names of parameters do not change.
"""

import hashlib
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map

from firecaffe.cluster.process_settings import compute_threads, variables_kept
from firecaffe.data import Batch, num_samples
from firecaffe.errors import RecipeError
from firecaffe.generators import generators_kept, seed_generators
from firecaffe.gradients.buffers import BufferChanges
from firecaffe.recipe.sections import TrainConfig
from firecaffe.tasks import Task
from firecaffe.training.sample_mixing import Mixed, Mixing
from firecaffe.training.updates.spread import UpdatingScaler


def compiled(model: nn.Module) -> Callable[..., Any]:
    """Return the forward pass, compiled for each size. Raises: RecipeError without a compiler."""
    check_compiler(next(model.parameters()).device.type)
    # With too many sizes, torch would silently continue without compiled code.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    made: Callable[..., Any] = torch.compile(model, dynamic=False)
    return made


def check_compiler(device: str) -> None:
    """Raise RecipeError if torch finds no C++ compiler, which it needs on a CPU."""
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


ATTENTION: list[SDPBackend] = [
    kernel for kernel in SDPBackend.__members__.values() if kernel != SDPBackend.ERROR
]
"""The kernels of attention that torch may choose from."""

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable of cuBLAS's workspace, which torch reads once, with the first deterministic call."""


@contextmanager
def arithmetic(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Fix threads and kernels of this process in the block; restore them and generators after it.

    On a GPU with `deterministic`, kernels are not benchmarked (each worker may choose others), TF32
    is off, and torch raises an error for an operation without a deterministic kernel. Source:
    PyTorch's notes on reproducibility; cuBLAS, "Results reproducibility".
    """
    with ExitStack() as before:
        before.enter_context(generators_kept())
        before.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        before.enter_context(compute_threads(config.threads))
        before.enter_context(_default_modes(device))
        if device.type == "cuda" and config.deterministic:
            before.enter_context(variables_kept(WORKSPACE))
            os.environ.setdefault(WORKSPACE, ":4096:8")
            before.enter_context(_deterministic())
        yield


@contextmanager
def _default_modes(device: torch.device) -> Iterator[None]:
    """Set torch's modes as in a new process.

    Gradients, oneDNN and all kernels of attention are on; float32, no autocast.
    """
    with ExitStack() as before:
        if torch.get_default_device().type != "cpu":  # for new tensors
            before.enter_context(torch.device("cpu"))
        before.enter_context(torch.inference_mode(False))
        before.enter_context(torch.enable_grad())
        before.enter_context(_outside_autocast(device.type))
        before.enter_context(sdpa_kernel(ATTENTION))
        before.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(True)
        library: Any = torch.backends.mkldnn
        _set(library, "enabled", True, before)
        for operations in (library.matmul, library.conv, library.rnn):
            _set(operations, "fp32_precision", "ieee", before)
        yield


@contextmanager
def _outside_autocast(device_type: str) -> Iterator[None]:
    # autocast(enabled=False) would not do: torch drops its cache of cast weights when the outermost
    # block ends, so later steps would use the cast weights of an earlier one.
    was_enabled = torch.is_autocast_enabled(device_type)
    depth = torch.autocast_increment_nesting() - 1
    while torch.autocast_decrement_nesting():
        pass
    torch.clear_autocast_cache()
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, was_enabled)
        for _ in range(depth):
            torch.autocast_increment_nesting()


@contextmanager
def _deterministic() -> Iterator[None]:
    # Also turns off filling new memory, a guard against reading it unwritten that changes no bits.
    wanted = (
        (torch.utils.deterministic, "fill_uninitialized_memory"),
        (torch.backends.cudnn, "benchmark"),
        (torch.backends.cuda.matmul, "allow_tf32"),
        (torch.backends.cudnn, "allow_tf32"),
    )
    with ExitStack() as before:
        for holder, name in wanted:
            _set(holder, name, False, before)
        before.callback(
            torch.use_deterministic_algorithms,
            torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        yield


@contextmanager
def naming_kernels() -> Iterator[None]:
    """Name an operation of the block that has no deterministic kernel. Raises: RecipeError."""
    try:
        yield
    except Exception as error:
        missing = re.search(r"(\S+) does not have a deterministic implementation", str(error))
        if missing is None:
            raise
        raise RecipeError(
            f"{missing[1]} has no kernel that gives the same bits every time; leave it out of "
            "network and loss, or set train.deterministic = false, and GPUs give other bits in "
            "each run"
        ) from error


def _set(holder: Any, name: str, value: object, before: ExitStack) -> None:
    try:
        before.callback(setattr, holder, name, getattr(holder, name))
    except RuntimeError:  # TF32 was set by its newer name, and cannot be read by the older one
        for part in (holder.conv, holder.rnn) if holder is torch.backends.cudnn else (holder,):
            before.callback(setattr, part, "fp32_precision", part.fp32_precision)
    setattr(holder, name, value)


def cost_of_determinism(micro_batch: Callable[[], object], repeats: int = 5) -> float:
    """Return a micro-batch's time with deterministic kernels over that without, on this GPU."""
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
    """Seed torch's, python's and numpy's global generators for a purpose, as (seed, "dropout", 3).

    So no generator's state has to be saved, and random numbers do not depend on the rank.
    """
    key = key_of(seed, *what)
    seed_generators(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)


def key_of(seed: int, *what: str | int) -> int:
    """Return a seed of 63 bits for one purpose."""
    text = " ".join(str(part) for part in (seed, *what))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Forward:
    """The forward pass of a network with a task. Its state is the network's and the loss scale."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        config: TrainConfig,
        mixing: Mixing | None = None,
        is_split: bool = False,
        device: torch.device | None = None,
        outline: nn.Module | None = None,
    ) -> None:
        # mixing: applied to a micro-batch before the network. is_split: whether layers are split.
        # outline: the whole network, if the model is a part of it.
        self.model, self.task, self.config, self._outline = model, task, config, outline
        self._run = compiled(model) if config.compile else model
        self.mixing = mixing or Mixing(config.seed)
        self.device = device or next(model.parameters()).device
        self.buffers = BufferChanges(model, outline=outline)
        self.scaler = UpdatingScaler(self.device.type, enabled=config.autocast == "float16")
        # Integers have the same sum in any order, so the task's counts bypass the tree.
        self.counts = self.zero_counts()
        # the context in which the network runs
        self.arithmetic: Callable[[], AbstractContextManager[object]] = nullcontext
        if config.autocast in AUTOCAST:
            dtype = AUTOCAST[config.autocast]
            # With a cached cast, the gradients of a layer's calls are summed in the shorter type.
            # Torch caches none in split layers of own samples, so no split layer has cached casts.
            keeps = not is_split
            self.arithmetic = partial(torch.autocast, self.device.type, dtype, cache_enabled=keeps)
        self._first_leaf = 0
        self._untrained = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]

    def begin_step(self, first_leaf: int = 0) -> None:
        """Begin a step, whose micro-batches, from `first_leaf`, start from the same buffers."""
        for name, parameter in self._untrained:
            if parameter.requires_grad:
                raise RecipeError(
                    f"forward sets requires_grad of the parameter {name}, which no optimizer has; "
                    "expected it to be trained, or frozen, from the first step on"
                )
        self._first_leaf = first_leaf
        self.counts = self.zero_counts()
        self.buffers.begin_step()

    def __call__(
        self, inputs: Any, targets: Any, step: int, leaf: int
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the loss to differentiate, None without samples, and the tail, which is summed."""
        self.buffers.begin_micro_batch()
        samples = num_samples(inputs, targets)
        if samples == 0:
            return None, self.empty_tail()
        mixed = self.begin(inputs, targets, step, leaf)
        loss, outputs = self.loss_of(mixed)
        loss = self.weighted(loss, samples)
        self.count(outputs, mixed)
        return self.scaler.scale(loss), self.tail(loss, leaf, samples)

    def begin(self, inputs: Any, targets: Any, step: int, leaf: int) -> Mixed:
        """Return a micro-batch as it enters the network, and seed torch's generators for it."""
        mixed = self.mixing(inputs, targets, step, leaf)
        seed_random(self.config.seed, "dropout", step, leaf)
        return mixed

    def weighted(self, loss: Tensor, samples: int) -> Tensor:
        """Return the loss weighted by its samples: a short micro-batch weighs less."""
        weight = self._weight(samples)
        # A full micro-batch is not multiplied, which saves time.
        return loss if weight == 1 else loss * weight

    @torch.no_grad()
    def count(self, outputs: Any, mixed: Mixed) -> None:
        if self.task.counts is not None:
            self.counts = self.counts + self.task.counts.count(outputs, mixed.counted)

    def tail(self, loss: Tensor | None, leaf: int, samples: int) -> list[Tensor]:
        """Return what is summed with the last gradients. loss: None if another rank has it."""
        value = torch.zeros(1, device=self.device)
        if loss is not None:
            # A copy: it may be a view of what backward needs, and the tail is changed in place.
            value = loss.detach().float().reshape(1).clone()
        return [value, *self.buffers.take(leaf - self._first_leaf, self._weight(samples))]

    def changed_since(self, tail: Sequence[Tensor], first: Batch) -> list[str]:
        """Return the buffers that changed after a step's first micro-batch returned this tail.

        Buffers of normalizations are left out: activation checkpointing updates them again.
        """
        now = self.buffers.take(0, self._weight(num_samples(*first)))
        known = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.model.named_modules()
            if isinstance(module, _NormBase)
            for name in module._buffers
        }
        return [n for n in self.buffers.names_that_differ(tail[1:], now) if n not in known]

    def _weight(self, samples: int) -> float:
        return samples / self.config.micro_batch_size

    def keep(self, parameters: Sequence[str]) -> None:
        """Treat untrained parameters that forward changes as buffers."""
        self.buffers = BufferChanges(self.model, parameters, self._outline)

    def run_stand_in(self, inputs: Any, targets: Any, step: int, leaf: int) -> None:
        """Compute a stand-in micro-batch for ranks waiting at split layers; discard the results."""
        loss, _ = self.loss_of(self.begin(inputs, targets, step, leaf))
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)
        self.buffers.begin_micro_batch()

    def loss_of(self, mixed: Mixed) -> tuple[Tensor, Any]:
        """Return the mean loss and the outputs of a micro-batch that `begin` returned."""
        with self.arithmetic():
            outputs = self._run(match_format(mixed.inputs, self.config))
            return mixed.loss(self.task.loss, outputs), outputs

    def zero_counts(self) -> Tensor:
        return torch.zeros(len(self.task.counted), device=self.device)

    def empty_tail(self) -> list[Tensor]:
        return [torch.zeros(1, device=self.device), *self.buffers.zero_changes()]


def set_memory_format(model: nn.Module, config: TrainConfig) -> None:
    if config.channels_last:
        # torch's annotations lack this call.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def match_format(inputs: Any, config: TrainConfig) -> Any:
    """Return the inputs in the weights' memory format if they are 4-D floats, such as images."""
    return tree_map(_channels_last, inputs) if config.channels_last else inputs


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4 or not tensor.is_floating_point():
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)
