"""Facts that ranks must share before they train together, and doubts about identical bits."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from firecaffe.cluster.agree import digest, gather_json
from firecaffe.cluster.world import World
from firecaffe.data import Data, Dataset, is_images, shard_counts, weighted_draws
from firecaffe.data.dataset import is_repeatable, layout_of, named_leaves
from firecaffe.errors import RunError
from firecaffe.exchange import parse_hierarchical
from firecaffe.exchange.route import HOOK
from firecaffe.gradients.probe import Probe
from firecaffe.inventory.attributes import attributes_of_data, carried_over
from firecaffe.recipe.run import Run
from firecaffe.recipe.sections import Recipe, flatten
from firecaffe.runs.environment import source_digest
from firecaffe.runs.run_folder import ENVIRONMENT, read_run_file
from firecaffe.training.checkpoint import Checkpoint
from firecaffe.value_checks import some_of


def facts(
    recipe: Recipe,
    world: World,
    data: Data,
    model: nn.Module,
    checkpoint: Checkpoint | None,
    unlike: Sequence[str],
    own_code: Mapping[str, str],
    weights_sha256: str,
) -> dict[str, str]:
    """Return the facts that all ranks must share before they train together, by their names.

    model: the whole network. unlike: parts of the data that do not repeat: only sizes are compared.
    own_code: see `training.learner`. weights_sha256: of the file of the first weights.
    """
    code = {"torch": torch.__version__, "source": source_digest()[:12]}
    code |= {section: digest[:12] for section, digest in own_code.items()}
    settings = {k: str(v) for k, v in flatten(recipe).items() if not k.startswith("run.")}
    resumed = "none" if checkpoint is None else f"step {checkpoint.step}, {checkpoint.digest[:12]}"
    nodes = {}
    if parse_hierarchical(recipe.exchange.algorithm) is not None:
        nodes["the number of ranks on its host"] = str(world.local_world_size)
    return {
        **nodes,
        "the code": ", ".join(f"{what} {which}" for what, which in code.items()),
        "the file of the first weights": weights_sha256,
        **settings,
        "the kind of device": world.device.type,
        "the training data": describe_training(recipe, data, "training" not in unlike),
        "the validation data": "none"
        if data.validation is None
        else describe(data.validation, "validation" not in unlike),
        "the test data": describe(data.test, "test" not in unlike),
        "the model": json.dumps(_outline(model)),
        "the checkpoint": resumed,
    }


def _outline(model: nn.Module) -> dict[str, str]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named}


def describe(dataset: Dataset, is_repeatable: bool = True) -> str:
    """Describe a data set by its size and a digest of three samples, to tell data sets apart."""
    if is_images(dataset):
        shape = "x".join(map(str, dataset.sample_CHW))
        text = f"{len(dataset)} images of {shape}, {dataset.num_classes} classes"
    else:
        text = f"{len(dataset)} samples of {layout_of(dataset)}"
    if transform := getattr(dataset, "transform_words", ""):
        text += f", {transform}"
    if not is_repeatable:
        return f"{text}, others each time"
    last = len(dataset) - 1
    batch = dataset.batch(torch.tensor([0, last // 2, last]))
    if is_images(dataset):
        samples = digest(zip(("images", "labels"), batch, strict=True))
    else:
        samples = digest(named_leaves(batch))
    return f"{text}, {samples[:12]}"


def describe_training(recipe: Recipe, data: Data, is_repeatable: bool = True) -> str:
    """Describe the training set, with its shards or weights if they decide the order."""
    counts = shard_counts(data.train, recipe.data)
    shards = f", shards {hashlib.sha256(repr(counts).encode()).hexdigest()[:12]}" if counts else ""
    drawing = weighted_draws(data.train, recipe.data.balance)
    drawn = "" if drawing is None else f", weights {digest([('sums', drawing.sums_N)])[:12]}"
    return describe(data.train, is_repeatable) + shards + drawn


def find_unrepeatable(world: World, data: Data) -> tuple[list[str], list[str]]:
    """Return the parts whose samples differed when a rank read them twice, and doubts.

    A doubt is about attributes that change at each read, as counters do. A cache changes only once.
    """
    unlike, carried = list[str](), dict[str, list[str]]()
    for name, part in data.parts.items():
        begun = attributes_of_data(part)
        if not is_repeatable(part):
            unlike.append(name)
        elif (after := attributes_of_data(part)) != begun:
            is_repeatable(part)
            carried[name] = carried_over(begun, after, attributes_of_data(part))
    stated = gather_json(world, {"unlike": unlike, "carried": carried})
    doubts = [
        f"the {name} set carries over {some_of(paths)} from sample to sample: no checkpoint and no "
        "other worker has it; samples must depend on their number, and on "
        "firecaffe.data.current_key()"
        for name in data.parts
        if (paths := next(filter(None, (row["carried"].get(name) for row in stated)), None))
    ]
    return [name for name in data.parts if any(name in row["unlike"] for row in stated)], doubts


def doubt_of_data(part: str) -> str:
    return (
        f"the {part} set draws random numbers: asked twice for the same samples, it gave others; "
        "batch(indices) must depend on the indices alone"
    )


def doubt_of_weights(ranks: Sequence[int]) -> list[str]:
    if not ranks:
        return []
    listed = ", ".join(map(str, ranks))
    return [f"rank {listed} made other initial weights from the same seed; rank 0's were taken"]


def doubts_of(run: Run, world: World, probe: Probe, checkpoint: Checkpoint | None) -> list[str]:
    """Return reasons why other numbers of workers, or other machines, may get other bits."""
    doubts = list(checkpoint.doubts) if checkpoint is not None else []
    route = run.route
    if not route.is_invariant:
        adds = f"exchange.algorithm {route.algorithm} does not add"
        if route.way == HOOK:
            adds = f"communication hook {route.hook} need not add"
        doubts.append(
            f"{adds} in the order of the micro-batch tree at {world.world_size} workers and "
            f"{run.recipe.leaves}"
        )
    if probe.deviating_ranks:
        ranks = ", ".join(map(str, probe.deviating_ranks))
        doubts.append(f"rank {ranks} computes other bits than most ranks on the same micro-batch")
    if checkpoint is not None and checkpoint.probe != probe.digest:
        doubts.append("this machine computes other bits than the one that wrote the checkpoint")
    if checkpoint is not None:
        doubts += doubts_of_versions(checkpoint)
    if world.device.type == "cuda" and not run.recipe.train.deterministic:
        doubts.append("train.deterministic is false; kernels may give other bits in each run")
    return doubts


def doubts_of_versions(checkpoint: Checkpoint) -> list[str]:
    # The probe compares only one micro-batch, whose bits may be the same with other versions.
    run = None if checkpoint.folder is None else checkpoint.folder.resolve().parent.parent
    if run is None or not (run / ENVIRONMENT).is_file():
        return []
    try:
        before = read_run_file(run, ENVIRONMENT)
    except RunError as error:
        return [f"what the checkpoint was written with is not known: {error}"]
    now = {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}
    return [
        f"the checkpoint of step {checkpoint.step} was written with {word} {before[word]}, and the "
        f"run goes on with {word} {value}: bits may differ from there on"
        for word, value in now.items()
        if word in before and before[word] != value
    ]
