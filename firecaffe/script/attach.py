"""Timings of a user's own training script, with or without DistributedDataParallel.

A step has four parts: data, from the end of an optimizer's step to the model's forward; compute,
until the last gradient; the wait for the exchange, until the optimizer's step; and the update. On a
GPU each of these points waits for the device, which reduces the overlap of steps. With
`firecaffe.adapt.split_layers`, the layers' waits for activations count as waits.
"""

import os
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn, optim

from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import rank_and_size
from firecaffe.cluster.world import launcher_store
from firecaffe.errors import RunError
from firecaffe.parallel.layer_split import Split
from firecaffe.runs.record import JsonLines
from firecaffe.runs.schemas import StepRow
from firecaffe.schema import read_rows
from firecaffe.script.script_arguments import ArgumentError, check_network, check_optimizer
from firecaffe.user_code import shown

_timed: "weakref.WeakKeyDictionary[optim.Optimizer, Path]" = weakref.WeakKeyDictionary()
"""The optimizers that are timed: a second pair of hooks would time the first one."""

_PROCESS = uuid4().hex
"""This process or, if it was forked, its parent. Another process of this rank is a restart."""


class Attached:
    """Writes FOLDER/timings/rank-R.jsonl, a row for each step, until `detach`."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, folder: str | Path) -> None:
        rank, _ = rank_and_size()
        path = Path(folder).absolute() / "timings" / f"rank-{rank}.jsonl"
        store, key = launcher_store(), f"firecaffe/attached/{path}"
        me = f"{_PROCESS} {os.getpid()}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            goes_on = store.check([key]) and store.get(key).decode() != me
            self._step = _last_step(path.parent) if goes_on else 0
            self._lines = JsonLines(path, goes_on)
        except FileExistsError:
            raise RunError(f"{path} exists already; two runs never write into one folder") from None
        except OSError as error:
            raise RunError(f"{folder}: {error.strerror}") from error
        store.set(key, me)
        parameters = [p for p in model.parameters() if p.requires_grad]
        is_gpu = bool(parameters) and parameters[0].is_cuda
        self._finish: Callable[[], None] = torch.cuda.synchronize if is_gpu else lambda: None
        # Backward runs ahead of a GPU, whose work is timed by its own events.
        make: Any = torch.cuda.Event
        self._events = [make(enable_timing=True) for _ in range(2)] if is_gpu else []
        self._groups = [module.group for module in model.modules() if isinstance(module, Split)]
        self._exchanged_s = self._exchanges_s
        self._ended_s = time.perf_counter()
        self._forward_s = self._ready_s = self._waited_s = 0.0
        self._handles = ExitStack()
        keep = self._handles.callback
        keep(model.register_forward_pre_hook(self._before_forward).remove)
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
            keep(handle.remove)
        keep(optimizer.register_step_pre_hook(self._before_update).remove)
        keep(optimizer.register_step_post_hook(self._after_update).remove)
        _timed[optimizer] = Path(folder)
        keep(lambda: _timed.pop(optimizer, None))

    @property
    def _exchanges_s(self) -> float:
        return sum(group.seconds for group in self._groups)

    def detach(self) -> None:
        """Remove all hooks and close the file."""
        self._handles.close()
        self._lines.close()

    def _before_forward(self, *_: Any) -> None:
        if not self._forward_s:  # the first of a step's micro-batches
            self._finish()
            self._forward_s = time.perf_counter()
            if self._events:
                self._events[0].record()

    def _gradient_ready(self, _: torch.Tensor) -> None:
        self._ready_s = time.perf_counter()
        if self._events:
            self._events[1].record()

    def _before_update(self, *_: Any) -> None:
        self._finish()
        self._waited_s = time.perf_counter()

    def _after_update(self, *_: Any) -> None:
        self._finish()
        now = time.perf_counter()
        forward_s = self._forward_s or self._ended_s
        if self._events and self._ready_s:
            self._ready_s = forward_s + self._events[0].elapsed_time(self._events[1]) / 1e3
        ready_s = max(forward_s, min(self._ready_s or self._waited_s, self._waited_s))
        self._step += 1
        total_s = self._exchanges_s
        activations_s = min(total_s - self._exchanged_s, ready_s - forward_s)
        self._exchanged_s = total_s
        row = {
            "step": self._step,
            "data_s": forward_s - self._ended_s,
            "compute_s": ready_s - forward_s - activations_s,
            "exposed_communication_s": self._waited_s - ready_s + activations_s,
            "update_s": now - self._waited_s,
            "step_s": now - self._ended_s,
        }
        self._lines.write(row | ({"activations_s": activations_s} if self._groups else {}))
        self._ended_s, self._forward_s, self._ready_s = now, 0.0, 0.0


@from_script
def attach(model: nn.Module, optimizer: optim.Optimizer, folder: str | Path) -> Attached:
    """Record the parts of each step's time, for `firecaffe explain FOLDER`.

    Every rank calls this, with the same folder, after `torch.distributed` was initialized; without
    it, RANK in the environment is the rank. A script that its launcher restarts continues the files
    of its last attempt. On a GPU this makes steps longer: `detach()` before a rate is measured.

    Args:
        model: The network whose steps are timed, in DDP or not.
        optimizer: The optimizer whose `step()` ends a step.
        folder: The folder in which `timings/rank-R.jsonl` is written.

    Raises: RecipeError if an argument is of another kind, or the optimizer is timed already;
    RunError if the folder has this rank's timings of another run, or cannot be written.
    """
    check_network("attach", "model", model)
    check_optimizer("attach", optimizer, model)
    if not isinstance(folder, str | Path) or not str(folder):
        raise ArgumentError(f"attach: folder is {shown(folder)}; expected the path of a folder")
    if optimizer in _timed:
        raise ArgumentError(
            f"attach: the steps of this optimizer are timed already, into {_timed[optimizer]}; "
            "call its detach() first"
        )
    return Attached(model, optimizer, folder)


def _last_step(folder: Path) -> int:
    # The last step of any rank, so that all continue with the same number.
    files = folder.glob("rank-*.jsonl")
    rows = (row for path in files for row in read_rows(path, StepRow))
    return max((row["step"] for row in rows), default=0)
