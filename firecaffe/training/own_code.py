"""What tells the code of a user, or the nets of Caffe's, which a training runs, from others."""

from firecaffe.models.network import maker_of
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import (
    caffe_file,
    file_digest,
    find,
    is_caffe,
    is_reference,
    source_digest,
)
from firecaffe.training.parts import Parts


def own_code(recipe: Recipe, parts: Parts) -> dict[str, str]:
    """By the recipe's section: the sha256 of the file that its function is from, or of the prototxt
    that it names, or a library's version. Without what is firecaffe's own.

    Raises: RecipeError, OwnCodeError.
    """
    found = {"model": "", "task": ""}
    if parts.model is None:
        found["model"] = maker_of(recipe.model.name).code
    else:
        found["model"] = source_digest(parts.model)
    loss = parts.loss if parts.task is None else parts.task.loss
    if loss is not None:
        found["task"] = source_digest(loss)
    else:
        found["task"] = _named("task.name", recipe.task.name)
    found["data"] = _named("data.name", recipe.data.name)
    found["solver"] = _named("solver.type", recipe.solver.type)
    return {section: code for section, code in found.items() if code}


def _named(word: str, name: str) -> str:
    """The sha256 of the file that a recipe's word names; empty if it names none."""
    if is_caffe(name):
        return file_digest(caffe_file(word, name))
    return source_digest(find(word, name)) if is_reference(name) else ""
