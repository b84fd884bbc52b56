"""Gradient codecs, which send fewer bytes and give the same bits on any number of workers.

Local sums stop at one level of the micro-batch tree. Each node there is encoded by itself, even if
one worker has all nodes. Decoded nodes are added in float32 in tree order. A new codec is one file
and one row here.
"""

from collections.abc import Sequence

from firecaffe.errors import RecipeError
from firecaffe.gradients.compressors.casts import BFLOAT16, FLOAT16
from firecaffe.gradients.compressors.codec import (
    BucketLayout,
    Compressor,
    LowRank,
    RowCodec,
    TensorCodec,
)
from firecaffe.gradients.compressors.feedback import RowCompressor, TensorCompressor
from firecaffe.gradients.compressors.int8 import INT8
from firecaffe.gradients.compressors.one_bit import ONE_BIT
from firecaffe.gradients.compressors.power_sgd import PowerSGD
from firecaffe.gradients.compressors.threshold import THRESHOLD
from firecaffe.gradients.compressors.top_k import TOP_K

COMPRESSORS: dict[str, RowCodec | TensorCodec | LowRank] = {
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
    "int8": INT8,
    "one_bit": ONE_BIT,
    "threshold": THRESHOLD,
    "top_k": TOP_K,
    "power_sgd": LowRank(rank=16),
}
"""The codecs of gradients by name."""

FIXED_LENGTH = tuple(
    name
    for name, codec in COMPRESSORS.items()
    if isinstance(codec, RowCodec) or (isinstance(codec, TensorCodec) and codec.has_fixed_length)
)
"""The codecs whose payload of a gradient has a length fixed by the gradient's size."""


def make_compressor(name: str, layouts: Sequence[BucketLayout]) -> Compressor:
    """Make a compressor with empty memory. Raises RecipeError if there is none of this name."""
    if name not in COMPRESSORS:
        raise RecipeError(
            f"exchange.compressor is {name!r}; it must be one of {', '.join(COMPRESSORS)}"
        )
    match COMPRESSORS[name]:
        case RowCodec() as codec:
            return RowCompressor(codec, layouts)
        case TensorCodec() as codec:
            return TensorCompressor(codec, layouts)
        case LowRank(rank):
            return PowerSGD(rank, layouts)
