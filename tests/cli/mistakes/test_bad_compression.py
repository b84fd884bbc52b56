"""Mistakes in [prune] and [share], with two workers: one line, before any is started."""

from pathlib import Path

import pytest

from tests.cli.mistakes import split_nets
from tests.cli.mistakes.line import error_of

CASES = [
    ('[prune]\nkeep = { "heads" = 0.1 }', "prune.keep has 'heads', which no layer with weights"),
    ('[prune]\nkeep = { "body" = 0.1 }', "prune.keep has 'body', which is no layer but has some"),
    ('[prune]\nkeep = { "head" = 0.0 }', "prune.keep 'head' is 0.0; it must be above 0 and at mo"),
    ('[prune]\nkeep = { "head" = "few" }', "prune.keep"),
    ('[prune]\nthreshold = { "head" = -1.0 }', "prune.threshold 'head' is -1.0; it must be above"),
    (
        '[prune]\nkeep = { "*" = 0.1 }\nthreshold = { "head" = 1.0 }',
        "prune.keep and prune.threshold both match head; leave it out of one of them",
    ),
    ('[prune]\nkeep = { "*" = 0.1 }\nhow = "all"', "prune.how"),
    ('[prune]\nkeep = { "*" = 0.1 }\nhow = "gradual"', "prune.how = gradual with no prune.steps"),
    ('[share]\nbits = { "head" = 17 }', "share.bits 'head' is 17; it must be 1 to 16"),
    ('[share]\nbits = { "head" = 2.5 }', "share.bits"),
    ('[share]\nbits = { "head" = 4 }\nstart = "best"', "share.start"),
    (
        '[share]\nbits = { "*" = 4 }\n[synchrony]\nmode = "asynchronous"\nlock = "none"',
        "share.bits with synchrony.lock = none: ",
    ),
    (
        '[share]\nbits = { "*" = 4 }\n[model]\nfreeze = ["head.*"]',
        "share.bits matches head, which is frozen and not trained; leave it out of the ",
    ),
]


@pytest.mark.parametrize(("words", "line"), CASES)
def test_one_line(recipe: Path, words: str, line: str) -> None:
    recipe.write_text(f"{recipe.read_text()}\n{words}\n")
    options = ["--nproc-per-node", "2", "--model.name", f"{split_nets.PLACE}:Net"]
    code, said = error_of(["train", str(recipe), *options])
    assert code == 2
    assert said.startswith(f"firecaffe: {line}")
