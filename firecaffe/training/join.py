"""A worker that joins a running run, and computes for its server to the end.

It is no rank of a process group. It builds network and data from the same recipe as a rank does,
and exchanges weights and gradients over its own lanes.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from firecaffe.cluster.addresses import interface_of, own_addresses, split_place
from firecaffe.cluster.groups import GLOO_INTERFACE
from firecaffe.cluster.joining import Comes
from firecaffe.cluster.links import star_of
from firecaffe.cluster.pulse_process import pulse_beside
from firecaffe.cluster.watch import Watch
from firecaffe.cluster.watch_message import WatchedPlace
from firecaffe.cluster.world import World, join
from firecaffe.errors import AgreementError
from firecaffe.recipe.checked_recipe import CheckedRecipe
from firecaffe.recipe.run import Ranks, resolve
from firecaffe.recipe.sections import Recipe
from firecaffe.recipe.worker_numbers import check_takes_workers, layout_of
from firecaffe.training.data_workers import data_workers
from firecaffe.training.forward import arithmetic
from firecaffe.training.given_parts import Parts, open_parts
from firecaffe.training.learner import Learner, build_learner
from firecaffe.training.modes.served.served_mode import Served, facts_of
from firecaffe.training.parallel.mesh import make_mesh
from firecaffe.training.plugins import around_batches, load_plugins
from firecaffe.training.records import say
from firecaffe.training.result import Result
from firecaffe.training.shared_facts import describe_training
from firecaffe.training.start import tell_faults
from firecaffe.training.stop import StopRequest


def join_run(recipe: CheckedRecipe, place: str) -> Result:
    """Compute for the server of a run, and return the run's result. place: HOST:PORT, as printed.

    Raises: RecipeError; LaunchError if no run accepts workers there; AgreementError for another
    recipe or other data; PeerLostError if the server is gone; the error that the run ends with.
    """
    synchrony, exchange = recipe.synchrony, recipe.exchange
    check_takes_workers(synchrony)
    comes = Comes(place, exchange.timeout_s)
    # in_flight decides no bits, but rank 0 connects as many lanes as the run has.
    recipe = replace(recipe, synchrony=replace(synchrony, in_flight=comes.facts["in_flight"]))
    if sys.platform.startswith("linux"):
        address = own_addresses(split_place(place)[0])[0]
        os.environ.setdefault(GLOO_INTERFACE, interface_of(address))
    with ExitStack() as resources:
        alone = resources.enter_context(join(recipe.train.device))
        resources.enter_context(arithmetic(recipe.train, alone.device))
        parts, plugins = Parts(), load_plugins()
        data = open_parts(recipe, parts)
        run = resolve(recipe, data, Ranks(), described=describe_training(recipe, data))
        mesh = make_mesh(alone, layout_of(recipe.parallel, 1), resources)
        learners = comes.facts["learners"]
        learner = build_learner(run, parts, data, mesh, None, (), resources, learners)
        local_facts = facts_of(run, learner.probe.digest, learners)
        check_same(local_facts, comes.facts)
        resources.enter_context(data_workers(data))
        doubt = ""
        if local_facts["probe"] != comes.facts["probe"]:
            doubt = "computes other bits than rank 0, so that a replay may come to others"
        given = comes.enter({"doubt": doubt})
        where, sockets = WatchedPlace(), {0: given.socket}
        limits = exchange.silent_s, where, exchange.timeout_s, star_of
        watch = resources.enter_context(closing(Watch(given.rank, given.hosts, sockets, *limits)))
        resources.enter_context(pulse_beside(sockets.values(), exchange.silent_s))
        world = replace(
            alone, rank=given.rank, world_size=len(given.hosts), watch=watch, place=where
        )
        return _work(world, learner, plugins, recipe, given.store)


def _work(world: World, learner: Learner, plugins: Any, recipe: Recipe, store: Any) -> Result:
    served = learner.mode
    assert isinstance(served, Served)
    assert served.real is not None
    assert world.watch is not None
    say(f"rank {world.rank} computes for rank 0 on {world.watch.hosts[0]}")
    batches = around_batches(plugins, learner.batches, world)
    ranks = served.ranks(recipe, world, served.real, batches, {}, store)
    with tell_faults(world), StopRequest() as stop:
        return ranks.work(lambda: stop.reason)


def check_same(own: Mapping[str, Any], of_run: Mapping[str, Any]) -> None:
    """Raise AgreementError with the first setting that differs of those that decide bits."""
    here, there = own["deciding"], of_run["deciding"]
    for word in {**there, **here}:
        if here.get(word) != there.get(word):
            raise AgreementError(
                f"--join: {word} is {here.get(word)!s:.120} here and {there.get(word)!s:.120} in "
                "the run; a worker comes with the run's recipe and data"
            )
