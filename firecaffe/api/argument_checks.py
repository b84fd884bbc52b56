"""Checks of arguments, named as typed. They raise RecipeError; on files to write, RunError too."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firecaffe.errors import RecipeError, RunError
from firecaffe.files import check_writable
from firecaffe.resume_advice import option
from firecaffe.user_code import shown

if TYPE_CHECKING:
    from firecaffe.planner.cluster import Cluster

DEVICES = ("auto", "cpu", "cuda")


def wrong(name: str, value: object, right: str) -> RecipeError:
    return RecipeError(f"{option(name)} is {value}; it must be {right}")


def check_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    if type(value) is not int or value < least:
        raise wrong(name, shown(value), f"at least {least}, a whole number")
    if most is not None and value > most:
        raise wrong(name, value, f"{least} to {most:,}")


def check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -inf < value < inf:
        raise wrong(name, shown(value), "a number")


def check_device(value: Any) -> None:
    if value not in DEVICES:
        raise wrong("device", shown(value), ", ".join(DEVICES))


def path_of(name: str, value: Any) -> Path:
    # No system's path has a NUL; Python would report one as a ValueError.
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise RecipeError(f"{option(name)} is {shown(value)}; expected a path")
    return Path(value)


def paths_of(name: str, value: Any) -> list[Path]:
    several = [value] if isinstance(value, str | Path) else value
    if not isinstance(several, Sequence):
        raise RecipeError(f"{option(name)} is {shown(value)}; expected a path, or several")
    return [path_of(name, part) for part in several]


def commas(name: str, value: Any) -> str:
    """Return the text of an argument, [1, 2] as "1,2"."""
    several = [value] if isinstance(value, str | Path | int | float) else value
    if not isinstance(several, Sequence) or not all(
        isinstance(part, str | Path | int | float) and not isinstance(part, bool)
        for part in several
    ):
        raise RecipeError(f"{option(name)} is {shown(value)}; expected a list, or text with commas")
    return ",".join(map(str, several))


def filled(name: str, text: str) -> str:
    if not text:
        raise RecipeError(f"{option(name)} is empty; give it a value, or leave it out")
    return text


def refuse_beside(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value:
            raise RecipeError(f"{option(name)} has no effect beside {what}; leave one of them out")


def check_target(word: str, name: str, overwrite: bool, suffixes: tuple[str, ...] = ()) -> None:
    """Check the output path `name`, typed after the option `word`, unless it is empty.

    Raises RecipeError if its ending is not one of `suffixes`; RunError if its folder does not
    exist or takes no file, if it is a folder, or if the file exists and `overwrite` is false.
    """
    if not name:
        return
    path = Path(name)
    if suffixes and path.suffix not in suffixes:
        raise RecipeError(f"{word} is {name}; it must end in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise RunError(f"{word} {name}: there is no folder {path.parent}")
    if path.is_dir():
        raise RunError(f"{word} {name}: is a folder; name a file")
    if path.exists() and not overwrite:
        raise RunError(f"{word} {name}: exists already; {option('overwrite')} writes over it")
    try:
        check_writable(path)
    except OSError as error:
        why = error.strerror or error
        raise RunError(f"{word} {name}: cannot be written ({why}); name another file") from error


def check_cluster_file(write: str | Path, overwrite: bool) -> None:
    """Raise RecipeError or RunError if a cluster file cannot be written to the path `write`."""
    check_target(option("write"), str(write), overwrite, (".toml",))


DEFAULT_CLUSTER = "cpu-host"


def cluster_to_write(write: str | Path, overwrite: bool, cluster: str | Path) -> "Cluster | None":
    """Load the cluster that a file to write starts from, if any. Raises: RecipeError, RunError."""
    from firecaffe.planner.cluster import load_cluster

    check_cluster_file(write, overwrite)
    if write:
        return load_cluster(str(cluster) or DEFAULT_CLUSTER)
    if cluster:
        started = f"{option('cluster')} is what the file of {option('write')} starts from"
        raise RecipeError(f"{started}; {option('write')} is missing")
    return None
