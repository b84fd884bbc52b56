"""Checks before the first step: of the recipe, the network, the task, the data and the ranks."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from firecaffe.data import Batches, Dataset, Layout, check_data, is_images, network_layout
from firecaffe.data.dataset import leaf_of, map_batch, tree_text
from firecaffe.errors import OwnCodeError, RecipeError
from firecaffe.generators import generators_kept
from firecaffe.inventory.attributes import attributes_of, carried_over
from firecaffe.inventory.findings import check_reduction
from firecaffe.inventory.network_state import check_state
from firecaffe.meta_kernels import without_compiler
from firecaffe.models import MODELS
from firecaffe.models.network import make_network, with_outline
from firecaffe.models.weights import load_weights
from firecaffe.parallel.cut import ROWS
from firecaffe.parallel.layer_split import check_parts
from firecaffe.parallel.layers_in_parts import check_row_counts
from firecaffe.planner.recipe_workload import cluster_for
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.run import Ranks, Run, resolve
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.worker_numbers import check_hosts
from firecaffe.runs.record import check_libraries
from firecaffe.runs.run_folder import folder_exists_error
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import LOCAL
from firecaffe.synchrony.rounds import cut_fragments
from firecaffe.tasks import Task
from firecaffe.tasks.metric import Metric, TorchMetric
from firecaffe.training.checkpoint import check_identity, check_whole, has_checkpoints, load_newest
from firecaffe.training.constraints import check_constraints
from firecaffe.training.evaluation import evaluating
from firecaffe.training.evaluation_weights import check_layers
from firecaffe.training.forward import Forward, check_compiler, match_format
from firecaffe.training.given_parts import Parts, counts_of, open_parts, task_for
from firecaffe.training.load import find_weights
from firecaffe.training.parallel.auto_layout import with_named_split
from firecaffe.training.parallel.split_network import chosen_layers, naming_settings
from firecaffe.training.parallel.staged import check_stages
from firecaffe.training.shared_facts import describe_training
from firecaffe.user_code import failed, is_reference, shown


def check_prediction(task: Task, outputs: Any, recipe: Recipe) -> None:
    """Raise RecipeError if the task rejects outputs of this shape, real or on the meta device."""
    network = f"model.name {recipe.model.name!r}"
    try:
        wrong = "" if task.wrong is None else task.wrong(outputs)
    except RecipeError as error:
        raise RecipeError(f"{network}: {error}") from None
    if wrong:
        raise RecipeError(f"{network} gives {wrong}")


def check_shapes(task: Task, outputs: Any, targets: Any, recipe: Recipe) -> None:
    """Raise RecipeError if a task of ours rejects the shapes. targets: zeros, or on meta."""
    check_prediction(task, outputs, recipe)
    if is_reference(recipe.task.name):
        return
    try:
        task.loss(outputs, targets)
    except RecipeError:
        raise
    except Exception:  # inconclusive: a user's loss may need values
        return


def check_loss(task: Task, outputs: Any, targets: Any, recipe: Recipe, is_own: bool) -> None:
    """Raise RecipeError if the loss cannot be trained on; OwnCodeError for a user's errors."""
    word = f"{_whose(recipe, is_own)}loss"
    check_reduction(word, task.loss)
    _check_value(word, _loss_of(word, task, outputs, targets, recipe, is_own), outputs)


def _check_evaluated(task: Task, outputs: Any, targets: Any, recipe: Recipe, is_own: bool) -> None:
    word = (
        f"{_whose(recipe, is_own)}loss in an evaluation, which has no gradients (derivatives "
        "belong into forward, in torch.enable_grad()),"
    )
    with torch.no_grad():
        _loss_of(word, task, outputs, targets, recipe, is_own)


def _loss_of(
    word: str, task: Task, outputs: Any, targets: Any, recipe: Recipe, is_own: bool
) -> Any:
    try:
        return task.loss(outputs, targets)
    except RecipeError:
        raise
    except Exception as error:
        said = f"{word} does not take the network's outputs and {_kinds(targets)}"
        raise _failure(said, error, is_own or is_reference(recipe.task.name)) from error


