"""A command line as it was typed, before its values are parsed.

Options may stand before or after the arguments, as in torchrun, with dashes or underscores. They
cannot be abbreviated: a later option with the same start would change what `--nproc 2` means.
"""

import re
from argparse import Action
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from firecaffe.cli.suggest import did_you_mean
from firecaffe.errors import RecipeError

NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")


@dataclass(frozen=True)
class TypedWords:
    positionals: list[str]
    options: list[str]
    words: list[str]
    """Dotted names of the recipe fields among the options."""

    @property
    def arguments(self) -> list[str]:
        return [*self.positionals, *self.options]


def read_line(
    command: str, argv: list[str], options: Mapping[str, Action], words: Collection[str]
) -> TypedWords:
    """Split a command line into arguments and options.

    `options` maps every spelling to its option. `words` are a recipe's dotted fields, none if the
    command takes no recipe. Raises RecipeError for an unknown option, with the likely one.
    """
    line = TypedWords([], [], [])
    left = deque(argv)
    while left:
        token = left.popleft()
        if not _is_option(token):
            line.positionals.append(token)
            continue
        name, has_value, value = _split(token)
        action = options.get(name)
        if action is None:
            word = _word_of(command, name, options, words)
            line.words.append(word)
        if has_value:
            line.options.append(f"{name}={value}" if name.startswith("--") else name + value)
        elif action is None or action.nargs is None:
            line.options.extend(_with_value(name, left))
        else:
            line.options.append(name)
            for _ in range(_most_values(action, len(left))):
                if _is_option(left[0]):
                    break
                line.options.append(left.popleft())
    return line


def _is_option(token: str) -> bool:
    return len(token) > 1 and token.startswith("-") and not NUMBER.match(token)


def _split(token: str) -> tuple[str, bool, str]:
    if not token.startswith("--"):  # -b 8, or -b8
        return token[:2], len(token) > 2, token[2:]
    name, equals, value = token.partition("=")
    return _spelled(name), bool(equals), value


def _spelled(name: str) -> str:
    """Spell an option with dashes, and a recipe's field with underscores."""
    section, dot, word = name[2:].partition(".")
    if not dot:
        return f"--{section.replace('_', '-')}"
    own, more, key = word.partition(".")  # the key of a table stays as it is
    return f"--{section}.{own.replace('-', '_')}{more}{key}"


def _with_value(name: str, left: deque[str]) -> list[str]:
    if not left or _is_option(left[0]):
        return [name]  # the parser reports the missing value
    return [f"{name}={left.popleft()}" if name.startswith("--") else name + left.popleft()]


def _most_values(action: Action, there: int) -> int:
    if action.nargs in ("+", "*"):
        return there
    return min(there, 1 if action.nargs == "?" else int(action.nargs or 0))


def _word_of(command: str, name: str, options: Mapping[str, Action], words: Collection[str]) -> str:
    """Return the recipe's field, or the section, that an option sets."""
    section, dot, word = name[2:].partition(".")
    found = f"{section}.{word.split('.')[0].rstrip('+')}" if dot else section
    if found in words or found in {each.split(".")[0] for each in words}:
        return found
    if dot and words:
        raise RecipeError(f"{found}: there is no such word in a recipe{did_you_mean(found, words)}")
    shown = [option for option in options if option.startswith("--")]
    shown += [f"--{each}" for each in words]
    raise RecipeError(f"{command} has no option {name}{did_you_mean(name, shown)}")
