"""The reducer: micro-batch gradients in, the step's mean gradient out, exchange beside backward.

The gradients of each micro-batch are the leaves of the fixed binary tree of `exchange.leaves`. All
but a worker's last micro-batch are added after their backward, by the binary counter. In the last
one a hook on the last parameter of each bucket looks whether all its gradients are there; then its
sums are finished and one communication thread takes it to the other workers while backward goes on.
Buckets leave in a fixed order, the same on all ranks. `p.grad` ends as a view into its bucket.

Beside the gradients every micro-batch brings a short row of numbers, the tail (its loss, its
counts, its changes to buffers), summed by the same tree; and for each parameter whether it was
used, so that one that nobody used keeps `p.grad = None` and the optimizer leaves it alone, on any
number of workers.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firecaffe.comm.exchange import FOLD, Exchange
from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import Node, TreeSum
from firecaffe.gradients.buckets import Bucket, make_buckets, views_like

Leaf = list[Tensor]
"""One tensor for each parameter, and the tail last."""


@dataclass(frozen=True)
class Totals:
    """What a step's tree came to."""

    tail: Tensor
    """The sum of all tails."""
    exposed_s: float
    """Seconds that the step waited for communication after its backward."""
    exchange_s: float
    """Seconds that communication took in all, hidden or not."""


