"""What tells the code of a user, which a training runs, from other code."""

from firecaffe.models.network import maker_of
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import caffe_file, file_digest, find, is_reference, source_digest
from firecaffe.training.parts import Parts


def own_code(recipe: Recipe, parts: Parts) -> dict[str, str]:
    """By the recipe's section: the sha256 of the file that its function is from, or a library's
    version. Without what is firecaffe's own.

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
    elif is_reference(recipe.task.name):
        found["task"] = source_digest(find("task.name", recipe.task.name))
    if caffe_file(recipe.data.name):
        found["data"] = file_digest(caffe_file(recipe.data.name))
    elif is_reference(recipe.data.name):
        found["data"] = source_digest(find("data.name", recipe.data.name))
    if is_reference(recipe.solver.type):
        found["solver"] = source_digest(find("solver.type", recipe.solver.type))
    return {section: code for section, code in found.items() if code}
