"""Convert a user's metric: a torchmetrics.Metric, a Sums, or a plain function."""

import sys
from typing import Any

from torch import nn

from firecaffe.errors import RecipeError
from firecaffe.reference import shown
from firecaffe.tasks.metric import Metric, Sums
from firecaffe.tasks.outputs import prediction_of
from firecaffe.tasks.torch_metric import TorchMetric


def as_metric(name: str, given: Any) -> Metric:
    """Return the metric. Raises RecipeError if it is none, or its batches cannot be combined."""
    if hasattr(type(given), "of_batch"):
        metric: Metric = given
        return metric
    # A user with a torchmetrics metric has loaded torchmetrics; others need not load it.
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
