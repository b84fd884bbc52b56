"""Write the folder of an import: net, solver, weights, report, and last the recipe."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from firecaffe.errors import RunError
from firecaffe.files import written_together
from firecaffe.from_caffe.recipe import NET, WEIGHTS, Imported
from firecaffe.training.run_facts import ABOUT, NOTHING, About

RECIPE, SOLVER, REPORT = "recipe.toml", "solver.prototxt", "report.md"


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise RunError if the folder is a file, or has files that must not be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"--out {folder}: is a file; expected a folder, or a new name")
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise RunError(f"--out {folder}: is there already; --overwrite writes over its files")


def files_of(imported: Imported, source: Path) -> dict[str, bytes]:
    """Return the folder's files by name, the recipe last. source: The imported file."""
    comment = f"From {source.name} by firecaffe import; {REPORT} says what became of each word."
    report = imported.report.markdown(source.name)
    files = {
        NET: imported.net,
        SOLVER: imported.solver,
        WEIGHTS: imported.weights,
        ABOUT: json.dumps(asdict(_about(imported)), indent=2).encode(),
        REPORT: report.encode(),
        RECIPE: as_toml(imported.sections, comment).encode(),
    }
    return {name: content for name, content in files.items() if content}


def _about(imported: Imported) -> About:
    shape = tuple(imported.sections["model"]["args"]["input_CHW"])
    return replace(NOTHING, input_shape=shape, input_dtype="float32")


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by name: all of them, or none. Raises OSError."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with written_together([folder / name for name in files]) as asides:
            for aside, content in zip(asides, files.values(), strict=True):
                aside.write_bytes(content)
    except BaseException:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        raise


def as_toml(sections: Mapping[str, Mapping[str, Any]], comment: str) -> str:
    parts = [f"# {line}" for line in comment.splitlines()]
    for section, settings in sections.items():
        if settings:
            parts += ["", f"[{section}]"]
            parts += [f"{word} = {_value(value)}" for word, value in settings.items()]
    return "\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items())
        return f"{{ {inside} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    is_bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if is_bare else json.dumps(key, ensure_ascii=False)
