"""Help and the version: what they show, and that they load nothing that trains."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import firecaffe
from firecaffe.cli import COMMANDS
from firecaffe.recipe.sections import Recipe, flatten
from tests.typed import refused, said_by

ASKED = [
    ["--help"],
    ["--version"],
    *([command, "--help"] for command in COMMANDS),
    *(["bench", part, "--help"] for part in ("exchange", "step", "data")),
    *(["help", "train", section] for section in Recipe.__dataclass_fields__),
]


def test_help_loads_no_torch() -> None:
    """All in one process: what one of them loads is seen after it."""
    program = (
        "import json, sys\n"
        "from firecaffe.cli import main\n"
        "for argv in json.loads(sys.argv[1]):\n"
        "    assert main(argv) == 0, argv\n"
        "    assert not {'torch', 'numpy', 'scipy', 'optuna'} & set(sys.modules), argv\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(ASKED)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_everyday_options_come_first_and_sections_on_request() -> None:
    text = said_by("train", "--help")
    assert text.index("--nproc-per-node N") < text.index("--master-port")
    assert not [word for word in flatten(Recipe()) if f"--{word} " in text and word != "train.seed"]
    assert "Path to a configuration file" not in text
    assert text == said_by("help", "train") == said_by("train", "x.toml", "-h")


def test_a_word_shows_what_it_cannot_stand_together_with() -> None:
    text = " ".join(said_by("help", "train", "exchange").split())
    of_word = text.split("--exchange.update_at")[1].split("--exchange.shared_memory")[0]
    assert "= shards: not with synchrony.mode other than every_step: " in of_word


@pytest.mark.parametrize("section", Recipe.__dataclass_fields__)
def test_a_section_shows_all_its_words(section: str) -> None:
    text = said_by("help", "train", section)
    own = [word for word in flatten(Recipe()) if word.startswith(f"{section}.")]
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  --")] == [
        f"--{word}" for word in own
    ]


def test_a_section_needs_no_command() -> None:
    assert said_by("help", "synchrony") == said_by("help", "train", "synchrony")
    assert said_by("help", "data").startswith("usage: firecaffe data")


def test_the_version() -> None:
    assert said_by("--version") == f"firecaffe {version('firecaffe')}\n"
    assert firecaffe.__version__ == version("firecaffe")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["help", "trian"], ["'trian'", "mean train?"]),
        (["synchrony"], ["'synchrony'"]),
        (["help", "train", "dta"], ["'dta'", "mean data?"]),
        (["help", "compare", "data"], ["compare takes no recipe"]),
    ],
)
def test_help_that_is_not_there(argv: list[str], parts: list[str]) -> None:
    (line,) = refused(2, *argv).splitlines()
    assert all(part in line for part in parts)
