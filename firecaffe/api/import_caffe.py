"""`firecaffe.import_caffe`: Caffe's files as a folder with a recipe."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from firecaffe.api.answer import Answer
from firecaffe.api.argument_checks import path_of
from firecaffe.api.recipe_argument import parse_input
from firecaffe.cluster.from_script import from_script
from firecaffe.errors import RunError
from firecaffe.from_caffe.import_report import Report
from firecaffe.from_caffe.recipe import (
    NET,
    RECIPE,
    REPORT,
    ImportRequest,
    check_folder,
    files_of,
    read,
    write_folder,
)
from firecaffe.recipe.sections import Recipe
from firecaffe.resume_advice import option


@dataclass(frozen=True, repr=False)
class ImportedNet(Answer):
    """A folder with a recipe, and the report on what was understood."""

    folder: Path
    """The folder that was written."""
    recipe: Recipe
    """The recipe, as it is in the folder."""
    report: Report
    """The settings that were understood, changed, and left out, each with its line."""

    @property
    def recipe_path(self) -> Path:
        """The file of the recipe."""
        return self.folder / RECIPE

    def to_dict(self) -> dict[str, Any]:
        """Return the report: lists of places and what became of them."""
        return {"recipe": str(self.recipe_path), **asdict(self.report)}

    def _parts(self) -> Iterator[str]:
        yield from self.report.lines()
        yield f"written: {self.recipe_path}, with {NET} and {REPORT}"
        if not self.report.left_out:
            yield f"next: firecaffe train {self.recipe_path}"


@from_script
def import_caffe(
    file: str | Path,
    *,
    weights: str | Path = "",
    out: str | Path = "",
    root: str | Path = "",
    input_shape: str = "",
    overwrite: bool = False,
) -> ImportedNet:
    """Convert a solver of Caffe's, or a net alone, to a folder with a recipe.

    Settings without a counterpart are left out, and are in the answer's `report.left_out`.

    Args:
        file: The solver's or the net's .prototxt.
        weights: A .caffemodel with first weights.
        out: The folder to write; else one here with the name of the file.
        root: The folder that paths in the files start from.
        input_shape: The shape of one sample, as "3x227x227", if the data are missing.
        overwrite: Write over files that exist.

    Raises: RecipeError or CaffeError, with the file and the line, if the net cannot be built;
    RunError for a missing folder.
    """
    path = path_of("file", file)
    folder = Path(out or path.stem)
    if root and not Path(root).is_dir():
        raise RunError(f"{option('root')} {root}: there is no such folder")
    shape = parse_input(input_shape, option("input_shape")) if input_shape else ()
    check_folder(folder, overwrite)
    imported = read(path, ImportRequest(str(folder), str(root), shape, str(weights)))
    write_folder(folder, files_of(imported, path))
    return ImportedNet(folder, imported.recipe, imported.report)
