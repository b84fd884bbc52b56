"""Pruning: masks of weights. Sharing: few values for many weights, by k-means in one dimension.

Patterns of layers' names select the weights. Sources: Han et al. 2015, arXiv 1506.02626 (small
magnitudes); Zhu and Gupta 2017, arXiv 1710.01878 (the schedule); Guo, Yao and Chen 2016, arXiv
1608.04493 (weights that return); Han, Mao and Dally 2016, arXiv 1510.00149, section 3 (sharing).
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from firecaffe.compression import PruneConfig, ShareConfig
from firecaffe.errors import RecipeError

T = TypeVar("T")

BIAS = ".bias"


def pruned_weights(
    network: Mapping[str, nn.Parameter], words: PruneConfig
) -> tuple[dict[str, float], dict[str, float]]:
    """Return shares to keep, and thresholds, by weight. Raises RecipeError naming the layer."""
    keep = _matching(network, "prune.keep", words.keep)
    threshold = _matching(network, "prune.threshold", words.threshold)
    for name in keep.keys() & threshold.keys():
        raise RecipeError(
            f"prune.keep and prune.threshold both match {_layer(name)}; leave it out of one of them"
        )
    frozen = {name for name, parameter in network.items() if not parameter.requires_grad}
    keep = {name: share for name, share in keep.items() if share < 1 or name not in frozen}
    _refuse("prune.keep", frozen & keep.keys(), "or say {!r} = 1 after it")
    _refuse("prune.threshold", frozen & threshold.keys())
    return keep, threshold


def shared_weights(network: Mapping[str, nn.Parameter], words: ShareConfig) -> dict[str, int]:
    """Return the bits of each shared weight. Raises RecipeError naming the layer."""
    bits = _matching(network, "share.bits", words.bits)
    frozen = {name for name, parameter in network.items() if not parameter.requires_grad}
    _refuse("share.bits", frozen & bits.keys())
    return bits


def _matching(
    network: Mapping[str, nn.Parameter], word: str, patterns: Mapping[str, T]
) -> dict[str, T]:
    # Vectors other than biases belong to normalization, and are never selected.
    lengths = _directions(network).values()
    biases = [name for name in network if name.endswith(BIAS)]
    weights = [
        name
        for name, parameter in network.items()
        if parameter.ndim > 1
        and _layer(name)
        and "bias" not in name.rpartition(".")[2]
        and name not in lengths
    ]
    values: dict[str, T] = {}
    for pattern, value in patterns.items():
        if pattern.endswith(BIAS):
            matching = [name for name in biases if fnmatchcase(name, pattern)]
        else:
            matching = [name for name in weights if fnmatchcase(_layer(name), pattern)]
        if not matching:
            raise RecipeError(f"{word} has {pattern!r}, {_no_match(pattern, weights)}")
        values |= dict.fromkeys(matching, value)
    return {name: values[name] for name in network if name in values}


LENGTHS = {"original1": "original0", "_v": "_g"}
"""Name suffixes of weight_norm's directions (new and old style), and of their lengths."""


def _directions(network: Mapping[str, nn.Parameter]) -> dict[str, str]:
    pairs = {
        name: name.removesuffix(end) + length
        for name in network
        for end, length in LENGTHS.items()
        if name.endswith(end)
    }
    return {
        name: length
        for name, length in pairs.items()
        if length in network and _is_length(network[length].shape, network[name].shape)
    }


def _is_length(length: Sequence[int], direction: Sequence[int]) -> bool:
    is_of_rows = len(length) == len(direction) and sum(size > 1 for size in length) <= 1
    return is_of_rows and all(size in (1, n) for size, n in zip(length, direction, strict=True))


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _no_match(pattern: str, weights: list[str]) -> str:
    if pattern.endswith(BIAS):
        return "which no bias matches; biases are called as their layers, and then .bias"
    layers = list(dict.fromkeys(map(_layer, weights)))
    if any(layer.startswith(f"{pattern}.") for layer in layers):
        return f"which is no layer but has some; say {pattern + '.*'!r}"
    if not layers:
        return "but no layer in the network has weights (a layer alone has no name: Sequential(…))"
    shown = ", ".join(layers[:4]) + (" …" if len(layers) > 4 else "")
    return f"which no layer with weights matches; they are called {shown}"


def _refuse(word: str, frozen: set[str], would: str = "") -> None:
    if frozen:
        layer = _layer(min(frozen))
        also = f", {would.format(layer)}" if would else ""
        raise RecipeError(
            f"{word} matches {layer}, which is frozen and not trained; leave it out of the "
            f"pattern{also}"
        )


# Source: the code of Guo et al.
HOLD, RETURN = 0.9, 1.1
"""Kept weights stay down to HOLD times the threshold; pruned ones return above RETURN times it."""


def kept_share(keep: float, done: int, steps: int) -> float:
    """Return the share kept after `done` steps of gradual pruning (Zhu and Gupta, equation 1)."""
    left = max(0.0, 1 - done / steps)
    return float(keep + (1 - keep) * left**3)


def count_of(share: float, num_weights: int) -> int:
    return max(1, round(share * num_weights))


