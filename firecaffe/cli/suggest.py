"""Suggestions of the known name that an unknown one may mean."""

from collections.abc import Iterable
from difflib import get_close_matches

ACCUMULATION = (
    "accumulate_grad_batches",
    "gradient_accumulation_steps",
    "accumulation_steps",
    "iter_size",
)
"""Names for accumulation over micro-batches in Lightning, Hugging Face, Caffe and others."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?`, longer forms of `name` first, or nothing if none is close."""
    known = list(known)
    if name.rpartition(".")[2].lstrip("-").replace("-", "_") in ACCUMULATION:
        return (
            "; gradients are accumulated over train.global_batch_size / train.micro_batch_size "
            "micro-batches"
        )
    longer = [each for each in known if each.startswith(name)]
    own = name.rpartition(".")[2].lstrip("-").replace("-", "_")
    alike = [each for each in known if each.rpartition(".")[2].lstrip("-").replace("-", "_") == own]
    found = (longer or alike or get_close_matches(name, known, n=1))[:3]
    return f"; did you mean {' or '.join(found)}?" if found else ""
