"""The reducer, which turns gradients of micro-batches into the step's mean gradient.

The gradients of each micro-batch are leaves of the fixed binary tree in `exchange.leaves`. During a
worker's last backward, a hook on the last parameter of each bucket checks whether the bucket is
complete. Then a communication thread exchanges it while backward continues. Buckets leave in one
order on all ranks. In the end `p.grad` is a view into its bucket. If nodes of the tree stay apart
(`Fold`), a worker's smaller nodes leave as soon as they are complete, before its last backward.
With shards (`gradients.shards`), each worker gets the mean of its own shard (with a codec, of all
shards), updates the rows of its shard, and gathers the others' weights through the same buckets.

Each micro-batch also has a tail (its loss and its changes to buffers), summed by the same tree.
Next to the loss, the tail has the gradient's squared norm, or 0 if the step does not measure it.
Integers have the same sum in any order, so each worker adds its counts once. The counts say which
parameters any worker used; the others keep `p.grad = None`, and the optimizer skips them, unless a
codec delivers a residual of earlier steps.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import Node, Shares, TreeSum, equal_shares
from firecaffe.exchange.route import CODEC, FOLD, HOOK
from firecaffe.gradients.bucket_sums import (
    AllReduce,
    CodecMemory,
    Combine,
    CompressedSum,
    Fold,
    Hook,
    Hooked,
    WeightGather,
    gradients_of,
)
from firecaffe.gradients.buckets import (
    ALIGNMENT,
    Bucket,
    Leaf,
    add_leaf,
    layout_of,
    make_buckets,
    views_like,
    with_early_tails,
)
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.shards import Shards, all_of
from firecaffe.gradients.threads import ExchangeThreads
from firecaffe.gradients.totals import Totals, all_finite, each_finite, squared_norm
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.queue import queue_of


class GradientReducer:
    """Sums gradients over micro-batches and workers, which begin with equal shares.

    In each step, call `begin_step`, `add` for each of this worker's micro-batches in the route's
    order, and `finish_step`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ready_order: Sequence[int],
        tail: Sequence[Tensor],
        counts: Tensor,
        num_leaves: int,
        exchange: Exchange,
        bucket_bytes: int,
        hook: tuple[object, Hook] | None = None,
        shards: Shards | None = None,
    ) -> None:
        """Make the buckets and threads for the exchange's route.

        `ready_order` has the parameters' indices in the order in which backward finishes them.
        `tail` and `counts` are examples. `hook` is DDP's (state, hook), for a route of way HOOK.
        `shards` is given if each worker updates a shard, on a route of way FOLD.
        """
        self.parameters, self.names = list(parameters.values()), list(parameters)
        self.num_leaves, self.exchange = num_leaves, exchange
        self.used: list[bool] = []
        """Whether any worker used each parameter in the finished step."""
        self.shards = shards or all_of(parameters)
        self._gather = WeightGather(exchange.world, self.shards, parameters)
        self._brings_shards = bool(self.shards.cuts) and exchange.route.way == FOLD
        num_parameters = len(self.parameters)
        unused = counts.new_zeros(num_parameters)
        self._unused, self._all_used = unused, torch.ones_like(unused)
        # The square fits into the alignment's padding: a longer bucket would change a ring's bits.
        self._has_square = bool(tail) and tail[0].shape == (1,) and tail[0].dtype == torch.float32
        self._no_square, self._measures = torch.zeros(1, device=counts.device), False
        self._tail_members = range(num_parameters, num_parameters + len(tail))
        self._counts_member = self._tail_members.stop
        self._alignment = ROW if exchange.route.way == CODEC else ALIGNMENT
        last = [*self._with_square(tail), torch.cat([self._unused, counts])]
        self.buckets = self._make_buckets(last, ready_order, bucket_bytes)
        self._view_of = {
            member: view
            for bucket in self.buckets
            for member, view in zip(bucket.members, bucket.views, strict=True)
        }
        self._combine = self._choose_combine(hook)
        self.queue, self._hooks = queue_of(counts.device), list[RemovableHandle]()
        self._threads: ExchangeThreads | None = None
        # A single worker also encodes in a thread: in the main thread torch may use several threads
        # for one sum, which changes the order of addition.
        if exchange.world.world_size > 1 or exchange.route.way == CODEC:
            self._start_threads(counts.device)
        self._counts: Callable[[], Tensor] | None = None
        self._closing = False

    def _make_buckets(
        self, last: Sequence[Tensor], ready_order: Sequence[int], bucket_bytes: int
    ) -> list[Bucket]:
        way, tensors = self.exchange.route.way, [*self.parameters, *last]
        rows = 1 if self._brings_shards else self.exchange.world.world_size
        multiple = rows * ROW if way == CODEC else rows
        settings = bucket_bytes, multiple, self.exchange.empty, self._alignment
        late = range(len(self.parameters), len(tensors))
        if way not in (CODEC, HOOK) and not self.shards.cuts:
            return make_buckets(tensors, [[*ready_order, *late]], *settings)
        return with_early_tails(make_buckets(tensors, [ready_order, late], *settings), late.start)

    def _choose_combine(self, hook: tuple[object, Hook] | None) -> Combine:
        exchange, route, world = self.exchange, self.exchange.route, self.exchange.world
        if route.way == CODEC:
            layouts = [layout_of(bucket, self.names) for bucket in self.buckets]
            compressor = make_compressor(route.codec, layouts)
            return CompressedSum(
                world, compressor, self.num_leaves, route.level, len(self.parameters)
            )
        if route.way == HOOK:
            assert hook is not None
            return Hooked(exchange, *hook, self.parameters, self.buckets)
        if route.way == FOLD:
            shares = equal_shares(self.num_leaves, world.world_size)
            return Fold(world, self.num_leaves, shares, self.shards.cuts)
        return AllReduce(exchange)

    def _start_threads(self, device: torch.device) -> None:
        lanes = self._combine.lanes
        self._threads = ExchangeThreads(self.exchange.world, lanes, device, self.queue)
        last_of_each = [bucket.members[-1] for bucket in self.buckets]
        self._hooks = [
            self.parameters[index].register_post_accumulate_grad_hook(self._on_ready)  # type: ignore[no-untyped-call]
            for index in last_of_each
            if index < len(self.parameters)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def close(self, wait: bool = True) -> None:
        """Close. `wait` for communication threads, one of which may wait for a lost rank."""
        for hook in self._hooks:
            hook.remove()
        self._counts = None  # it refers to this reducer, and to groups that others wait to end
        if self._threads is not None:
            self._threads.close(wait)
        self.exchange.close()

    def set_shares(self, shares: Shares) -> None:
        self._combine.set_shares(shares)

    @property
    def memory(self) -> CodecMemory | None:
        return self._combine.memory

    def begin_step(
        self,
        total_weight: float,
        leaves: Sequence[int],
        counts: Callable[[], Tensor],
        scale: Tensor | None = None,
        measures: bool = False,
    ) -> None:
        """Begin a step.

        `total_weight` divides the sums. `leaves` are this worker's micro-batches in the order of
        their addition. `counts`, called before the last backward, returns this worker's counts for
        all of them. `scale` is the factor of the losses, shape (), if there is one. `measures` asks
        for the squared norms of the micro-batches' gradients.
        """
        self._measures = measures
        self._total_weight, self._leaves, self._counts = total_weight, leaves, counts
        self._combine.begin_step(scale)
        top_level = self._combine.top_level
        # A leaf has a tensor for each parameter, then the tail.
        self._counter: TreeSum[Leaf] = TreeSum(self.num_leaves, add_leaf, top_level)
        self._merged: list[Leaf] = []
        self._node = Node(0, 0)
        self._next_bucket = 0
        self._sent: list[tuple[Tensor, int]] = []
        self._used = [False] * len(self.parameters)
        self._early_rounds = 0
        self._begin_buckets()
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, leaf: int, loss: Tensor | None, tail: Sequence[Tensor]) -> None:
        """Run backward for one micro-batch and add its gradients; without `loss`, add zeros."""
        if leaf == self._leaves[-1]:
            self._add_last(leaf, loss, tail)
            return
        self._backward(loss)
        gradients = [_gradient(parameter) for parameter in self.parameters]
        tail = self._with_square(tail)
        for parameter in self.parameters:
            parameter.grad = None
        self._counter.push(Node(0, leaf), [*gradients, *tail])
        self._begin_buckets()

    def _with_square(self, tail: Sequence[Tensor]) -> list[Tensor]:
        if not self._has_square:
            return list(tail)
        square = squared_norm(self.parameters) if self._measures else self._no_square
        return [torch.cat([tail[0], square]), *tail[1:]]

    def _begin_buckets(self) -> None:
        # A worker that has no node for an early round still receives the others' nodes.
        combine, pending = self._combine, self._counter.pending
        while self._early_rounds < combine.num_early:
            number, whole = self._early_rounds, list[tuple[Node, Leaf]]()
            if number < len(combine.early):
                if not pending or pending[-1][0] != combine.early[number]:
                    return
                whole = [pending.pop()]
            self._early_rounds += 1
            assert self._threads is not None
            for index, bucket in enumerate(self.buckets):
                nodes = {node: self._vector(bucket, leaf) for node, leaf in whole}
                begin = partial(combine.begin, number, index, nodes, bucket)
                self._threads.submit(index, begin, nodes.values(), early=True)

    def _add_last(self, leaf: int, loss: Tensor | None, tail: Sequence[Tensor]) -> None:
        assert self._counts is not None
        counts = self._counts()
        self._merged, self._node = self._counter.take_completed(Node(0, leaf))
        if not self._combine.takes_nodes:
            self._merged += [value for _, value in reversed(self._counter.pending)]
        self._closing = True
        try:
            self._backward(loss)
        finally:
            self._closing = False
        if any(gradient._version != version for gradient, version in self._sent):
            raise RecipeError(
                "a parameter's gradient changed after backward had finished it; "
                "torch.utils.checkpoint needs use_reentrant=False"
            )
        # A copy from the host would wait for the device.
        used = self._all_used if all(self._used) else self._unused.new_tensor(self._used)
        self._send_ready_buckets([*self._with_square(tail), torch.cat([used, counts])])
        # Free the local sums: they are as large as the weights, and the buckets have their values.
        self._merged, self._sent, self._counter.pending = [], [], []

    def _backward(self, loss: Tensor | None) -> None:
        if loss is not None:
            torch.autograd.backward(loss)
        if self._threads is not None:  # not in a hook: an aborted backward keeps its memory
            self._threads.raise_failure()
        if not all(self._used):
            now = (parameter.grad is not None for parameter in self.parameters)
            self._used = [a or b for a, b in zip(self._used, now, strict=True)]

    def finish_step(self) -> Totals:
        """Wait for the exchange and set `p.grad`. Raises PeerLostError, or a thread's error."""
        computed = self.queue.mark()
        spans = () if self._threads is None else self._threads.finish()
        summed = self.queue.mark()
        used, counts = self._view_of[self._counts_member].tensor_split([len(self.parameters)])
        # If this rank used all parameters, the others' flags do not matter.
        self.used = [*map(bool, self._used if all(self._used) else used.tolist())]
        for index, is_used in enumerate(self.used):
            # A compressor's memory may arrive in a step that does not use the parameter.
            has_any = is_used or (self.memory is not None and bool(self._view_of[index].any()))
            self._set_gradient(index, self._view_of[index] if has_any else None)
        tail, squares = [self._view_of[member] for member in self._tail_members], None
        if self._has_square:
            tail[0], squares = torch.split(tail[0], 1)
        return Totals(tuple(tail), counts, computed, summed, spans, squares)

    def _set_gradient(self, index: int, mean: Tensor | None) -> None:
        if (rows := self.shards.own.get(self.names[index])) is not None:
            rows.grad = None if mean is None else self.shards.own_part(self.names[index], mean)

    def undo_step(self) -> None:
        self._combine.undo_step()

    def gather_weights(self) -> None:
        """Gather the other ranks' rows of the weights. All ranks call it. Raises PeerLostError."""
        assert self._threads is not None
        for index, bucket in enumerate(self.buckets):
            if bucket.members in self.shards.cuts:
                self._threads.submit(index, partial(self._gather, bucket), [bucket.flat])
        self._threads.finish()

    def finite(self) -> Tensor:
        """Tell whether each mean gradient (with shards, this rank's part) is finite: bool."""
        if not self.parameters:
            return torch.ones(0, dtype=torch.bool, device=self._unused.device)
        # A bucket at a time costs less than a parameter at a time.
        if not self.queue.is_async and all_finite(map(self._means_in, self.buckets)):
            return torch.ones(len(self.parameters), dtype=torch.bool)
        views = [self._view_of[index] for index in range(len(self.parameters))]
        return each_finite([*map(self.shards.own_part, self.names, views)])

    def _on_ready(self, _: nn.Parameter) -> None:
        if self._closing:
            self._send_ready_buckets(None)

    def _send_ready_buckets(self, tail: Sequence[Tensor] | None) -> None:
        """Send the next complete buckets, or all if backward has returned and `tail` is given."""
        while self._next_bucket < len(self.buckets):
            index = self._next_bucket
            if tail is None and not self._is_complete(index):
                return
            self._next_bucket += 1
            if tail is None:
                gradients = [self.parameters[m].grad for m in self.buckets[index].members]
                self._sent += [(g, g._version) for g in gradients if g is not None]
            nodes = self._close_bucket(self.buckets[index], tail or ())
            to_mean = partial(self._to_mean, index, nodes)
            if self._threads is None:
                to_mean()
            else:
                vectors = [self.buckets[index].flat, *(vector for _, vector in nodes)]
                self._threads.submit(index, to_mean, vectors)

    def _is_complete(self, index: int) -> bool:
        return all(
            member < len(self.parameters) and self.parameters[member].grad is not None
            for member in self.buckets[index].members
        )

    def _close_bucket(self, bucket: Bucket, tail: Sequence[Tensor]) -> list[tuple[Node, Tensor]]:
        num_parameters = len(self.parameters)
        values = [
            _gradient(self.parameters[m]) if m < num_parameters else tail[m - num_parameters]
            for m in bucket.members
        ]
        # The counts, the last member of the last bucket, are not in the leaves.
        members = [m for m in bucket.members if m != self._counts_member]
        for left in self._merged if members else ():
            sums = [left[member] for member in members]
            torch._foreach_add_(sums, values[: len(sums)])
            values[: len(sums)] = sums
        torch._foreach_copy_(bucket.views, values)
        if not self._combine.takes_nodes:
            return []
        nodes = [(node, self._vector(bucket, leaf)) for node, leaf in self._counter.pending]
        return [*nodes, (self._node, bucket.flat)]

    def _vector(self, bucket: Bucket, leaf: Leaf) -> Tensor:
        flat = torch.zeros_like(bucket.flat)
        views = views_like(flat, bucket.views, self._alignment)
        for member, view in zip(bucket.members, views, strict=True):
            if member != self._counts_member:
                view.copy_(leaf[member])
        return flat

    def _to_mean(self, index: int, nodes: list[tuple[Node, Tensor]]) -> None:
        # This is the only place that divides a step by its weight.
        bucket = self.buckets[index]
        means = self._means_in(bucket)
        if self._combine.takes_means:
            for part in [vector[: len(means)] for _, vector in nodes] or [means]:
                part.div_(self._total_weight)
        self._combine(index, nodes, bucket)
        if not self._combine.takes_means:
            means.div_(self._total_weight)

    def _means_in(self, bucket: Bucket) -> Tensor:
        if self._brings_shards and bucket.members in self.shards.cuts:
            return bucket.flat[self.shards.in_bucket(bucket.members)]
        return gradients_of(bucket, len(self.parameters))


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