class GradientReducer:
    """Sums gradients over micro-batches and workers. One `begin_step`, then `add` for each own
    micro-batch in order, then `finish_step`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        ready_order: Sequence[int],
        tail: Tensor,
        num_leaves: int,
        exchange: Exchange,
        route: str,
        bucket_bytes: int,
    ) -> None:
        """parameters: those that need gradients. ready_order: their indices in the order in which
        backward finishes them. tail: an example of a tail. route: see `comm.exchange.route`.
        """
        self.parameters = list(parameters)
        self.num_leaves = num_leaves
        self.exchange = exchange
        self.route = route
        self._used = torch.ones(len(self.parameters), dtype=tail.dtype, device=tail.device)
        self._tail_index = len(self.parameters)
        tensors = [*self.parameters, torch.cat([self._used, tail])]
        ranks = exchange.world.world_size
        self.buckets = make_buckets(
            tensors, [*ready_order, self._tail_index], bucket_bytes, multiple=ranks
        )
        self._view_of = {
            member: view
            for bucket in self.buckets
            for member, view in zip(bucket.members, bucket.views, strict=True)
        }
        # What is divided at the root: all but the tail, which ends the last bucket.
        self._gradients = [bucket.flat for bucket in self.buckets]
        self._gradients[-1] = self._gradients[-1][: self.buckets[-1].views[-1].storage_offset()]
        self._thread = None
        if ranks > 1:
            self._thread = ThreadPoolExecutor(1, "exchange", _begin_thread, (tail.device,))
        self._hooks = []
        if ranks > 1:
            last_of_each = [bucket.members[-1] for bucket in self.buckets[:-1]]
            self._hooks = [
                self.parameters[index].register_post_accumulate_grad_hook(self._on_ready)  # type: ignore[no-untyped-call]
                for index in last_of_each
            ]
        self._stream = torch.cuda.Stream(tail.device) if tail.is_cuda else None  # type: ignore[no-untyped-call]
        self._closing = False

    def close(self) -> None:
        """Removes the hooks and ends the communication thread."""
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def begin_step(self, total_weight: float) -> None:
        """total_weight: what the sums are divided by, once, at the root."""
        self._total_weight = total_weight
        self._counter: TreeSum[Leaf] = TreeSum(self.num_leaves, _add_in_place)
        self._merged: list[Leaf] = []
        self._node = Node(0, 0)
        self._next_bucket = 0
        self._futures: list[Future[float]] = []
        self._sent: list[tuple[Tensor, int]] = []
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, leaf: int, loss: Tensor | None, tail: Tensor, is_last: bool) -> None:
        """Runs backward for one micro-batch and adds its gradients.

        loss: None for a micro-batch without samples, which adds zeros. is_last: this worker has no
        further micro-batch in this step.
        """
        if is_last:
            self._merged, self._node = self._counter.take_completed(Node(0, leaf))
            if self.route != FOLD:
                self._merged += [value for _, value in reversed(self._counter.pending)]
            self._closing = True
        if loss is not None:
            torch.autograd.backward(loss)
        self._closing = False
        if any(gradient._version != version for gradient, version in self._sent):
            raise RecipeError(
                "a parameter's gradient changed after backward had finished it; "
                "torch.utils.checkpoint needs use_reentrant=False"
            )
        used = [parameter.grad is not None for parameter in self.parameters]
        mask = self._used if all(used) else self._used * self._used.new_tensor(used)
        tail = torch.cat([mask, tail])
        if is_last:
            self._send_ready_buckets(tail)
            return
        gradients = [_gradient(parameter) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self._counter.push(Node(0, leaf), [*gradients, tail])

    def finish_step(self) -> Totals:
        """Waits for the exchange and leaves the mean gradient in every `p.grad`."""
        if self._stream is not None:
            # Kernels of backward that are still running are compute, not communication.
            torch.cuda.current_stream().synchronize()
        start = time.perf_counter()
        exchange_s = sum(future.result() for future in self._futures)
        exposed_s = time.perf_counter() - start
        used, tail = self._view_of[self._tail_index].tensor_split([len(self.parameters)])
        for index, is_used in enumerate(used.tolist()):
            self.parameters[index].grad = self._view_of[index] if is_used else None
        return Totals(tail, exposed_s, exchange_s)

    def _on_ready(self, _: nn.Parameter) -> None:
        if self._closing:
            self._send_ready_buckets(None)

    def _send_ready_buckets(self, tail: Tensor | None) -> None:
        """Takes the next buckets, in order, that are complete; all, once backward brought the tail.

        Before, the last bucket, which ends in the tail, is never complete.
        """
        while self._next_bucket < len(self.buckets):
            index = self._next_bucket
            if tail is None and not self._is_complete(index):
                return
            self._next_bucket += 1
            if tail is None:
                gradients = [self.parameters[m].grad for m in self.buckets[index].members]
                self._sent += [(g, g._version) for g in gradients if g is not None]
            nodes = self._close_bucket(self.buckets[index], tail)
            if self._thread is None:
                self._gradients[index].div_(self._total_weight)
            else:
                is_cuda = self.buckets[index].flat.is_cuda
                ready = torch.cuda.current_stream().record_event() if is_cuda else None
                self._futures.append(self._thread.submit(self._exchange, index, nodes, ready))

    def _is_complete(self, index: int) -> bool:
        if index == len(self.buckets) - 1:
            return False
        return all(self.parameters[m].grad is not None for m in self.buckets[index].members)

    def _close_bucket(self, bucket: Bucket, tail: Tensor | None) -> list[tuple[Node, Tensor]]:
        """Finishes this worker's sums of one bucket; returns its nodes of the tree."""
        for member, view in zip(bucket.members, bucket.views, strict=True):
            if member == self._tail_index:
                assert tail is not None
                value = tail
            else:
                value = _gradient(self.parameters[member])
            if not self._merged:
                view.copy_(value)
            for left in self._merged[:-1]:
                value = left[member].add_(value)
            for left in self._merged[-1:]:
                torch.add(left[member], value, out=view)
        if self.route != FOLD:
            return []
        nodes = []
        for node, leaf in self._counter.pending:
            flat = torch.zeros_like(bucket.flat)
            parts = [leaf[member] for member in bucket.members]
            for view, part in zip(views_like(flat, bucket.views), parts, strict=True):
                view.copy_(part)
            nodes.append((node, flat))
        return [*nodes, (self._node, bucket.flat)]

    def _exchange(
        self,
        index: int,
        nodes: list[tuple[Node, Tensor]],
        ready: torch.cuda.Event | None,
    ) -> float:
        """Runs in the communication thread; returns its seconds.

        On a GPU the thread has a stream of its own and waits on the host for both ends, so that
        its seconds are those of the exchange.
        """
        if ready is not None:
            ready.synchronize()
        start = time.perf_counter()
        flat = self.buckets[index].flat
        with torch.cuda.stream(self._stream):
            if self.route == FOLD:
                self.exchange.fold(nodes, self.num_leaves, flat)
            else:
                self.exchange.all_reduce(flat)
            self._gradients[index].div_(self._total_weight)
        if self._stream is not None:
            self._stream.synchronize()
        return time.perf_counter() - start


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _add_in_place(left: Leaf, right: Leaf) -> Leaf:
    torch._foreach_add_(left, right)
    return left


def _begin_thread(device: torch.device) -> None:
    # Threads of its own would take cores from backward, which runs at the same time.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
