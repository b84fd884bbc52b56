"""Parts of firecaffe for a training script of your own.

`ddp_hook` sums DistributedDataParallel's gradients, `average_locally` averages replicas that train
independently, `split_layers` cuts layers over ranks, and `attach` records where the time goes.
"""

from firecaffe.script.attach import attach
from firecaffe.script.ddp import ddp_hook
from firecaffe.script.local import average_locally
from firecaffe.script.split import split_layers

__all__ = ["attach", "average_locally", "ddp_hook", "split_layers"]