def check_metrics(task: Task, outputs: Any, targets: Any, recipe: Recipe, is_own: bool) -> None:
    """Raise RecipeError if a metric rejects one sample; OwnCodeError for a user's errors."""
    whose = _whose(recipe, is_own)
    is_own = is_own or is_reference(recipe.task.name)
    for name, metric in task.measured.items():
        word = f"{whose}metric {name!r}"
        try:
            _try(metric, outputs, targets)
        except OwnCodeError:
            raise
        except RecipeError as error:
            raise RecipeError(f"{word}: {error}") from error
        except Exception as error:
            said = f"{word} does not take the network's outputs and {_kinds(targets)}"
            raise _failure(said, error, is_own) from error


def _whose(recipe: Recipe, is_own: bool) -> str:
    return "" if is_own else f"task.name {recipe.task.name!r}: its "


def _check_value(word: str, value: Any, outputs: Any) -> None:
    if isinstance(value, tuple | list | dict):
        raise RecipeError(
            f"{word} gave a {type(value).__name__} of {len(value)}; expected one number. Add the "
            "losses, each with its weight; trainings of several losses and optimizers, as of GANs, "
            "are not supported"
        )
    # With a single sample, a loss per sample is one number, too. So no dimension is allowed.
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        described = f"{value.dtype} of {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise RecipeError(
            f"{word} gave {described!s:.80}; expected one number, the mean of the samples"
        )
    if not value.requires_grad:
        raise RecipeError(
            f"{word} gave a number that knows no gradient; expected one that is computed from the "
            "network's outputs by torch (without item(), detach(), no_grad or argmax)"
        )
    if not value.isfinite() and all(bool(leaf.isfinite().all()) for leaf in _tensors(outputs)):
        raise RecipeError(
            f"{word} is {value.item()} for the first sample, before any step, though the network's "
            "outputs are finite"
        )


def _try(metric: Metric, outputs: Any, targets: Any) -> None:
    # The value of a single sample may be undefined, which is no error. It must be one number.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from metrics that need more than one sample
        state = metric.of_batch(outputs, targets)
        try:
            metric.value(state, 1)
        except RecipeError:
            raise
        except Exception:
            pass
        _check_counts(metric, outputs, targets)


def _check_counts(metric: Metric, outputs: Any, targets: Any) -> None:
    if not isinstance(metric, TorchMetric):
        return
    digests = [attributes_of(metric.metric)]
    for _ in range(2):
        metric.of_batch(outputs, targets)
        digests.append(attributes_of(metric.metric))
    if counted := carried_over(*digests):
        raise RecipeError(
            f"it counts in {', '.join(counted)}, which its reset() does not empty, and which no "
            "worker has of the others' batches; expected add_state"
        )


def _failure(said: str, error: Exception, is_own: bool) -> RecipeError:
    if is_own:
        return failed(f"{said}: it", error)
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return RecipeError(f"{said}: {line}")


def _kinds(targets: Any) -> str:
    kinds = [f"{tuple(leaf.shape)}, {leaf.dtype}" for leaf in _tensors(targets)]
    return f"targets of {'; '.join(kinds) or shown(targets)}"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def check_input(model: nn.Module, task: Task, recipe: Recipe, dataset: Dataset) -> None:
    """Run shapes on meta, zeros or a sample through it. Raises: RecipeError; OwnCodeError."""
    layout = network_layout(dataset, recipe.data)
    device = next(model.parameters()).device.type
    is_meta = device == "meta"
    if is_meta or is_images(dataset):
        count = recipe.train.micro_batch_size if is_meta else 1
        inputs, targets = layout.zeros(count, device)
    else:  # zeros may be no sample: a sequence has a length
        inputs, targets = dataset.batch(torch.tensor([0]))
    try:
        with evaluating(model):
            outputs = model(inputs)
    except Exception as error:
        what = f"{samples_text(dataset, layout)} (data.name {recipe.data.name!r})"
        raise _input_error(recipe, what, error) from error
    check_shapes(task, outputs, targets, recipe)


