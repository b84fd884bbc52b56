"""Networks of which a training has left this process a part, and that are no use as whole ones."""

from weakref import WeakSet

from torch import nn

from firecaffe.errors import RecipeError

_CUT_UP: WeakSet[nn.Module] = WeakSet()


def mark_cut_up(network: nn.Module) -> None:
    """Remembers that a network is whole no more."""
    _CUT_UP.add(network)


def check_is_whole(network: nn.Module) -> nn.Module:
    """The network that a function has returned. Raises: RecipeError if it was cut up before."""
    if network in _CUT_UP:
        kind = type(network).__name__
        raise RecipeError(
            "model() returned a network that a training has cut up before, by parallel.split or "
            f"parallel.stages; expected a new one each time: {kind}, or lambda: {kind}(…)"
        )
    return network
