"""Arguments that a command takes as text with commas, and a function as a list, too."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from firecaffe.errors import RecipeError
from firecaffe.resume_advice import option
from firecaffe.user_code import shown


def commas(name: str, value: Any) -> str:
    """Return the text of an argument, [1, 2] as "1,2". Raises: RecipeError."""
    several = [value] if isinstance(value, str | Path | int) else value
    if not isinstance(several, Sequence) or not all(
        isinstance(part, str | Path | int) for part in several
    ):
        raise RecipeError(f"{option(name)} is {shown(value)}; expected a list, or text with commas")
    return ",".join(map(str, several))
