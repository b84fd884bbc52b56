"""Plug-ins: user code around what a training reads and what it writes.

    FIRECAFFE_PLUGINS=package.module,… firecaffe train RECIPE.toml

names modules that Python can import, also from the current folder. Each has a function `plugin()`
that returns a `Plugin`. The launcher calls it before any rank is started, and so does each rank.
`firecaffe.train(…, plugins=[…])` takes the objects themselves.
"""

import os
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from firecaffe.cluster.world import World
from firecaffe.data.batches import TrainBatches
from firecaffe.errors import FirecaffeError, OwnCodeError, RecipeError
from firecaffe.training.saver import Write
from firecaffe.user_code import failing_as, search_cwd, shown

VARIABLE = "FIRECAFFE_PLUGINS"


class Plugin:
    """Hooks around a training. An error from one ends the training with one line that names it."""

    def check(self, world_size: int) -> None:
        """Refuse a training before its ranks are started, and on each rank before it begins."""

    def around_batches(self, batches: TrainBatches, world: World) -> TrainBatches:
        """Return the source of this rank's micro-batches that replaces `batches`."""
        return batches

    def around_write(self, write: Write, world: World) -> Write:
        """Return the function that replaces `write`, which writes a checkpoint."""
        return write


def load_plugins() -> tuple[Plugin, ...]:
    """Load the plug-ins that FIRECAFFE_PLUGINS names. Raises: RecipeError if one is invalid."""
    names = os.environ.get(VARIABLE, "").split(",")
    return tuple(_load(name.strip()) for name in names if name.strip())


def _load(name: str) -> Plugin:
    search_cwd()
    try:
        made = import_module(name).plugin()
    except FirecaffeError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise RecipeError(
            f"{VARIABLE}: {name} cannot be loaded ({why}); each name is a module that Python finds "
            "(see PYTHONPATH), with a function plugin()"
        ) from error
    if not isinstance(made, Plugin):
        raise RecipeError(
            f"{VARIABLE}: {name}.plugin() gave {made!r}; expected a "
            f"{Plugin.__module__}.{Plugin.__name__}"
        )
    return made


def check_plugin_list(plugins: Any) -> None:
    """Check the argument `plugins` of `firecaffe.train`. Raises: RecipeError."""
    if not isinstance(plugins, list | tuple):
        raise RecipeError(
            f"plugins is {shown(plugins)}; expected a list of firecaffe.Plugin objects, as [Mine()]"
        )
    for plugin in plugins:
        if not isinstance(plugin, Plugin):
            raise RecipeError(
                f"plugins has {shown(plugin)}; expected objects of a class of yours that derives "
                "from firecaffe.Plugin, as [Mine()]"
            )


def plugin_names(plugins: Iterable[Plugin]) -> list[str]:
    return [_name(plugin) for plugin in plugins]


def _name(plugin: Plugin) -> str:
    return f"{type(plugin).__module__}.{type(plugin).__qualname__}"


def check_with(plugins: Iterable[Plugin], world_size: int) -> None:
    for plugin in plugins:
        _call(plugin, "check", world_size)


def around_batches(plugins: Iterable[Plugin], batches: TrainBatches, world: World) -> TrainBatches:
    for plugin in plugins:
        batches = _returned(plugin, "around_batches", batches, world)
    return batches


def around_write(plugins: Iterable[Plugin], write: Write, world: World) -> Write:
    for plugin in plugins:
        write = _returned(plugin, "around_write", write, world)
    return write


def _returned(plugin: Plugin, hook: str, *arguments: Any) -> Any:
    value = _call(plugin, hook, *arguments)
    if value is None:
        raise OwnCodeError(f"plugin {_name(plugin)}: {hook} returned None; a return is missing")
    return value


def _call(plugin: Plugin, hook: str, *arguments: Any) -> Any:
    with failing_as(f"plugin {_name(plugin)}: {hook}"):
        return getattr(plugin, hook)(*arguments)
