"""Torch's own tests of DistributedDataParallel, on CPUs, over whatever stands in DDP's place.

They are in torch's wheel (torch.testing._internal.distributed). Many ask for GPUs though nothing in
them needs one; here a GPU's number means the CPU.
"""

import os
import sys
import types
import unittest
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

TIMEOUT_S = 30
MODULE = "torch.testing._internal.distributed.distributed_test"


def run(name: str, folder: str, stand_in: Callable[..., Any]) -> str | int:
    """Why a test was skipped on this rank, else how many models it has wrapped; raises as it does.

    stand_in: takes DDP's place.
    """
    wrapped = 0

    def wrap(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        nonlocal wrapped
        wrapped += 1
        if arguments and not isinstance(arguments[0], str):
            arguments = ()  # device_ids
        for word in ("device_ids", "output_device"):
            options.pop(word, None)
        return stand_in(module, *arguments, **options)

    tests = load(folder)
    for part in ("barrier", "init_dir", "test_dir"):
        (Path(folder) / part).mkdir(exist_ok=True)
    suite = type("Suite", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})
    test = suite(name)
    test.rank = int(os.environ["RANK"])
    test.file_name = f"{folder}/file"
    tests.Barrier.barrier_id = 0
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/init",
        rank=test.rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    with (
        patch.object(nn.parallel, "DistributedDataParallel", wrap),
        patch.object(tests, "DistributedDataParallel", wrap),
        OnCpu(),
        on_cpu(),
    ):
        try:
            test._barrier()
            getattr(test, name)()
        except (unittest.SkipTest, SystemExit) as skip:
            return f"skipped: {skip}"
        finally:
            dist.destroy_process_group()
    return wrapped


def load(folder: str) -> Any:
    """Torch's module of tests, whose decorators must not skip what asks for GPUs."""
    os.environ.update(BACKEND="gloo", TEMP_DIR=folder)
    if "expecttest" not in sys.modules and find_spec("expecttest") is None:
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub  # of its own assertions these tests use none
    from torch.testing._internal import common_distributed

    def keep(*_: Any) -> Any:
        return lambda function: function

    with (
        patch.object(common_distributed, "skip_if_lt_x_gpu", keep),
        patch.object(common_distributed, "skip_if_no_gpu", lambda function: function),
        patch.object(torch.cuda, "device_count", lambda: int(os.environ["WORLD_SIZE"])),
    ):
        return import_module(MODULE)


def cpu_of(device: Any) -> Any:
    """A device as it was asked for, but never a GPU."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or (
        isinstance(device, str | torch.device) and "cuda" in str(device)
    ):
        return torch.device("cpu")
    return device


class OnCpu(TorchFunctionMode):
    """A GPU's number, given to a function of torch's, means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = dict(kwargs or {})
        if "device" in words:
            words["device"] = cpu_of(words["device"])
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to and len(args) > 1 and not isinstance(args[1], Tensor):
            args = (args[0], cpu_of(args[1]), *args[2:])
        return func(*args, **words)


def on_cpu() -> Any:
    """Modules stay where they are, and there is nothing to wait for."""
    stack = ExitStack()
    to = nn.Module.to

    def to_cpu(module: nn.Module, *arguments: Any, **words: Any) -> nn.Module:
        if arguments:
            arguments = (cpu_of(arguments[0]), *arguments[1:])
        if "device" in words:
            words["device"] = cpu_of(words["device"])
        return to(module, *arguments, **words)

    stack.enter_context(patch.object(nn.Module, "cuda", lambda module, *_: module))
    stack.enter_context(patch.object(nn.Module, "to", to_cpu))
    for name in ("set_device", "synchronize"):
        stack.enter_context(patch.object(torch.cuda, name, lambda *_: None))
    stack.enter_context(
        patch.object(torch.cuda, "device_count", lambda: int(os.environ["WORLD_SIZE"]))
    )
    return stack
