"""`firecaffe.train`: trains on workers that it starts, in the world of a launcher, or alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from firecaffe.api.argument_checks import check_count
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.hosts import check_memory
from firecaffe.cluster.world import is_launched
from firecaffe.errors import RecipeError
from firecaffe.gradients.bucket_sums import Hook
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.sections import Recipe
from firecaffe.tasks import Loss, Task
from firecaffe.training.build_training import train_parts
from firecaffe.training.data_workers import check_not_in_worker
from firecaffe.training.given_parts import Parts, check_arguments
from firecaffe.training.plugins import Plugin, check_plugin_list, check_with, load_plugins
from firecaffe.training.result import Result


@from_script
def train(
    recipe: Recipe | str | Path,
    model: Callable[[], nn.Module] | None = None,
    train_set: Any = None,
    test_set: Any = None,
    loss: Loss | None = None,
    resume: str | Path | None = None,
    comm_hook: tuple[object, Hook] | None = None,
    validation_set: Any = None,
    task: Task | None = None,
    *,
    workers: int | None = None,
    max_restarts: int = 0,
    plugins: Sequence[Plugin] = (),
) -> Result:
    """Train on `workers` processes of this host, or in the world of torchrun's environment.

    With `workers` it starts them and returns the result of rank 0. Without it, the process is a
    rank of its launcher, or trains alone; every rank calls it, and every rank gets the same result.

    Args:
        recipe: The training, or the path of its file. The other arguments replace what it names.
        model: A function that makes the network (a class will do), called under the recipe's seed.
        train_set: The training samples: a map-style torch Dataset (`from_torch` gives it workers),
            tensors or trees of them (`TensorDataset`, or the pair of inputs and targets), or an
            object with the two members of `firecaffe.data.Dataset`.
        test_set: The test samples, in the same forms. They are seen once, at the end.
        loss: A function of (outputs, targets) that returns the mean loss of the samples, a scalar.
        resume: A run folder or a checkpoint to resume, with any number of workers.
        comm_hook: (state, hook), a communication hook as
            `DistributedDataParallel.register_comm_hook` takes it. It sums the gradients instead of
            the recipe's exchange.
        validation_set: The samples that `train.eval_every` evaluates on. Without it `data.hold_out`
            holds out a share of train_set.
        task: A loss and metrics of your own.
        workers: The number of processes to start on this host. The other arguments are copied to
            them, functions and classes of a script or a notebook by value.
        max_restarts: How often all workers are restarted if one is lost. They continue from the
            newest checkpoint.
        plugins: Hooks around the training, after those of FIRECAFFE_PLUGINS.

    When it returns, the settings that it changed in the process are restored: threads, kernels,
    torch's generators, signals. One change cannot be undone: the C library's malloc then keeps
    freed memory (`mallopt`).

    Raises: FirecaffeError, one line for the user; its class says what it is about. What ends a
    worker is a RankFailedError with that line and the error's exit code. A script that does not
    catch the error ends with its line and exit code.
    """
    check_not_in_worker()
    parts = Parts(model, loss, task, train_set, test_set, validation_set, comm_hook)
    if isinstance(recipe, str | Path):
        recipe = Recipe.read(recipe)
    check_arguments(recipe, parts, resume)
    check_plugin_list(plugins)
    _check_workers(workers, max_restarts)
    checked = check_recipe(recipe, **parts.facts_for_check)
    resume = None if resume is None else Path(resume)
    given = checked, parts, resume, tuple(plugins)
    if workers is None:
        return train_parts(*given)
    # A rank loads nothing that its launcher alone uses.
    from firecaffe.script.launch import launch
    from firecaffe.training.checks import preflight, preflight_given

    check_with((*load_plugins(), *plugins), workers)
    if parts.are_named:
        preflight(checked, workers, resume)
    else:
        preflight_given(checked, parts, workers, resume)
    result = launch(train_parts, workers, given, max_restarts=max_restarts)
    if model is not None:
        result.hold_function(model)  # to make the network, which only the workers had
    return result


def _check_workers(workers: Any, max_restarts: Any) -> None:
    if workers is not None:
        check_count("workers", workers, 1)
        check_memory(workers, "workers")
    check_count("max_restarts", max_restarts, 0)
    if workers is None and max_restarts:
        raise RecipeError(
            f"max_restarts is {max_restarts} without workers, which alone can be restarted; give "
            "workers=N, too"
        )
    if workers is not None and is_launched():
        raise RecipeError(
            f"workers is {workers}, and this process is a worker already, of a launcher (torchrun, "
            "mpirun, srun, launch); leave workers out"
        )
