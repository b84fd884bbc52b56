"""Networks of the published rates, as a recipe names them."""

from typing import Any

from torch import nn

from benchmarks.planner.device_networks import BUILDERS


def resnet50(**_: Any) -> nn.Module:
    return BUILDERS["resnet50"][0]()


def mobilenetv2_100(**_: Any) -> nn.Module:
    return BUILDERS["mobilenetv2_100"][0]()
