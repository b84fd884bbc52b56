"""The gather of updated weights, if each rank updates only a shard of them."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from firecaffe.cluster.group import Group
from firecaffe.exchange import sharded_parameter_server
from firecaffe.exchange.collectives import half
from firecaffe.exchange.schedule import ALL_GATHER
from firecaffe.gradients.buckets import Bucket
from firecaffe.gradients.shards import Shards
from firecaffe.transport.collectives import Collectives


class WeightGather:
    def __init__(
        self, world: Group, shards: Shards, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._shards, self._parameters = shards, list(parameters.items())
        self._ranks = range(world.world_size)
        self._collectives = Collectives(world)

    def __call__(self, bucket: Bucket) -> None:
        """Gather one bucket's weights. All ranks call it. Raises PeerLostError."""
        named = [self._parameters[member] for member in bucket.members]
        weights = [weight.detach() for _, weight in named]
        for (name, _), weight, view in zip(named, weights, bucket.views, strict=True):
            own = self._shards.own_part(name, view)
            own.copy_(self._shards.own_part(name, weight))
        cuts = self._shards.cuts[bucket.members]
        gather = half(partial(sharded_parameter_server.schedule, cuts=cuts), ALL_GATHER)
        make = partial(gather, len(self._ranks))
        self._collectives.run((ALL_GATHER, cuts), make, bucket.flat, self._ranks)
        torch._foreach_copy_(weights, list(bucket.views))
