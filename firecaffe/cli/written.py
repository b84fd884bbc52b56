"""Files that a command writes where it is told to: checked before it begins."""

from pathlib import Path

from firecaffe.errors import RecipeError, RunError


def check_target(word: str, name: str, overwrite: bool, suffixes: tuple[str, ...] = ()) -> None:
    """name: the file's, after the option `word`; empty if there is none.

    Raises: RecipeError if its name does not end in one of `suffixes`; RunError if there is no
    folder for it, or it is there already and is not to be written over.
    """
    if not name:
        return
    path = Path(name)
    if suffixes and path.suffix not in suffixes:
        raise RecipeError(f"{word} is {name}; it must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise RunError(f"{word} {name}: there is no folder {path.parent}")
    if path.exists() and not overwrite:
        raise RunError(f"{word} {name}: exists already; --overwrite writes over it")
