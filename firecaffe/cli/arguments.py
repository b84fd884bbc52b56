"""Arguments and options of a command: reading a line, parsing values, errors in one line.

Options may stand before or after the arguments, as in torchrun, with dashes or underscores. They
cannot be abbreviated: a later option with the same start would change what `--nproc 2` means.
"""

import json
import os
import re
import sys
import tomllib
from argparse import Action, HelpFormatter
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from firecaffe.api.answer import Answer, make_console
from firecaffe.cluster.handover import LAUNCHED
from firecaffe.errors import RecipeError
from firecaffe.files import MAX_BYTES, read_bytes
from firecaffe.output import harmless
from firecaffe.value_checks import KINDS, did_you_mean

NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")


@dataclass(frozen=True)
class CommandLine:
    positionals: list[str]
    options: list[str]
    words: list[str]
    """Dotted names of the recipe fields among the options."""


def read_line(
    command: str, argv: list[str], options: Mapping[str, Action], words: Collection[str]
) -> CommandLine:
    """Split a command line into arguments and options.

    `options` maps every spelling to its option. `words` are a recipe's dotted fields, none if the
    command takes no recipe. Raises RecipeError for an unknown option, with the likely one, and for
    an empty value of an option of the command itself.
    """
    line = CommandLine([], [], [])
    left = deque(argv)
    while left:
        token = left.popleft()
        if not _is_option(token):
            line.positionals.append(token)
            continue
        name, has_value, value = _split(token)
        action = options.get(name)
        if action is None:
            line.words.append(_word_of(command, name, options, words))
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
    # Otherwise an unset shell variable would silently change what the command does.
    for name, equals, value in (option.partition("=") for option in line.options):
        if equals and not value and name in options:
            raise RecipeError(f"{name} is empty; give it a value, or leave it out")
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
    field = f"{section}.{word.split('.')[0].rstrip('+')}" if dot else section
    if field in words or field in {known.split(".")[0] for known in words}:
        return field
    if dot and words:
        raise RecipeError(
            f"{field}: there is no such word in a recipe{suggest_setting(field, words)}"
        )
    shown = [option for option in options if option.startswith("--")]
    shown += [f"--{known}" for known in words]
    raise RecipeError(f"{command} has no option {name}{suggest_setting(name, shown)}")


ACCUMULATION = (
    *("accumulate_grad_batches", "gradient_accumulation_steps"),
    *("accumulation_steps", "iter_size"),
)
"""Names for accumulation over micro-batches in Lightning, Hugging Face, Caffe and others."""


FOREIGN_NAMES = {
    "batch_size": "train.global_batch_size",
    "learning_rate": "solver.base_lr",
    "lr": "solver.base_lr",
    "max_epochs": "train.epochs",
    "max_steps": "train.steps",
    "num_epochs": "train.epochs",
    "optimizer": "solver.type",
}
"""Names of settings in PyTorch, Lightning and others, with ours."""


