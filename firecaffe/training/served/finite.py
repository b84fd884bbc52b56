"""Which gradients of a worker are finite, where these go elsewhere than to rank 0."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def are_finite(names: Iterable[str], gradients: Mapping[str, Tensor]) -> Tensor:
    """Whether that of each parameter is, bool, shape (parameters,); one that was not used is."""
    found = [name not in gradients or _is_finite(gradients[name]) for name in names]
    return torch.tensor(found, dtype=torch.bool)


def _is_finite(values: Tensor) -> bool:
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(low.isfinite() & high.isfinite())
