"""The reducer: micro-batch gradients in, the step's mean gradient out, exchange beside backward.

The gradients of each micro-batch are the leaves of the fixed binary tree of `exchange.leaves`. All
but a worker's last micro-batch are added after their backward, by the binary counter. In the last
one a hook on the last parameter of each bucket looks whether all its gradients are there; then its
sums are finished and a communication thread takes it to the other workers while backward goes on.
Buckets leave in a fixed order, the same on all ranks. `p.grad` ends as a view into its bucket.

Where nodes of the tree stay apart (`Fold`), a worker's smaller ones are whole before its last one
is begun. Each leaves for all buckets as soon as it is whole, and travels while others are computed.

With shards (`gradients.shards`) each worker has the mean of its own shard alone (a codec brings
all), for its rows of the parameters; the updated weights are gathered by the same buckets.

Beside the gradients every micro-batch brings its tail (its loss, its changes to buffers), summed by
the same tree. Whole numbers have the same sum in any order, so each worker brings its counts once,
with its last micro-batch; among them which parameters were used, so that one that nobody used keeps
`p.grad = None` and the optimizer leaves it alone. (A codec may still bring what it kept back.)
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from firecaffe.errors import RecipeError
from firecaffe.exchange.leaves import Node, Shares, TreeSum, equal_shares
from firecaffe.exchange.route import CODEC, FOLD, HOOK
from firecaffe.gradients.buckets import ALIGNMENT, Bucket, layout_of, make_buckets, views_like
from firecaffe.gradients.combine import (
    AllReduce,
    Combine,
    Compressed,
    Fold,
    Hook,
    Hooked,
    gradients_of,
)
from firecaffe.gradients.compressors import make_compressor
from firecaffe.gradients.compressors.codec import ROW
from firecaffe.gradients.finite import all_finite, each_finite
from firecaffe.gradients.gather import WeightGather
from firecaffe.gradients.shards import Shards, all_of
from firecaffe.gradients.threads import ExchangeThreads
from firecaffe.gradients.totals import Totals
from firecaffe.transport.exchange import Exchange
from firecaffe.transport.queue import queue_of

Leaf = list[Tensor]
"""The tensors of one micro-batch: one for each parameter, then the tail's."""


