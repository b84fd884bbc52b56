"""Each rank keeps its own of the first weights as they are drawn."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from firecaffe.cluster.agree import broadcast, gather_text, text_of_first
from firecaffe.cluster.digest import digest
from firecaffe.cluster.world import World
from firecaffe.data import Dataset
from firecaffe.errors import RecipeError
from firecaffe.models.drawing import Drawing, follow, named_tensors
from firecaffe.parallel.layers import Piece
from firecaffe.recipe.sections import Recipe
from firecaffe.training.parts import Parts, make_model, place_model

Own = Mapping[str, Sequence[Piece]]
"""What a rank has of those tensors of which it does not have all, by name; it may be nothing."""


@dataclass(frozen=True)
class Drawn:
    """A network with its first weights, on this rank's device."""

    network: nn.Module
    """It has zeros that take no memory for tensors of which this rank does not have all."""
    pieces: Mapping[str, Sequence[Tensor]]
    """What it has of these."""
    other_weights: list[int]
    """The ranks that had made other first weights than rank 0, whose are taken."""


class FreshNetwork:
    """A recipe's network before its first weights are drawn."""

    def __init__(self, recipe: Recipe, parts: Parts, dataset: Dataset) -> None:
        """Raises: RecipeError; OwnCodeError for what a user's code raises."""
        self._recipe = recipe
        self._make = partial(make_model, recipe, parts, dataset)
        self._drawing = follow(self._make)
        self.outline = self._make() if self._drawing is None else self._drawing.outline
        """Its shapes: on the meta device; or the network itself, if it has to be made whole."""

    def draw(self, world: World, own_of: Callable[[nn.Module], Own]) -> Drawn:
        """Draws the first weights; every rank calls it. own_of: what this rank has, by the outline.

        Raises: RecipeError, which `own_of` may raise; OwnCodeError; PeerLostError.
        """
        is_alone = world.group is None
        keeper = None
        if self._drawing is not None:
            keeper = self._keep(self._drawing, own_of, is_alone)
        if keeper is None:
            keeper = self._whole(is_alone)
        told = gather_text(world, keeper.digest)
        others = [rank for rank, text in enumerate(told) if text != told[0]]
        if others:
            keeper.take_from_first(world)
        network = keeper.network
        for name, tensor in named_tensors(network):
            if name in keeper.own:
                zero = torch.zeros((), dtype=tensor.dtype, device=world.device)
                tensor.data = zero.expand(tensor.shape)
        place_model(network, self._recipe, world.device)
        pieces = {n: [each.to(world.device) for each in has] for n, has in keeper.pieces.items()}
        return Drawn(network, pieces, others)

    def _keep(
        self, drawing: Drawing, own_of: Callable[[nn.Module], Own], is_alone: bool
    ) -> "_Keeper | None":
        """None if it has to be made whole."""
        try:
            own = own_of(drawing.outline)
        except RecipeError:
            return None  # it may be for the outline alone, and is raised again if it is not
        keeper = _Keeper(own, drawing.order, lambda take: drawing.draw([], take), is_alone)
        whole = [name for name in drawing.kept if name not in own]
        network = drawing.draw(whole, keeper.take)
        if network is None:
            return None
        keeper.put_in(network)
        return keeper

    def _whole(self, is_alone: bool) -> "_Keeper":
        network = self.outline if self._drawing is None else self._make()
        named = dict(named_tensors(network))
        if any(each.is_meta for each in named.values()):
            raise RecipeError(
                "model() returned the network that it had made before; one that is split or in "
                "stages is made more than once, so return a new one each time"
            )

        def again(take: Callable[[str, Tensor], None]) -> None:
            for name, tensor in named.items():
                take(name, tensor.detach())

        keeper = _Keeper({}, list(named), again, is_alone)
        keeper.put_in(network)
        again(keeper.take)
        return keeper


class _Keeper:
    """Keeps what is this rank's of tensors that come one after the other."""

    network: nn.Module

    def __init__(
        self,
        own: Own,
        order: Sequence[str],
        again: Callable[[Callable[[str, Tensor], None]], object],
        is_alone: bool,
    ) -> None:
        """order: that in which tensors come. again: lets them come again. is_alone: whether there
        is no rank to compare them with.
        """
        self.own, self._order, self._again = own, order, again
        self._is_alone = is_alone
        self.pieces: dict[str, Sequence[Tensor]] = {}
        self._digests: dict[str, str] = {}

    def put_in(self, network: nn.Module) -> None:
        """Says what the tensors are of."""
        self.network = network

    def take(self, name: str, whole: Tensor) -> None:
        self._digests[name] = "" if self._is_alone else digest([(name, whole)])
        self._keep(name, whole)

    @property
    def digest(self) -> str:
        """Of all tensors, whatever their order was."""
        return hashlib.sha256(json.dumps(self._digests, sort_keys=True).encode()).hexdigest()

    def take_from_first(self, world: World) -> None:
        """Takes rank 0's instead, which lets its own come again. Raises: PeerLostError."""
        order: Iterable[str] = json.loads(text_of_first(world, json.dumps(self._order)))
        if world.is_first:
            self._again(lambda _, whole: broadcast(world, whole.contiguous()))
            return
        named = dict(named_tensors(self.network))
        for name in order:
            tensor = named[name]
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            broadcast(world, whole)
            self._keep(name, whole)
            if name not in self.own:
                tensor.detach().copy_(whole)

    def _keep(self, name: str, whole: Tensor) -> None:
        # Memory of its own: how it is aligned may show in the bits.
        self.pieces[name] = [
            whole.narrow(dim, rows.start, len(rows)).clone(memory_format=torch.contiguous_format)
            for dim, rows in self.own.get(name, ())
        ]