def suggest_setting(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?`, longer forms of `name` first, or nothing if none is close."""
    known = list(known)
    ours = FOREIGN_NAMES.get(_last_part(name))
    if meant := [full for full in known if full.removeprefix("--") == ours]:
        return f"; did you mean {meant[0]}?"
    if _last_part(name) in ACCUMULATION:
        return (
            "; gradients are accumulated over train.global_batch_size / train.micro_batch_size "
            "micro-batches"
        )
    longer = [full for full in known if full.startswith(name)]
    alike = [full for full in known if _last_part(full) == _last_part(name)]
    if likely := (longer or alike)[:3]:
        return f"; did you mean {' or '.join(likely)}?"
    return did_you_mean(name, known)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_")


NOT_ARGUMENTS = ("help", "json", "recipe")
"""Options that are no arguments of the command's function: about output, and the recipe's file."""


class Parser(ArgumentParser):
    """The options of a command. Its errors are RecipeErrors."""

    def __init__(
        self,
        command: str,
        usage: str,
        description: str,
        takes_recipe: bool = False,
        instead: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """`instead`: recipe fields without effect, with the reason. `notes`: paragraphs of help."""
        self.own: list[Action] = []
        """The command's options and arguments, without the recipe's fields."""
        super().__init__(
            prog=f"firecaffe {command}",
            usage=f"firecaffe {command} {usage}",
            description=description,
            formatter_class=HelpFormatter,
            parser_mode="toml",
            print_config=None,
            default_env=False,
            allow_abbrev=False,
            add_help=False,
        )
        self.command = command
        self.takes_recipe = takes_recipe
        self.instead = dict(instead or {})
        self.notes = tuple(notes)
        self._has_recipe = False
        self.add("--help", help="show this help message and exit", short="-h", action="help")

    def add(
        self,
        name: str,
        metavar: str | None = None,
        help: str | None = None,
        *,
        short: str = "",
        group: Any = None,
        **words: Any,
    ) -> None:
        """Add an argument, or an option whose help shows an informative default.

        `words` are those of argparse's `add_argument`. An option without a type has the type of its
        default; without a default it is a string.
        """
        if name.startswith("-") and not {"action", "choices", "nargs", "type"} & words.keys():
            words["type"] = type(words.setdefault("default", ""))
        default = words.get("default")
        if not isinstance(default, bool) and default not in (None, "", []):
            help = f"{help} (default: {default})"
        if metavar is not None:
            words["metavar"] = metavar
        names = [short, name] if short else [name]
        self.own.append((group or self).add_argument(*names, help=help, **words))

    def flag(self, name: str, help: str) -> None:
        self.add(name, help=help, action="store_true")

    def add_group(self, title: str) -> Callable[..., None]:
        return partial(self.add, group=self.add_argument_group(title))

    def add_recipe(self) -> None:
        """Add --recipe, for a recipe's file, and an option for each of its fields."""
        from firecaffe.recipe.sections import Recipe

        self.add("--recipe", action="config")
        self.add_class_arguments(Recipe)
        self._has_recipe = True

    def read(self, argv: list[str]) -> CommandLine:
        options = {name: action for action in self.own for name in action.option_strings}
        words = _recipe_fields() if self.takes_recipe else ()
        return read_line(f"firecaffe {self.command}", argv, options, words)

    def add_network(self, title: str) -> Callable[..., None]:
        """Add options for a network without a recipe, in a group; return what adds to the group."""
        add = self.add_group(title)
        add("--model", "NAME", NETWORK)
        add_network_options(add)
        return add

    def add_port(self) -> None:
        self.add("--master-port", "PORT", "port at which ranks meet; 0: any free one", default=0)

    def add_best(self) -> None:
        self.flag("--best", "the best checkpoint, not the newest")

    def add_trust(self) -> None:
        self.flag("--trust-code", "run the code that a run or .fcz file names")

    def add_overwrite(self) -> None:
        self.flag("--overwrite", "replace the output file if it exists")

    def parse_args(self, args: Sequence[str], **more: Any) -> Namespace:  # type: ignore[override]
        line = self.read(list(args))
        if line.words and not self._has_recipe:
            raise RecipeError(f"--{line.words[0]} is a setting of a recipe, and no recipe is given")
        defaults = _recipe_fields() if self.takes_recipe else {}
        lists = {f"--{word}" for word, value in defaults.items() if isinstance(value, list)}
        typed = [*line.positionals, *line.options]
        return super().parse_args([_toml_as_json(argument, lists) for argument in typed], **more)

    def only(self, what: str, typed: Sequence[str], hint: str = "") -> str:
        if len(typed) != 1:
            given = " and ".join(typed) or "none"
            line = f"{self.command} takes one {what}, found {given}{hint}"
            raise RecipeError(f"{line}; usage: {self.usage}")
        return typed[0]

    def arguments(self, options: Namespace) -> dict[str, Any]:
        """Return the values of the command's own options: the arguments of its function."""
        return {own.dest: options[own.dest] for own in self.own if own.dest not in NOT_ARGUMENTS}

    def parse_path(self, path: Any, **more: Any) -> Namespace:
        """Parse a recipe's file, in which a path may not be UTF-8."""
        content = read_bytes(str(path), MAX_BYTES).decode(errors="surrogateescape")
        recipe: Namespace = self.parse_string(content, path=str(path), **more)
        return recipe

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        named = {own.dest: own.option_strings or [own.dest.upper()] for own in self.own}
        raise RecipeError(one_line(message, named)) from ex


NETWORK = (
    "a network by name, as resnet50 (docs/reference/networks.md), or your own function: "
    "package.module:function, path/file.py:function"
)


def add_network_options(add: Callable[..., None]) -> None:
    add(
        "--args",
        "TABLE",
        "arguments of your own function, as '{width = 32}'",
        type=dict[str, Any],
        default={},
    )
    add("--input", "CxHxW", "shape of a sample, as 3x224x224; else the network's own")


def _recipe_fields() -> dict[str, Any]:
    from firecaffe.recipe.sections import Recipe, flatten

    return flatten(Recipe())


BARE = re.compile(r"\[\s*([^\s\[\]{}\"',=]+(?:\s*,\s*[^\s\[\]{}\"',=]+)*)\s*\]")
"""A list of names without quotes, which a shell may have removed."""


def _toml_as_json(argument: str, lists: Collection[str]) -> str:
    """Convert a TOML table or list to JSON: `[features.6]` alone would be the head of a table."""
    option, _, value = argument.partition("=")
    is_list = option in lists and value.startswith("[")
    if not value.startswith("{") and not is_list:
        return argument
    try:
        return f"{option}={json.dumps(tomllib.loads(f'value = {value}')['value'])}"
    except (ValueError, TypeError):  # already JSON, or neither
        bare = BARE.fullmatch(value) if is_list else None
        names = re.split(r"\s*,\s*", bare[1]) if bare else []
        return f"{option}={json.dumps(names)}" if bare else argument


def one_line(message: str, named: Mapping[str, Sequence[str]]) -> str:
    """Shorten a message of jsonargparse; `named` maps option names to their spellings."""
    line = re.sub(r"<class '(\w+)'>", r"\1", " ".join(message.split()))
    if wrong := re.match(r'Parser key "([\w.]+)": (.*)', line):
        line = f"{wrong[1]}: {wrong[2]}"
    if section := re.match(r"(\w+): Unable to load config '(.*?)'", line):
        return f"{section[1]} is {section[2]!r}; it is a section: --{section[1]}.WORD VALUE"
    if choice := re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", line):
        known = [name.strip(" '") for name in choice[3].split(",")]
        meant = did_you_mean(choice[2], known)
        return f"{choice[1]} is {choice[2]!r}; it must be one of {', '.join(known)}{meant}"
    if value := re.match(r"([\w.]+): Expected a (.*?)\. Got value: (.*)", line):
        word = max(named.get(value[1], [value[1]]), key=len)
        kind = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", value[2])
        return f"{word} is {value[3]}; it must be {KINDS.get(value[2], kind)}"
    if unknown := re.match(r"Group '([\w.]+)' does not accept option '([\w.]+)'", line):
        field = f"{unknown[1]}.{unknown[2]}"
        line = (
            f"{field}: there is no such word in a recipe{suggest_setting(field, _recipe_fields())}"
        )
    return line


OF_OUR_LAUNCHER = (
    *("--nnodes", "--rdzv-endpoint", "--rdzv-id", "--secret-file"),
    *("--master-port", "--max-restarts"),
)


def check_launched(parser: Parser, argv: list[str], nproc_per_node: int | None) -> None:
    """Raise RecipeError if an option would start ranks that another launcher has started.

    `nproc_per_node` is the parsed value. Ranks of our own launcher have the typed command line and
    are not checked.
    """
    if LAUNCHED in os.environ:
        return
    typed = {option.partition("=")[0] for option in parser.read(argv).options}
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wrong = [f"{name} has no effect" for name in OF_OUR_LAUNCHER if name in typed]
    if "--nproc-per-node" in typed and nproc_per_node != local:
        wrong.insert(0, f"--nproc-per-node is {nproc_per_node}")
    if wrong:
        raise RecipeError(
            f"{wrong[0]}, but a launcher (torchrun, mpirun, srun) has started this process as rank "
            f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}; leave the option out"
        )


def show(answer: Answer, as_json: bool = False) -> None:
    """Print an answer as text or as JSON, and its warnings to stderr."""
    for note in answer.notes:
        print(harmless(f"warning: {note}"), file=sys.stderr)
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2, allow_nan=False))
    else:
        console = make_console()
        is_terminal = console.is_terminal
        console.width = max(console.width, answer.least_width) if is_terminal else answer.width
        answer.print_to(console)
