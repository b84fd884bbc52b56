"""Checks that a training can begin, before any rank is started."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from firecaffe.data import Batches, Dataset, check_data
from firecaffe.errors import RecipeError, RunError
from firecaffe.generators import generators_kept
from firecaffe.inventory.network_state import check_state
from firecaffe.meta_kernels import without_compiler
from firecaffe.models.network import make_network, with_outline
from firecaffe.models.weights import load_weights
from firecaffe.parallel.row_layers import check_called
from firecaffe.parallel.slide import ROWS
from firecaffe.parallel.split import check_parts
from firecaffe.plan.of_recipe import cluster_for
from firecaffe.recipe.check import CheckedRecipe
from firecaffe.recipe.ranks import check_hosts
from firecaffe.recipe.run import Ranks, Run, resolve
from firecaffe.recipe.sections import Recipe
from firecaffe.reference import is_reference
from firecaffe.runs.loggers import check_libraries
from firecaffe.solvers.optimizer import make_optimizer
from firecaffe.synchrony.config import LOCAL
from firecaffe.synchrony.fragments import cut_fragments
from firecaffe.training.checkpoint import check_identity, check_whole, load_newest
from firecaffe.training.checks import check_input, check_outputs
from firecaffe.training.compiled import check_compiler
from firecaffe.training.constraint import check_constraints
from firecaffe.training.facts import describe_training
from firecaffe.training.first_weights import find_weights
from firecaffe.training.forward import Forward
from firecaffe.training.given_task import task_for
from firecaffe.training.norms import check_layers
from firecaffe.training.parallel.auto import with_named_split
from firecaffe.training.parallel.network import chosen_layers
from firecaffe.training.parallel.staged import check_stages
from firecaffe.training.parallel.words import in_words_of
from firecaffe.training.parts import counts_of


@without_compiler()  # an optimizer would load it, and a network's shapes
def preflight(
    recipe: CheckedRecipe,
    per_host: int,
    resume: Path | None = None,
    is_new: bool = True,
    hosts: tuple[int, int] = (1, 1),
) -> None:
    """Checks all that can be known before any rank is started.

    Args:
        recipe: What is to be trained.
        per_host: Ranks of each host.
        resume: A run or a checkpoint that is to go on.
        is_new: Whether the run is new; it is not if this host may join a run that goes on already.
        hosts: The least and the most hosts that the run may have.

    Raises: the FirecaffeError that the training would have met.
    """
    on_gpus = recipe.train.device != "cpu" and torch.cuda.is_available()
    layout = check_hosts(recipe, per_host, *hosts, on_gpus=on_gpus)
    data = check_data(recipe.data)
    recipe = with_named_split(recipe, data.train)
    described = "" if resume is None else describe_training(recipe, data)
    run = resolve(recipe, data, Ranks(layout.sharers), described=described)
    rounds = run.rounds  # raises if the training is shorter than one
    _check_network(recipe, data.train, is_resumed=resume is not None)
    # On GPUs the ranks try it: a loss may have tensors there.
    if is_reference(recipe.task.name) and not on_gpus:
        _try_task(run, data.train)
    if recipe.train.device == "cuda" and not torch.cuda.is_available():
        raise RecipeError("train.device is cuda; this host shows no GPU (use cpu or auto)")
    if is_new and recipe.run.folder and Path(recipe.run.folder).exists():
        raise RunError(
            f"run.folder {recipe.run.folder} exists already; two runs never write into one folder"
        )
    cluster_for(recipe)
    check_libraries(recipe.run.loggers)
    if recipe.train.compile:
        check_compiler("cuda" if on_gpus else "cpu")
    # Of several hosts that of rank 0 alone need have it.
    if resume is not None and (is_new or resume.exists()):
        checkpoint = load_newest(resume)[0]
        check_identity(checkpoint, dict(run.deciding), run.steps)
        check_whole(checkpoint, rounds)


def _check_network(recipe: Recipe, dataset: Dataset, is_resumed: bool) -> None:
    """Checks the network's shapes, its parameters' names and its file of weights.

    Raises: RecipeError; OwnCodeError for what a user's code raises.
    """
    task = task_for(recipe, None, None, dataset)

    def check(network: nn.Module) -> None:
        check_state(network)
        check_input(network, task, recipe, dataset)
        named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        make_optimizer(named, recipe.solver)
        check_constraints(recipe, network)
        if recipe.synchrony.mode == LOCAL:
            cut_fragments([each.numel() for each in named.values()], recipe.synchrony.fragments)
        with in_words_of(recipe.parallel):
            if recipe.parallel.is_split:
                chosen = chosen_layers(network, recipe.parallel)
                check_parts(network, chosen, recipe.parallel.num_parts)
                by_rows = [name for name, word in chosen.items() if word == ROWS]
                call = partial(check_input, network, task, recipe, dataset)
                check_called(network, by_rows, recipe.parallel.num_parts, call)
            if recipe.parallel.stages:
                check_stages(network, recipe.parallel)
        if recipe.train.batch_norm_samples:
            check_layers(network, recipe.train.batch_norm_samples)
        if recipe.model.weights and not is_resumed:
            load_weights(network, find_weights(recipe.model.weights)[0])

    with_outline(recipe.model, *counts_of(dataset), check)


def _try_task(run: Run, dataset: Dataset) -> None:
    """Asks a user's own task for the loss and the metrics of one sample, as the ranks do before the
    first step. It may need values, so the network is in memory for this.

    Raises: RecipeError; OwnCodeError for what a user's code raises.
    """
    recipe, device = run.recipe, torch.device("cpu")
    task, arithmetic = task_for(recipe, None, None, dataset), replace(recipe.train, compile=False)
    batches = Batches(dataset, run.order, recipe.data, device)
    with generators_kept():
        network = make_network(recipe.model, *counts_of(dataset))
        forward = Forward(network, task, arithmetic, device=device)
        check_outputs(forward, batches, recipe, is_own=False)
