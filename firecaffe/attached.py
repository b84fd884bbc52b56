"""Two lines in anyone's training script, and `firecaffe explain` reads where its time goes:

    import firecaffe
    firecaffe.attach(model, optimizer, "runs/mine")

Works with DistributedDataParallel, with `firecaffe.parallelize`, and alone. From the end of an
optimizer's step to the model's forward is data; from there until the last gradient is there is
compute; from then until the optimizer's step is waiting for the exchange, which DDP does before
`backward` returns; then comes the update. On a GPU each of these points waits for the device, which
takes from the overlap of steps; detach for a run that is to be timed.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from firecaffe.errors import RunError
from firecaffe.runs.record import JsonLines


class Attached:
    """Writes FOLDER/timings/rank-R.jsonl, a row a step, until `detach`."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, folder: str | Path) -> None:
        """Raises: RunError where the folder already has this rank's timings."""
        rank = int(os.environ.get("RANK", "0"))
        path = Path(folder) / "timings" / f"rank-{rank}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = JsonLines(path)
        except FileExistsError:
            raise RunError(f"{path} exists already; two runs never write into one folder") from None
        except OSError as error:
            raise RunError(f"{folder}: {error.strerror}") from error
        parameters = [p for p in model.parameters() if p.requires_grad]
        is_gpu = bool(parameters) and parameters[0].is_cuda
        self._finish: Callable[[], None] = torch.cuda.synchronize if is_gpu else lambda: None
        # Backward runs ahead of a GPU; what that has done is timed by its own events.
        make: Any = torch.cuda.Event
        self._events = [make(enable_timing=True) for _ in range(2)] if is_gpu else []
        self._step = 0
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

    def detach(self) -> None:
        """Takes all hooks away, and closes the file."""
        self._handles.close()
        self._lines.__exit__(None, None, None)

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
        self._lines.write(
            {
                "step": self._step,
                "data_s": forward_s - self._ended_s,
                "compute_s": ready_s - forward_s,
                "exposed_communication_s": self._waited_s - ready_s,
                "update_s": now - self._waited_s,
                "step_s": now - self._ended_s,
            }
        )
        self._ended_s, self._forward_s, self._ready_s = now, 0.0, 0.0


def attach(model: nn.Module, optimizer: optim.Optimizer, folder: str | Path) -> Attached:
    """Records where the time of each step goes, for `firecaffe explain FOLDER`.

    Every rank calls it, with the same folder; RANK in the environment says which it is.
    """
    return Attached(model, optimizer, folder)
