"""Fixes what decides the bits of a micro-batch on a rank: threads, kernels, random numbers."""

import hashlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from firecaffe.generators import generators_kept, seed_generators
from firecaffe.recipe.config import TrainConfig


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
