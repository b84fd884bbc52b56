"""Weights that all workers of one host read and write in the same memory, without a lock.

Each worker computes a gradient at the present weights, while others write to them, and then makes
its update in place. If two write to one weight at the same time, one write may be lost. A worker
may read some weights before an update and others after it. This is rare if a gradient touches few
weights; otherwise it is noise. There is one momentum for all, in the same memory. Buffers
(BatchNorm's statistics), losses and counts go to rank 0, as with a server.

Source: Niu, Recht, Ré, Wright 2011, "Hogwild: a lock-free approach to parallelizing stochastic
gradient descent".
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor, nn, optim

from firecaffe.errors import RecipeError
from firecaffe.recipe.run import Run
from firecaffe.solvers.optimizer import make_optimizer, set_rate
from firecaffe.solvers.update_rules import CaffeSGD
from firecaffe.synchrony.server_policies import Leaf, Work
from firecaffe.training.modes.served.coder import are_finite
from firecaffe.training.modes.served.server_memory import Gradient, Parcel, parcel_bytes
from firecaffe.training.modes.served.work_gradient import (
    Bench,
    Contribution,
    Holders,
    KeptTraining,
    Workbench,
)
from firecaffe.transport.local_ranks import meet_local_ranks


class LocklessBench:
    def __init__(self, bench: Workbench, optimizer: optim.Optimizer, run: Run) -> None:
        self._bench, self._optimizer, self._run = bench, optimizer, run

    def compute(self, work: Work, weights: Mapping[str, Tensor]) -> Contribution:
        """Compute a work at the present weights, and update them. `weights` are the buffers."""
        contribution = self._bench.compute(work, weights)
        start = time.perf_counter()
        is_finite = are_finite(self._bench.named, contribution.gradient.tensors.items())
        if is_finite.all():
            is_finite[-1] = self._update(work.leaf, contribution.gradient.tensors)
        return replace(
            contribution,
            gradient=Gradient({}, contribution.gradient.tail),
            is_finite=is_finite,
            compute_s=contribution.compute_s + time.perf_counter() - start,
        )

    @torch.no_grad()
    def _update(self, leaf: Leaf, gradients: Mapping[str, Tensor]) -> bool:
        """Make an update. Return False, and make none, if the norm is beyond float32."""
        run, clip_gradients = self._run, self._run.recipe.solver.clip_gradients
        weight = run.order.leaf_weight(*leaf)
        for name, gradient in gradients.items():
            self._bench.named[name].grad = gradient.div_(weight)
        if clip_gradients:
            named = self._bench.named.values()
            norm = nn.utils.clip_grad_norm_(named, clip_gradients, foreach=True)
            if not norm.isfinite():
                self._optimizer.zero_grad()
                return False
        set_rate(self._optimizer, run.learning_rate(leaf.step), run.momentum(leaf.step))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return True

    def end(self) -> None: ...


WEIGHT, MOMENTUM = "weight", "momentum"


class SharedWeights(Holders):
    hold_weights = True

    def __init__(self, whole: KeptTraining) -> None:
        """Share rank 0's weights and momentum with all ranks, which are on one host. All call it.

        Raises: RecipeError on all ranks if they have no memory in common; PeerLostError.
        """
        world, named, optimizer = whole.world, whole.named, whole.optimizer
        self._run, self._named, self._optimizer = whole.run, named, optimizer
        self._kept = "history" if isinstance(optimizer, CaffeSGD) else "momentum_buffer"
        self._at_work: list[nn.Parameter] = []
        has_momentum = any(group["momentum"] for group in optimizer.param_groups)
        kinds = (WEIGHT, MOMENTUM) if has_momentum else (WEIGHT,)
        examples = {f"{kind}/{name}": p for kind in kinds for name, p in named.items()}
        local = meet_local_ranks(world, whole.run.recipe.exchange.timeout_s)
        if local is None:
            if world.world_size > 1:
                raise RecipeError(
                    "synchrony.lock none: the ranks of this host do not reach each other's memory; "
                    "use lock = server"
                )
            self._shared = Parcel(examples)
            self._begin()
            return
        with closing(local):
            memory = local.share(parcel_bytes(examples), torch.uint8)[0]  # rank 0's
            self._shared = Parcel(examples, memory)
            if world.is_first:
                self._begin()
            local.barrier()

    def bench(self, bench: Workbench, place: int) -> Bench:
        optimizer = make_optimizer(bench.named, self._run.recipe.solver)
        for kind, name, view in self._views():
            parameter = bench.named[name]
            if kind == MOMENTUM:
                optimizer.state[parameter][self._kept] = view
            else:
                parameter.data = view
                self._at_work.append(parameter)
        return LocklessBench(bench, optimizer, self._run)

    @torch.no_grad()
    def gather(self, look: Callable[[], None]) -> None:
        """Copy the shared weights to the state, while others may write to them."""
        for kind, name, view in self._views():
            parameter = self._named[name]
            if kind == MOMENTUM:
                self._optimizer.state[parameter][self._kept] = view.clone()
            else:
                parameter.copy_(view)

    def cut(self) -> None:
        for parameter in self._at_work:
            parameter.data = parameter.data.clone()

    @torch.no_grad()
    def _begin(self) -> None:
        for kind, name, view in self._views():
            parameter = self._named[name]
            if kind == MOMENTUM:
                before = self._optimizer.state.get(parameter, {}).get(self._kept)
                view.zero_() if before is None else view.copy_(before)
            else:
                view.copy_(parameter)

    def _views(self) -> Iterator[tuple[str, str, Tensor]]:
        for path, view in self._shared.views.items():
            kind, _, name = path.partition("/")
            yield kind, name, view
