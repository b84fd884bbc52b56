"""The exchange for Lightning's Trainer and Fabric.

    trainer = Trainer(strategy=ExchangeStrategy(), accelerator="cpu", devices=2)
    fabric = Fabric(strategy=FabricExchangeStrategy(), accelerator="cpu", devices=2)

Both are Lightning's DDP strategy with the model wrapped by `parallelize`. Lightning's own
`DDPStrategy(ddp_comm_hook=…)` registers a hook only on GPUs; on CPUs it is silently ignored.
"""

import inspect
from typing import Any

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from firecaffe.cluster.from_script import check_known
from firecaffe.cluster.handover import report_uncaught
from firecaffe.errors import RecipeError
from firecaffe.exchange import AUTO
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.script.ddp import SIGNATURE, parallelize
from firecaffe.script.script_arguments import check_words

REFUSED = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")
"""Options of Lightning that would replace the exchange by another sum."""


NOT_OPTIONS = ("kwargs", "module")


class _ExchangeMixin:
    _ddp_kwargs: dict[str, Any]

    def __init__(self, exchange: str = AUTO, compressor: str = NO_COMPRESSOR, **words: Any) -> None:
        lightning_options = inspect.signature(super().__init__).parameters
        known = [
            word for word in (*lightning_options, *SIGNATURE.parameters) if word not in NOT_OPTIONS
        ]
        report_uncaught()
        check_words(exchange, compressor, None)
        check_known(type(self).__name__, words, ["exchange", "compressor", *known])
        for word in REFUSED:
            if words.get(word) is not None:
                raise RecipeError(
                    f"{word} cannot go with an exchange, which sums the gradients; for a hook of "
                    "your own take Lightning's DDPStrategy, on GPUs"
                )
        super().__init__(**words)
        self._exchange, self._compressor = exchange, compressor

    def _wrap(self, model: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        return parallelize(
            model,
            exchange=self._exchange,
            compressor=self._compressor,
            device_ids=device_ids,
            **self._ddp_kwargs,
        )


class ExchangeStrategy(_ExchangeMixin, DDPStrategy):
    """A DDP strategy for `lightning.Trainer` whose gradients go through an exchange.

    Args:
        exchange: See `parallelize`.
        compressor: See `parallelize`.
        words: Options of Lightning's DDP strategy, and of DDP, by name.

    Raises: RecipeError if an option is not possible; `fit` raises what `parallelize` raises.
    """

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self._wrap(model, self.determine_ddp_device_ids())

    def _register_ddp_hooks(self) -> None:
        """Register no hook: the model has its exchange already."""


class FabricExchangeStrategy(_ExchangeMixin, FabricDDPStrategy):
    """A strategy for `lightning.Fabric`; otherwise like `ExchangeStrategy`.

    Raises: RecipeError if an option is not possible; `setup` raises what `parallelize` raises.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        return self._wrap(module, self._determine_ddp_device_ids())
