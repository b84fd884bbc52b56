"""The arithmetic of a planned step: the words of `plan --precision`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import Cluster
from firecaffe.resume_advice import option
from firecaffe.user_code import shown

if TYPE_CHECKING:  # it loads torch, and the command line lists the words alone
    from firecaffe.planner.workload import Workload

PRECISIONS = {"fp32": "float32", "tf32": "tf32", "fp16": "float16", "bf16": "bfloat16"}
"""The dtype in which matrices are multiplied, by word."""
FLOAT32, TF32 = "float32", "tf32"
STANDS_FOR = {"float16": "bfloat16"}
"""The dtype whose peak is used if a file has no peak of this one. Devices with bfloat16 have
float16 at the same rate; those before Ampere have only float16, which cannot replace bfloat16.
"""


def in_precision(work: "Workload", word: str, channels_last: bool = False) -> "Workload":
    """Return the work in the arithmetic `word`, which is checked; "" keeps the work's own."""
    work = replace(work, channels_last=work.channels_last or channels_last)
    if not word:
        return work
    dtype = PRECISIONS[word]
    half = dtype not in (FLOAT32, TF32)
    return replace(work, autocast=dtype if half else "none", tf32=dtype == TF32)


def check_precision(word: str, clusters: Sequence[Cluster], named: str = "") -> None:
    """Raise RecipeError for an unknown word, or a cluster whose device has no such arithmetic.

    named: the name of the setting in messages; without it the option.
    """
    named = named or option("precision")
    if word not in ("", *PRECISIONS):
        raise RecipeError(f"{named} is {shown(word)}; it must be one of {', '.join(PRECISIONS)}")
    dtype = PRECISIONS.get(word, FLOAT32)
    for cluster in clusters:
        peaks = cluster.device.peak_flops
        if dtype not in peaks and STANDS_FOR.get(dtype) not in peaks:
            raise RecipeError(
                f"{named} is {word}, but {cluster.device.name} has no {dtype} "
                f"(device.peak_flops); there are {', '.join(peaks)}"
            )


def precision_text(work: "Workload") -> str:
    """The arithmetic, as the first line of a plan states it."""
    words = {
        FLOAT32: "in float32",
        TF32: "in float32 with tf32 matrices",
    }.get(work.precision, f"in {work.precision} by autocast")
    return words + (", channels last" if work.channels_last else "")
