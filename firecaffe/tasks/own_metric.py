"""A metric as a user gives it: one of torchmetrics, sums, or a plain function."""

import sys
from typing import Any

from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.reference import shown
from firecaffe.tasks.metric import Metric, Sums
from firecaffe.tasks.outputs import prediction_of
from firecaffe.tasks.torch_metric import TorchMetric


def as_metric(name: str, given: Any) -> Metric:
    """Raises: RecipeError if it is no metric, or one whose batches cannot be put together."""
    if hasattr(type(given), "of_batch"):
        metric: Metric = given
        return metric
    # Whoever has one of torchmetrics has loaded it; others do not pay for it.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(given, torchmetrics.Metric):
        try:
            return TorchMetric(given, lambda outputs, targets: (prediction_of(outputs), targets))
        except RecipeError as error:
            raise RecipeError(f"metric {name!r}: {error}") from None
    if callable(given) and not isinstance(given, type | nn.Module):
        return Sums(given)
    raise RecipeError(
        f"metric {name!r} is {shown(given)}; expected a torchmetrics.Metric, a firecaffe.Sums, or "
        "a function (outputs, targets) to the sum over the samples"
    )