def _input_error(recipe: Recipe, what: str, error: Exception) -> RecipeError:
    said = f"model.name {recipe.model.name!r} does not take {what}"
    return _failure(said, error, is_own=recipe.model.name not in MODELS)


def check_outputs(
    forward: Forward,
    batches: Batches,
    recipe: Recipe,
    is_own: bool,
    outputs_of: Callable[[Any], Any] | None = None,
) -> None:
    """Run one sample in evaluation, and an epoch's shortest micro-batch (1 or 2) in training.

    is_own: whether `firecaffe.train` was given the loss or the task. outputs_of: returns the
    network's outputs, or None if another rank has them. Raises: RecipeError.
    """
    model, config, dataset = forward.model, recipe.train, batches.dataset
    outputs_of = outputs_of or model
    is_one = len(dataset) % config.micro_batch_size == 1
    rest = 1 if is_one else min(2, config.micro_batch_size)
    batch = batches.train_batch(0, 0)
    inputs, one = map_batch(lambda tensor: tensor[:1], batch)
    shortest, targets = map_batch(lambda tensor: tensor[:rest], batch)
    inputs, shortest = match_format(inputs, config), match_format(shortest, config)
    forward.begin_step()
    try:
        with evaluating(model), torch.no_grad():
            outputs, evaluated = outputs_of(inputs), outputs_of(shortest)
    except Exception as error:
        what = f"{_shape_text(inputs)}, which an evaluation may end with"
        raise _input_error(recipe, what, error) from error
    forward.buffers.begin_micro_batch()
    try:
        trained = outputs_of(shortest)
    except Exception as error:
        what = _shape_text(shortest)
        if is_one:
            what += (
                f", which an epoch of {len(dataset)} samples ends with (a train.micro_batch_size "
                f"that does not leave 1 of {len(dataset)} helps, or a sample more or less)"
            )
        raise _input_error(recipe, what, error) from error
    forward.buffers.begin_micro_batch()
    if outputs is not None:
        check_prediction(forward.task, outputs, recipe)
        check_metrics(forward.task, outputs, one, recipe, is_own)
    if trained is not None:
        check_loss(forward.task, trained, targets, recipe, is_own)
        _check_evaluated(forward.task, evaluated, targets, recipe, is_own)


