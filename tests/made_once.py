"""What every training of a test would make anew, made by the fork server before any of its
processes asks for it: the generated data set, what a record says of this code, and what a parser of
recipes imports. A training does so in its launcher and in each rank. And `check` times each size
of micro-batch for an instant.
"""

import gc
import os
import pickle

import torch

from firecaffe.api import cluster_check
from firecaffe.cli.train import make_parser
from firecaffe.recipe.sections import Recipe
from firecaffe.runs import environment
from tests import few_images


def make_elsewhere() -> few_images.Arrays:
    """In a process of its own: this one's forks find out for themselves what the processor can,
    which torch does when it first computes.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        with os.fdopen(writer, "wb") as file:
            pickle.dump(few_images.make(), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        arrays: few_images.Arrays = pickle.load(file)
    os.waitpid(child, 0)
    return arrays


few_images.made[:] = make_elsewhere()
# Both keep what they have found.
environment.source_digest()
environment.commit()
make_parser().add_class_arguments(Recipe)
vars(cluster_check)["STEP_S"] = 0.1
# A fork's collections would else touch, and so copy, all that is loaded.
gc.collect()
gc.freeze()
gc.enable()
