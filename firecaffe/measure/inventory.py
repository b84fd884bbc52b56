"""Inspects a recipe's network and loss on this device, without training."""

import torch

from firecaffe.data import Batches, SampleOrder
from firecaffe.inventory.findings import Inventory
from firecaffe.measure.step_times import dataset_of
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.training.first_look import FirstLook
from firecaffe.training.forward import Forward, arithmetic
from firecaffe.training.given_parts import Parts, build_network
from firecaffe.training.given_task import task_for


def inventory_of(recipe: CheckedRecipe, device: torch.device) -> Inventory:
    """Inspect the whole network (whatever [parallel] says) and the loss, as before a first step.

    Raises: RecipeError if training cannot keep its state the same on any number of workers.
    """
    train = recipe.train
    with arithmetic(train, device):
        data = dataset_of(recipe, 2 * train.micro_batch_size)
        network = build_network(recipe, Parts(), data, device)
        size = train.micro_batch_size
        order = SampleOrder(train.seed, len(data), 2 * size, size)
        task = task_for(recipe, None, None, data)
        forward = Forward(network, task, train, device=device)
        return FirstLook(forward).around(Batches(data, order, recipe.data, device))