def _shape_text(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return "x".join(map(str, inputs.shape))
    kind = type(inputs).__name__
    return f"one sample of {tree_text(tree_map(leaf_of, inputs))}, given to forward as one {kind}"


def samples_text(dataset: Dataset, layout: Layout) -> str:
    if is_images(dataset):
        return f"images of {'x'.join(map(str, layout.inputs.shape))}"
    return f"inputs of {tree_text(layout.inputs)}"


def check_float32(recipe: Recipe, named: Mapping[str, nn.Parameter]) -> None:
    """Raise RecipeError if the compressor cannot encode a gradient, which has to be float32."""
    compressor = recipe.exchange.compressor
    for name, parameter in named.items():
        if parameter.dtype != torch.float32:
            raise RecipeError(
                f"exchange.compressor {compressor} encodes float32; {name} is {parameter.dtype}"
            )


def check_not_float16(recipe: Recipe, named: Mapping[str, nn.Parameter]) -> None:
    """Raise RecipeError if a gradient's type is too short for float16's loss scale."""
    if recipe.train.autocast != "float16":
        return
    for name, parameter in named.items():
        if parameter.dtype == torch.float16:
            raise RecipeError(
                f"train.autocast float16 scales the loss, and its gradients must be longer; {name} "
                "is torch.float16: keep it as float32, which autocast shortens by itself, or take "
                "train.autocast none or bfloat16"
            )


@without_compiler()  # an optimizer and a run of shapes would load it
def preflight(
    recipe: CheckedRecipe,
    per_host: int,
    resume: Path | None = None,
    is_new: bool = True,
    hosts: tuple[int, int] = (1, 1),
) -> None:
    """Check all that can be known before any rank is started. Raises: as the training would.

    per_host: ranks on each host. is_new: false if this host may join a run that is already running.
    hosts: the fewest and the most hosts of the run.
    """
    on_gpus = recipe.train.device != "cpu" and torch.cuda.is_available()
    layout = check_hosts(recipe, per_host, *hosts, on_gpus=on_gpus)
    data = check_data(recipe.data)
    recipe = with_named_split(recipe, data.train)
    described = "" if resume is None else describe_training(recipe, data)
    run = resolve(recipe, data, Ranks(layout.sharers), described=described)
    rounds = run.rounds  # raises if the training is shorter than one round
    _check_network(recipe, data.train, is_resumed=resume is not None)
    # On GPUs the ranks try the task, because its loss may have tensors there.
    if is_reference(recipe.task.name) and not on_gpus:
        _try_task(run, data.train)
    _check_place(recipe, is_new)
    cluster_for(recipe)
    check_libraries(recipe.run.loggers)
    if recipe.train.compile:
        check_compiler("cuda" if on_gpus else "cpu")
    if resume is not None and (is_new or has_checkpoints(resume)):  # only rank 0's host needs any
        checkpoint = load_newest(resume)[0]
        check_identity(checkpoint, dict(run.deciding), run.steps)
        check_whole(checkpoint, rounds)


def preflight_given(recipe: CheckedRecipe, parts: Parts, workers: int, resume: Path | None) -> None:
    """Check parts given in Python before ranks are started. Raises: as the training would."""
    on_gpus = recipe.train.device != "cpu" and torch.cuda.is_available()
    check_hosts(recipe, workers, 1, 1, on_gpus=on_gpus)
    open_parts(recipe, parts)
    _check_place(recipe, is_new=True)
    if resume is not None:
        load_newest(resume)


def _check_place(recipe: Recipe, is_new: bool) -> None:
    if recipe.train.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("train.device is cuda; this host shows no GPU (use cpu or auto)")
    if is_new and recipe.run.folder and Path(recipe.run.folder).exists():
        raise folder_exists_error(recipe.run.folder)


def _check_network(recipe: Recipe, dataset: Dataset, is_resumed: bool) -> None:
    task = task_for(recipe, None, None, dataset)

    def check(network: nn.Module) -> None:
        check_state(network)
        check_input(network, task, recipe, dataset)
        named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        make_optimizer(named, recipe.solver)
        check_constraints(recipe, network)
        if recipe.synchrony.mode == LOCAL:
            cut_fragments([p.numel() for p in named.values()], recipe.synchrony.fragments)
        with naming_settings(recipe.parallel):
            if recipe.parallel.is_split:
                chosen = chosen_layers(network, recipe.parallel)
                check_parts(network, chosen, recipe.parallel.num_parts)
                by_rows = [name for name, word in chosen.items() if word == ROWS]
                call = partial(check_input, network, task, recipe, dataset)
                check_row_counts(network, by_rows, recipe.parallel.num_parts, call)
            if recipe.parallel.stages:
                check_stages(network, recipe.parallel)
        if recipe.train.batch_norm_samples:
            check_layers(network, recipe.train.batch_norm_samples)
        if recipe.model.weights and not is_resumed:
            load_weights(network, find_weights(recipe.model.weights)[0])

    with_outline(recipe.model, *counts_of(dataset), check)


def _try_task(run: Run, dataset: Dataset) -> None:
    # Does what ranks do before the first step. A task may need values, so the network has memory.
    recipe, device = run.recipe, torch.device("cpu")
    task, arithmetic = task_for(recipe, None, None, dataset), replace(recipe.train, compile=False)
    batches = Batches(dataset, run.order, recipe.data, device)
    with generators_kept():
        network = make_network(recipe.model, *counts_of(dataset))
        forward = Forward(network, task, arithmetic, device=device)
        check_outputs(forward, batches, recipe, is_own=False)
