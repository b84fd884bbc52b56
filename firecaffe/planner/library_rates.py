"""The share of a device's peak that the kernels of a library reach, by class.

The file beside this one holds a table for each library generation and arithmetic. It is fitted to
published rates by `benchmarks/planner/device_rates.py`, and says how many of its numbers are
fitted. A matrix of side s is multiplied at `share * s / (s + reread * peak / memory rate)` of the
peak: its operands are read again for each tile, and the smaller the side the more often (Hong and
Kung 1981).
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.models.kernel import DEPTHWISE, MULTIPLIES
from firecaffe.schema import parse_toml, read_file

FILE = Path(__file__).parent / "library_rates.toml"
MAX_BYTES = 100_000

FLOAT32, TF32, HALF = "float32", "tf32", "half"
PLAIN = "plain"
"""No library: every kernel reaches the device's rates."""


@dataclass(frozen=True)
class Rates:
    """Rates of one library in one arithmetic."""

    shares: dict[str, float] = field(hash=False)
    """Shares by class of kernel: of the peak, or for depthwise convolutions of the memory rate."""
    reread: float
    """Side at which reading operands takes as long as products, on a device of 1 FLOP a byte."""
    matrix_memory: float
    """The share of the memory rate at which matrices are read and written."""
    memory: float
    """Share of the memory rate for all other kernels."""
    transposes: float
    """Passes over a convolution's activations to bring the channels innermost."""


@cache
def tables() -> dict[str, Any]:
    return read_file(FILE, dict[str, Any], RecipeError, parse_toml, MAX_BYTES, where=FILE.name)


def libraries() -> list[str]:
    return [PLAIN, *sorted({name for by in tables()["share"].values() for name in by})]


@cache
def rates_of(library: str, arithmetic: str) -> Rates:
    """Find the rates; a library without such arithmetic has those of float32."""
    if library == PLAIN:
        return Rates(dict.fromkeys(MULTIPLIES, 1.0), 0.0, 1.0, 1.0, 0.0)
    file = tables()
    shares = file["share"].get(arithmetic, {}).get(library)
    if shares is None:
        arithmetic, shares = FLOAT32, file["share"][FLOAT32].get(library)
    if shares is None:
        raise RecipeError(f"no library {library!r}; there are {', '.join(libraries())}")
    assert DEPTHWISE in shares
    return Rates(
        shares,
        file["reread"][FLOAT32 if arithmetic == FLOAT32 else "tensor"],
        file["memory"]["matrix"],
        file["memory"]["other"],
        file["memory"]["transposes"] if arithmetic == HALF else 0.0,
    )


def unmeasured_error(is_fitted: bool) -> float:
    """The error of an unmeasured device's time within which four of five published rates lie.

    is_fitted: whether rates of the device itself, with other networks, are in the fit.
    """
    band = tables()["band"]
    error: float = band["network_out"] if is_fitted else band["family_out"]
    return error
