"""The exchange for accelerate and for the Trainer of transformers.

    accelerator = Accelerator()
    use_exchange(accelerator)
    model, optimizer = accelerator.prepare(model, optimizer)

    trainer = Trainer(model, …)
    use_exchange(trainer)

accelerate's `ddp_handler` is replaced by one that registers the exchange in DDP.
"""

from typing import Any

from accelerate import Accelerator
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
)
from torch.nn.parallel import DistributedDataParallel

from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.groups import rank_and_size
from firecaffe.cluster.process_settings import keep_freed_memory
from firecaffe.errors import RecipeError
from firecaffe.exchange import AUTO
from firecaffe.gradients.config import NO_COMPRESSOR
from firecaffe.script.ddp import ddp_hook
from firecaffe.script.script_arguments import check_model, check_not_wrapped, check_words
from firecaffe.user_code import shown

WITH_DDP = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


# accelerate wraps the model in DDP, and its `ddp_handler` registers a hook there. The original
# handler knows only torch's hooks, so this one replaces it with the same DDP options. It cannot be
# one of `kwargs_handlers`, which are recognized by their exact class.
class ExchangeHandler(DistributedDataParallelKwargs):
    def __init__(self, options: dict[str, Any], exchange: str, compressor: str) -> None:
        super().__init__(**options)
        self._options = options
        self._exchange, self._compressor = exchange, compressor

    def to_kwargs(self) -> dict[str, Any]:
        return self._options

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        check_not_wrapped("use_exchange", "the model", model.module, "prepare the network itself")
        check_model(model.module, self._compressor, self._options)
        keep_freed_memory()
        state, hook = ddp_hook(self._exchange, self._compressor, process_group=model.process_group)
        model.register_comm_hook(state, hook)


@from_script
def use_exchange(of: Any, exchange: str = AUTO, compressor: str = NO_COMPRESSOR) -> None:
    """Let models that are prepared from now on sum their gradients by an exchange.

    Args:
        of: An `accelerate.Accelerator` that has prepared no model yet, or a `transformers.Trainer`
            that has not begun.
        exchange: See `parallelize`.
        compressor: See `parallelize`.

    Raises: RecipeError if the gradients would not go through the exchange; then nothing is changed.
    `prepare` or `train` raise what `parallelize` raises for a model.
    """
    check_words(exchange, compressor, None)
    accelerator = of if isinstance(of, Accelerator) else getattr(of, "accelerator", None)
    if not isinstance(accelerator, Accelerator):
        raise RecipeError(
            f"use_exchange is given {shown(of)}; expected an accelerate.Accelerator or a "
            "transformers.Trainer"
        )
    if accelerator is not of:
        _check_trainer()
    if accelerator.distributed_type not in WITH_DDP:
        raise RecipeError(
            f"accelerate runs {accelerator.distributed_type.value}, which sums its gradients "
            "itself; an exchange goes with DistributedDataParallel alone"
        )
    _, world_size = rank_and_size()
    if accelerator.num_processes < world_size:
        raise RecipeError(
            f"accelerate trains alone in each of the {world_size} processes, for it has found no "
            "GPU; have it take CPUs: Accelerator(cpu=True), TrainingArguments(use_cpu=True)"
        )
    if accelerator._models:
        raise RecipeError("a model is prepared already; call use_exchange before prepare or train")
    options: dict[str, Any] = {}
    handler = accelerator.ddp_handler
    if handler is not None:
        hook = DDPCommunicationHookType(handler.comm_hook)
        if hook != DDPCommunicationHookType.NO:
            raise RecipeError(
                f"the accelerator's ddp_handler has comm_hook {hook.value}; DDP takes "
                "one hook, so leave that out"
            )
        options = handler.to_kwargs()
    accelerator.ddp_handler = ExchangeHandler(options, exchange, compressor)


def _check_trainer() -> None:
    # Older Trainers replace the handler when they begin.
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        raise RecipeError(
            f"transformers is {transformers.__version__}, whose Trainer takes another ddp_handler "
            "when it begins; use_exchange takes one of version 5 or later"
        )