def largest_of_all(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    together = torch.cat([score.reshape(-1) for score in scores.values()])
    masks = torch.split(largest(together, count), [score.numel() for score in scores.values()])
    pairs = zip(scores.items(), masks, strict=True)
    return {name: mask.view(score.shape) for (name, score), mask in pairs}


def adaptive(scores: Tensor) -> Tensor:
    """Return each weight's square over the sum of all squares that are not smaller, in float64.

    Source: Lee, Park, Mo, Ahn and Shin 2021, arXiv 2010.07611 (LAMP), equation 4.
    """
    squares = scores.detach().cpu().double().reshape(-1).square()
    ascending, places = squares.sort(stable=True)
    sums = ascending.flip(0).cumsum(0).flip(0)
    shares = torch.zeros_like(squares)
    shares[places] = ascending / sums.clamp(min=torch.finfo(torch.float64).tiny)
    return shares.view(scores.shape)


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the mask of the largest scores: of equal scores the first, and never zeros."""
    flat = scores.reshape(-1)
    least = flat.topk(min(count, flat.numel()), sorted=False).values.min()
    kept = flat > least
    # topk may return any of several equal elements.
    equal = (flat == least).nonzero()[:, 0][: count - int(kept.sum())]
    kept[equal] = True
    return (kept & (flat > 0)).view(scores.shape)


def rows_of_directions(network: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    """Return weight_norm's directions by name, each with the dimensions of one of its rows."""
    return {
        name: tuple(dim for dim, size in enumerate(network[length].shape) if size == 1)
        for name, length in _directions(network).items()
    }


def with_each_row(mask: Tensor, weights: Tensor, row: tuple[int, ...]) -> Tensor:
    """Also keep the largest weight of each empty row, since a direction of zeros is NaN."""
    sizes = weights.abs()
    is_empty = mask.sum(row, keepdim=True) == 0
    return mask | (is_empty & (sizes == sizes.amax(row, keepdim=True)))


def with_hysteresis(scores: Tensor, mask: Tensor) -> Tensor:
    """Multiply kept weights' scores by RETURN / HOLD, so that close weights do not alternate."""
    return torch.where(mask, scores * (RETURN / HOLD), scores)


def threshold_of(weights: Tensor, deviations: float) -> float:
    return float(deviations * weights[weights != 0].double().std(correction=0))


def above(weights: Tensor, threshold: float) -> Tensor:
    return weights.abs() > threshold


def hysteresis_mask(weights: Tensor, threshold: float, mask: Tensor) -> Tensor:
    """Return the mask above a threshold if weights may return (Guo et al., equation 3)."""
    size = weights.abs()
    return (size > RETURN * threshold) | (mask & (size > HOLD * threshold))


MAX_ROUNDS = 10_000
"""The maximum rounds of k-means, which mostly converges after some hundreds."""


def _linear(ordered: Tensor, count: int, _: torch.Generator) -> Tensor:
    low, high = float(ordered[0]), float(ordered[-1])
    return torch.linspace(low, high, count, dtype=ordered.dtype)


def _density(ordered: Tensor, count: int, _: torch.Generator) -> Tensor:
    places = (torch.arange(count, dtype=ordered.dtype) + 0.5) / count * len(ordered)
    return ordered[places.long()]


def _random(ordered: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return ordered[torch.randperm(len(ordered), generator=generator)[:count]].sort().values


STARTS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "linear": _linear,
    "density": _density,
    "random": _random,
}


def share(
    weights: Tensor, bits: int, start: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Find 2^bits shared values for the nonzero weights, or fewer if some would have no weight.

    Return the weights' codes, int32 of their shape, and the values by code, float64 on the CPU.
    Code 0 is zero; other codes have ascending values. `generator` is for the random start.
    """
    flat = weights.detach().cpu().double().reshape(-1)
    ordered = flat[flat != 0].sort().values
    distinct = torch.unique_consecutive(ordered)
    if len(distinct) <= 2**bits:
        values = distinct
    else:
        values = lloyd(ordered, STARTS[start](ordered, 2**bits, generator))
    nearest = torch.bucketize(flat, (values[1:] + values[:-1]) / 2)
    used, codes = torch.unique(nearest[flat != 0], return_inverse=True)
    all_codes = torch.zeros(len(flat), dtype=torch.int32)
    all_codes[flat != 0] = codes.int() + 1
    return all_codes.view(weights.shape), torch.cat([torch.zeros(1).double(), values[used]])


def lloyd(ordered: Tensor, values: Tensor) -> Tensor:
    """Move values to the means of their clusters; both arguments ascend. Source: Lloyd 1982."""
    # In one dimension, clusters are intervals: their sums are differences of cumulative sums.
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    ends = torch.tensor([0, len(ordered)])
    before = ends
    for _ in range(MAX_ROUNDS):
        middles = (values[1:] + values[:-1]) / 2
        edges = torch.cat([ends[:1], torch.searchsorted(ordered, middles, right=True), ends[1:]])
        if torch.equal(edges, before):
            break
        before, counts = edges, edges.diff()
        # A value with an empty cluster does not move.
        values = torch.where(counts > 0, sums[edges].diff() / counts.clamp(min=1), values)
    return values
