"""The recipes that come with the package, by name."""

from pathlib import Path

from firecaffe.errors import RecipeError

FOLDER = Path(__file__).parents[1] / "recipes"


def shipped() -> list[str]:
    """Return the names of the shipped recipes, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def recipe_path(name_or_path: str | Path) -> Path:
    """Return the file of a recipe, given its path or the name of a shipped recipe.

    Raises: RecipeError if it is neither a path nor a known name.
    """
    path = Path(name_or_path)
    if len(path.parts) != 1 or path.suffix or path.is_file():
        return path
    if path.name not in (names := shipped()):
        raise RecipeError(
            f"no recipe {str(path)!r} - it is no file and no shipped recipe - give a file (*.toml) "
            f"or one of {', '.join(names)}"
        )
    return FOLDER / f"{path.name}.toml"
