"""Forecasts what a training takes on a cluster, from descriptions; starts no process.

`firecaffe.plan(…)` is the function of `firecaffe.api.plan`: the package can be called, because it
has the name of the command, and an import of one of its modules would hide a function.
"""

import sys
from importlib import import_module
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function()(*args, **kwargs)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return str(_function().__doc__)

    @property
    def __signature__(self) -> Signature:
        return signature(_function())


def _function() -> Any:
    # By name: the layer above this one may be called, not imported.
    return import_module("firecaffe.api.plan").plan


sys.modules[__name__].__class__ = _Package
