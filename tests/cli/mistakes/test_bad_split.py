"""Mistakes in [parallel], with two workers: one line with the layer's name and what would do."""

from pathlib import Path

import pytest

from tests.cli.mistakes import split_nets
from tests.cli.mistakes.line import error_of


def split(pattern: str, word: str, parts: int = 2) -> str:
    return f'model = 2\nparts = {parts}\nsplit = {{ "{pattern}" = "{word}" }}'


TRICK = 'scheme = "one_weird_trick"\n'

LAYERS = [
    ("Net", split("classifier.*", "neurons"), "'classifier.*' matches no layer that can be split"),
    ("Net", split("boddy.*", "neurons"), "'boddy.*' matches no layer that can be split by neurons"),
    ("Net", split("body", "neurons"), "body is no layer but has some; say 'body.*'"),
    ("Net", split("head", "neuron"), "'head' is to be split by 'neuron'; known are neurons, inpu"),
    (
        "Net",
        split("conv", "neurons"),
        "conv is a Conv2d, which cannot be split by neurons; it can ",
    ),
    (
        "Odd",
        split("o*", "neurons"),
        "odd is a Bilinear, which cannot be split by neurons; leave it",
    ),
    ("Net", split("body", "paths"), "body cannot be split by paths: its forward does not return "),
    ("Hooked", split("head", "neurons"), "head has hooks, which would be lost"),
    (
        "Tied",
        split("tied", "neurons"),
        "tied shares a parameter with body.2; leave it out of split",
    ),
    ("Net", split("body.*", "neurons", 10), "body.0 has 8 neurons, fewer than 10 parts; leave it "),
    ("Net", split("conv", "channels"), "conv has 1 channel, fewer than 2 parts; leave it out of "),
    ("Net", split("conv", "rows", 26), "conv makes 24 rows of 28, fewer than 26 parts; leave it "),
]

STAGES = [
    ("Net", ["heads"], "'heads' is no module of the network, as head"),
    ("Net", ["conv"], "the first stage would be empty; leave out conv, or let the next"),
    ("Twice", ["body.2"], "body.2 is called more than once; a stage begins with a module that is"),
    ("Tied", ["tied"], "body.2.weight and tied.weight are one tensor, used in two stages; let no"),
    ("Branching", ["head"], "what Branching calls cannot be followed ("),
    ("Hooked", ["body.2"], "body has hooks, which would be lost; remove them, or let no stage"),
]

SECTIONS = [
    ("Net", split("head", "neurons", 3), "parallel.parts is 3, which 2 workers cannot hold equal"),
    (
        "Net",
        f"data = 2\n{split('head', 'neurons')}",
        "2 workers with parallel.data 2 and parallel.",
    ),
    ("Net", 'stages = ["body", "head"]', "2 workers with 3 stages: there must be a multiple of 3"),
    ("Net", 'stages = ["body", "body"]', "parallel.stages has 'body' twice; a stage begins there"),
    ("Net", f"model = 2\nparts = 12\n{TRICK}", "parallel.scheme one_weird_trick: body.2 has 8 n"),
    ("Convolutions", f"model = 2\n{TRICK}", "parallel.scheme one_weird_trick: the network has no"),
    (
        "Net",
        TRICK + split("conv", "filters"),
        "parallel.split has conv by filters: one_weird_trick",
    ),
]

SPLIT_STAGES = [
    (
        "WithPaths",
        'parts = 2\nsplit = { conv = "paths" }\nstages = ["conv.two"]',
        "parallel.stages: conv.two is in conv, which is split; let the stage begin elsewhere",
    ),
    (
        "Net",
        f'{split("head", "neurons", 3)}\nstages = ["head"]',
        "parallel.parts is 3, which 2 workers cannot hold equally",
    ),
    (
        "Net",
        f'{split("head", "neurons")}\nstages = ["head"]',
        "2 workers with 2 stages of 2 workers: there must be a multiple of 4",
    ),
    (
        "Net",
        'parts = 2\nsplit = { hed = "neurons" }\nstages = ["head"]',
        "parallel.split: 'hed' matches no layer that can be split",
    ),
    ("Net", f'model = 2\n{TRICK}stages = ["head"]', "parallel.stages with parallel.scheme = one_"),
]

CASES = [
    *SECTIONS,
    *SPLIT_STAGES,
    *((net, words, f"parallel.split: {line}") for net, words, line in LAYERS),
    *((net, f"stages = {names}", f"parallel.stages: {line}") for net, names, line in STAGES),
]


@pytest.mark.parametrize(("net", "words", "line"), CASES)
def test_one_line(recipe: Path, net: str, words: str, line: str) -> None:
    recipe.write_text(f"{recipe.read_text()}\n[parallel]\n{words}\n")
    options = ["--nproc-per-node", "2", "--model.name", f"{split_nets.PLACE}:{net}"]
    code, said = error_of(["train", str(recipe), *options])
    assert code == 2
    assert said.startswith(f"firecaffe: {line}")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("data = 2", "2 ranks but only 1 micro-batch a step"),
        (
            'model = 2\nscheme = "one_weird_trick"',
            "parallel.scheme one_weird_trick with 1 micro-batch a step on 2 workers",
        ),
    ],
)
def test_a_batch_that_is_smaller_than_the_workers(recipe: Path, words: str, line: str) -> None:
    recipe.write_text(f"{recipe.read_text()}\n[parallel]\n{words}\n")
    small = ["--nproc-per-node", "2", "--train.global_batch_size", "2"]
    code, said = error_of(["train", str(recipe), *small])
    assert code == 2
    assert said.startswith(f"firecaffe: {line}")


def test_words_by_which_the_scheme_alone_says_it(recipe: Path) -> None:
    """The line names what the recipe has, parallel.scheme."""
    recipe.write_text(f"{recipe.read_text()}\n[parallel]\nmodel = 2\n{TRICK}")
    code, said = error_of(["train", str(recipe), "--train.compile", "true"])
    assert code == 2
    assert said.startswith("firecaffe: parallel.scheme = one_weird_trick with train.compile")
