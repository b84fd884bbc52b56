"""Identifies the user's code, or the Caffe nets, that a training runs."""

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
    """Return the sha256 or version of code that is not firecaffe's own, by recipe section."""
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
    if is_caffe(name):
        return file_digest(caffe_file(word, name))
    return source_digest(find(word, name)) if is_reference(name) else ""