class GradientReducer:
    """Sums gradients over micro-batches and workers: `begin_step`, `add` for each own micro-batch
    in the route's order, `finish_step`. Workers begin with equal shares.
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
        """parameters: those that need gradients, by name. ready_order: their indices in the order
        in which backward finishes them. tail, counts: examples. hook: (state, hook) of DDP's kind,
        for a route by one. shards: of the update, if it is shared out, which goes by a route of way
        FOLD. The exchange's route says how all go.
        """
        self.parameters, self.names = list(parameters.values()), list(parameters)
        self.num_leaves, self.exchange = num_leaves, exchange
        self.used: list[bool] = []
        """Whether any worker has used each parameter in the step that is finished."""
        self.shards = shards or all_of(parameters)
        self._gather = WeightGather(exchange.world, self.shards, parameters)
        route, world = exchange.route, exchange.world
        num_parameters = len(self.parameters)
        self._unused = counts.new_zeros(num_parameters)
        self._all_used = counts.new_ones(num_parameters)
        self._tail_members = range(num_parameters, num_parameters + len(tail))
        self._counts_member = self._tail_members.stop
        tensors = [*self.parameters, *tail, torch.cat([self._unused, counts])]
        last = [*self._tail_members, self._counts_member]
        tail_has_own_buckets = route.way in (CODEC, HOOK) or bool(self.shards.cuts)
        groups = [ready_order, last] if tail_has_own_buckets else [[*ready_order, *last]]
        self._alignment = ROW if route.way == CODEC else ALIGNMENT
        self._brings_shards = bool(self.shards.cuts) and route.way == FOLD
        rows = ROW if route.way == CODEC else 1
        multiple = 1 if self._brings_shards else world.world_size * rows
        words = bucket_bytes, multiple, exchange.empty, self._alignment
        self.buckets = make_buckets(tensors, groups, *words)
        if tail_has_own_buckets:
            # They are ready with the last gradients, behind which these few bytes would wait in the
            # queues of the network.
            tails = [bucket for bucket in self.buckets if bucket.members[0] >= num_parameters]
            others = [bucket for bucket in self.buckets if bucket.members[0] < num_parameters]
            self.buckets = [*others[:-1], *tails, *others[-1:]]  # a stage may have no gradient
        self._view_of = {
            member: view
            for bucket in self.buckets
            for member, view in zip(bucket.members, bucket.views, strict=True)
        }
        self.coded: Compressed | None = None  # without a compressor
        self._combine: Combine
        self._fold: Fold | None = None
        if route.way == CODEC:
            layouts = [layout_of(bucket, self.names) for bucket in self.buckets]
            made = make_compressor(route.codec, layouts), num_leaves, route.level, num_parameters
            self._combine = self.coded = Compressed(world, *made)
        elif route.way == HOOK:
            assert hook is not None
            self._combine = Hooked(exchange, *hook, self.parameters, self.buckets)
        elif route.way == FOLD:
            self.share_out(equal_shares(num_leaves, world.world_size))
        else:
            self._combine = AllReduce(exchange)
        self.queue = queue_of(counts.device)
        self._threads: ExchangeThreads | None = None
        self._hooks = []
        # One worker encodes in a thread too: torch lets the main thread have several for one sum,
        # and adds in another order then.
        if world.world_size > 1 or route.way == CODEC:
            lanes = self._combine.lanes
            self._threads = ExchangeThreads(world, lanes, counts.device, self.queue)
            last_of_each = [bucket.members[-1] for bucket in self.buckets]
            self._hooks = [
                self.parameters[index].register_post_accumulate_grad_hook(self._on_ready)  # type: ignore[no-untyped-call]
                for index in last_of_each
                if index < len(self.parameters)
            ]
        self._counts: Callable[[], Tensor] | None = None
        self._closing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def close(self, wait: bool = True) -> None:
        """Ends. wait: for communication threads, one of which may wait for a rank that is gone."""
        for hook in self._hooks:
            hook.remove()
        self._counts = None  # leads back to this reducer, and to groups whose end others wait for
        if self._threads is not None:
            self._threads.close(wait)
        self.exchange.close()

    def share_out(self, shares: Shares) -> None:
        """Gives workers other shares from the next step on, if the route is by nodes that stay
        apart. All ranks call it between the same two steps.
        """
        if self.coded is not None:
            self.coded.share_out(shares)
            return
        assert self.exchange.route.way == FOLD
        words = self.exchange.world, self.num_leaves, shares, self.shards.cuts
        self._fold = self._combine = Fold(*words)

    def begin_step(
        self,
        total_weight: float,
        leaves: Sequence[int],
        counts: Callable[[], Tensor],
        scale: Tensor | None = None,
    ) -> None:
        """Begins a step. total_weight: the divisor of the sums, used once, at the root. leaves:
        this worker's micro-batches, in the order in which they are added. counts: what it counts of
        all of them; asked before the last one's backward. scale: of losses, shape (), if any.
        """
        self._total_weight, self._leaves, self._counts = total_weight, leaves, counts
        if self.coded is not None:
            self.coded.begin_step(scale)
        top_level = self._combine.top_level
        self._counter: TreeSum[Leaf] = TreeSum(self.num_leaves, _add_in_place, top_level)
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
        """Runs backward for one micro-batch and adds its gradients. In that of the last one each
        bucket leaves as soon as it is complete. loss: None without samples, which adds zeros.
        """
        if leaf == self._leaves[-1]:
            self._add_last(leaf, loss, tail)
            return
        self._backward(loss)
        gradients = [_gradient(parameter) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        self._counter.push(Node(0, leaf), [*gradients, *tail])
        self._begin_buckets()

    def _begin_buckets(self) -> None:
        """Begins the early rounds of all buckets, as far as this worker's nodes are whole; who has
        none for a round takes the others'.
        """
        fold, pending = self._fold, self._counter.pending
        while fold is not None and self._early_rounds < fold.num_early:
            number, whole = self._early_rounds, list[tuple[Node, Leaf]]()
            if number < len(fold.early):
                if not pending or pending[-1][0] != fold.early[number]:
                    return
                whole = [pending.pop()]
            self._early_rounds += 1
            assert self._threads is not None
            for index, bucket in enumerate(self.buckets):
                nodes = {node: self._vector(bucket, leaf) for node, leaf in whole}
                begin = partial(fold.begin, number, index, nodes, bucket)
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
        self._send_ready_buckets([*tail, torch.cat([used, counts])])
        # As long as the weights, and in the buckets now.
        self._merged, self._sent, self._counter.pending = [], [], []

    def _backward(self, loss: Tensor | None) -> None:
        if loss is not None:
            torch.autograd.backward(loss)
        if self._threads is not None:  # not in a hook: a backward that is broken off keeps memory
            self._threads.raise_failure()
        if not all(self._used):
            now = (parameter.grad is not None for parameter in self.parameters)
            self._used = [a or b for a, b in zip(self._used, now, strict=True)]

    def finish_step(self) -> Totals:
        """Waits for the exchange and leaves the mean gradient in every `p.grad`; with shards, in
        those of this rank's rows.

        Raises: PeerLostError; what a communication thread has met.
        """
        computed = self.queue.mark()
        spans = () if self._threads is None else self._threads.finish()
        summed = self.queue.mark()
        used, counts = self._view_of[self._counts_member].tensor_split([len(self.parameters)])
        # What this rank has used, somebody has; of the rest all have to be asked.
        by_any = self._used if all(self._used) else used.tolist()
        self.used = [bool(each) for each in by_any]
        for index, is_used in enumerate(self.used):
            # What a compressor kept back may arrive in a step that does not use the parameter.
            has_any = is_used or (self.coded is not None and bool(self._view_of[index].any()))
            self._set_gradient(index, self._view_of[index] if has_any else None)
        tail = tuple(self._view_of[member] for member in self._tail_members)
        return Totals(tail, counts, computed, summed, spans)

    def _set_gradient(self, index: int, mean: Tensor | None) -> None:
        if (own := self.shards.own.get(self.names[index])) is not None:
            own.grad = None if mean is None else self.shards.own_part(self.names[index], mean)

    def undo_step(self) -> None:
        """Lets a step that has updated nothing leave no trace in a codec."""
        if self.coded is not None:
            self.coded.undo_step()

    def gather_weights(self) -> None:
        """Gives every rank the others' rows of the weights; p.grad are gone then. With shards
        alone. All ranks call it. Raises: PeerLostError.
        """
        assert self._threads is not None
        for index, bucket in enumerate(self.buckets):
            if bucket.members in self.shards.cuts:
                self._threads.submit(index, partial(self._gather, bucket), [bucket.flat])
        self._threads.finish()

    def finite(self) -> Tensor:
        """Whether each parameter's mean gradient is finite, in network order: bool, shape
        (parameters,). With shards, of what this rank has of it.
        """
        if not self.parameters:
            return torch.ones(0, dtype=torch.bool)
        # A bucket at a time costs less than a parameter at a time.
        if not self.queue.works_behind and all_finite(map(self._means_in, self.buckets)):
            return torch.ones(len(self.parameters), dtype=torch.bool)
        views = [self._view_of[index] for index in range(len(self.parameters))]
        return each_finite([*map(self.shards.own_part, self.names, views)])

    def _on_ready(self, _: nn.Parameter) -> None:
        if self._closing:
            self._send_ready_buckets(None)

    def _send_ready_buckets(self, tail: Sequence[Tensor] | None) -> None:
        """Sends the next buckets, in order, that are complete; all, once backward has brought the
        tail.

        tail: the tail's tensors and the counts. Without them no bucket that holds one is complete.
        """
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
        """Finishes this worker's sums of one bucket; returns its nodes of the tree."""
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
        """A node's part of a bucket, in memory of its own."""
        flat = torch.zeros_like(bucket.flat)
        views = views_like(flat, bucket.views, self._alignment)
        for member, view in zip(bucket.members, views, strict=True):
            if member != self._counts_member:
                view.copy_(leaf[member])
        return flat

    def _to_mean(self, index: int, nodes: list[tuple[Node, Tensor]]) -> None:
        """Turns the bucket's gradients into the mean of all workers', its tail into the sum. This
        is the one place that divides a step by its weight.
        """
        bucket = self.buckets[index]
        own = self._means_in(bucket)
        if self._combine.takes_means:
            for part in [vector[: len(own)] for _, vector in nodes] or [own]:
                part.div_(self._total_weight)
        self._combine(index, nodes, bucket)
        if not self._combine.takes_means:
            own.div_(self._total_weight)

    def _means_in(self, bucket: Bucket) -> Tensor:
        """The part of a bucket in which this rank has mean gradients."""
        if self._brings_shards and bucket.members in self.shards.cuts:
            return bucket.flat[self.shards.in_bucket(bucket.members)]
        return gradients_of(bucket, len(self.parameters))


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _add_in_place(left: Leaf, right: Leaf) -> Leaf:
    torch._foreach_add_(left, right)
    return left
