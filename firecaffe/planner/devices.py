"""Devices by their data sheets, as `plan --device` takes them; no cluster file is needed.

A device's rates are its sheet's times those of its library (`library_rates`). The scale between the
two is its own if published rates of it are in the fit, else its family's mean.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import Device, Link
from firecaffe.planner.library_rates import tables, unmeasured_error
from firecaffe.resume_advice import option
from firecaffe.schema import parse_toml, read_file
from firecaffe.user_code import shown

FILE = Path(__file__).parent / "devices.toml"
MOST_BYTES = 100_000


@dataclass(frozen=True)
class Sheet:
    """A device's data sheet."""

    name: str
    family: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops: dict[str, float] = field(hash=False)
    """The peak by dtype."""
    link: str
    """What joins the devices of a node."""
    library: str = "cudnn8"
    power_w: float = 0.0
    source: str = ""


@cache
def _file() -> dict[str, Any]:
    return read_file(FILE, dict[str, Any], RecipeError, parse_toml, MOST_BYTES, where=FILE.name)


def sheets() -> dict[str, Sheet]:
    return {key: Sheet(**values) for key, values in _file()["device"].items()}


def sheet_of(name: str) -> Sheet:
    """Find a data sheet. Raises: RecipeError, which lists all."""
    known = sheets()
    if name not in known:
        raise RecipeError(
            f"{option('device')} is {shown(name)}; there are {', '.join(sorted(known))}"
        )
    return known[name]


def device_of(sheet: Sheet) -> Device:
    scales, is_fitted = tables()["scale"], sheet.name in tables()["scale"]
    return Device(
        name=sheet.name,
        memory_bytes=sheet.memory_bytes,
        memory_bytes_per_s=sheet.memory_bytes_per_s,
        peak_flops=sheet.flops,
        efficiency=scales[sheet.name] if is_fitted else tables()["family_scale"][sheet.family],
        overhead_s=tables()["overhead_s"],
        library=sheet.library,
        power_w=sheet.power_w,
        error=unmeasured_error(is_fitted),
    )


def link_inside(sheet: Sheet, per_node: int) -> Link:
    """The link that joins so many devices of a node."""
    figures = {key: value for key, value in _file()["link"][sheet.link].items() if key != "source"}
    return Link(name=sheet.link, group=per_node, **figures)
