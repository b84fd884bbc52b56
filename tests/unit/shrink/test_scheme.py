"""Schemes: what a file of one's own may say, and the recipes of the rounds."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from firecaffe.compression import PruneConfig
from firecaffe.errors import RecipeError
from firecaffe.recipe.sections import Recipe
from firecaffe.shrink.layer_sizes import LayerChoice
from firecaffe.shrink.pruning_rounds import rounds_of
from firecaffe.shrink.scheme import FOLDER, find_scheme, scheme_of
from tests.kit.training import recipe_with

KNOWN = sorted(path.stem for path in FOLDER.glob("*.toml"))


@pytest.mark.parametrize("name", KNOWN)
def test_each_prunes_and_shares_and_says_what_it_is(name: str) -> None:
    assert {"best", "deep_compression"} <= set(KNOWN)  # those of the help
    scheme = find_scheme(name)
    assert scheme.about
    words = [section for each in scheme.rounds for section in each.sections]
    assert words.index("prune") < words.index("share")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[rounds]]\nlength = 0.5\n[rounds.prune]\nkeep = { "ip*" = 0.2 }\n')
    scheme = find_scheme(str(path))
    (only,) = scheme.rounds
    assert (scheme.name, only.name, only.length, only.rate) == ("mine", "round", 0.5, 1.0)
    assert only.sections == {"prune": {"keep": {"ip*": 0.2}}}
    assert (scheme.code, scheme.biases, scheme.normalization) == ("best", 32, "keep")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rounds"),
        ("rounds = 3", "has no rounds"),
        ("cod = 'huffman'", "no word cod; .* did you mean code"),
        ("code = 'zip'", "code is 'zip', expected one of best, huffman, range"),
        ("biases = 8", "biases is 8, expected one of 32, 16"),
        ("normalization = 'drop'", "normalization is 'drop', expected one of keep, fold"),
        ("[low_rank]\nrank = {a = 3}\nenergy = {b = 0.9}", "low_rank has rank and energy"),
        ("[low_rank]\nranks = {a = 3}", "no word low_rank.ranks; .* did you mean rank"),
        ("[low_rank]\nrank = {a = 0.5}", "low_rank.rank 'a' is 0.5; it must be a whole number"),
        ("[low_rank]\nenergy = {a = 1}", "low_rank.energy 'a' is 1; it must be above 0 and below"),
        ("[low_rank]\nrank = 3", "low_rank.rank is 3; expected a section"),
        ("[[rounds]]\nlenght = 1", "no word rounds 1.lenght; .* did you mean length"),
        ("[[rounds]]\nlength = 0", "rounds 1.length is 0; it must be above 0"),
        ("[[rounds]]\nrate = true", "rounds 1.rate is True"),
        ("[[rounds]]\nprune_over = 2", "prune_over is 2; it must be above 0 and at most 1"),
        ("[[rounds]]\nname = 'a/b'", "name is 'a/b'; expected letters and digits"),
        ("[[rounds]]\n[rounds.prune]\nkeeps = 1", "no word rounds 1.prune.keeps"),
        ("[[rounds]]\n[rounds.data]\nname = 'x'", "no word rounds 1.data"),
        ("[[rounds]]\nshare = 5", "rounds 1.share is 5; expected a section"),
    ],
)
def test_what_cannot_be_is_one_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"scheme x: .*{message}"):
        scheme_of("x", tomllib.loads(text), "scheme x")


def test_a_scheme_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"there are best, deep.* did you mean best"):
        find_scheme("bets")
    with pytest.raises(RecipeError, match="No such file"):
        find_scheme(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[[")
    with pytest.raises(RecipeError, match="is no TOML"):
        find_scheme(str(tmp_path / "bad.toml"))


RUN = recipe_with(
    "model.name=lenet model.weights=runs/trained train.epochs=3 train.stop_after=2 "
    "solver.base_lr=0.1 solver.lr_policy=multistep solver.gamma=0.1 solver.stepvalue=[500] "
    "solver.weight_decay=0.01"
)
TWICE = """
[[rounds]]
name = "half"
length = 0.5
rate = 0.1
prune_over = 0.25
[rounds.prune]
how = "gradual"
keep = { "*" = 0.3 }
[[rounds]]
name = "rest"
[rounds.prune]
threshold = { "ip*" = 0.8 }
[rounds.solver]
lr_policy = "fixed"
momentum = 0.5
[[rounds]]
name = "share"
[rounds.train]
epochs = 2
[rounds.share]
bits = { "*" = 4 }
[[rounds]]
name = "last"
"""


def recipes(text: str = TWICE, run: Recipe = RUN, **words: Any) -> list[Recipe]:
    """Those of the rounds, of a run of 1,000 steps."""
    scheme = scheme_of("x", tomllib.loads(text), "scheme x")
    return [trial.recipe for trial in rounds_of(run, scheme, 1000, Path("out"), **words)]


def test_each_begins_with_the_weights_of_the_one_before() -> None:
    weights = [recipe.model.weights for recipe in recipes()]
    assert weights == ["runs/trained", "out/1-half", "out/2-rest", "out/3-share"]


def test_length_and_rate_are_shares_of_the_runs_and_fall_by_a_cosine() -> None:
    first, second, third, _ = recipes()
    assert (first.train.steps, first.train.epochs, first.train.stop_after) == (500, 0, 0)
    assert first.prune.steps == 125
    assert (third.train.steps, third.train.epochs) == (0, 2)
    assert first.solver.base_lr == pytest.approx(0.01)
    assert (first.solver.lr_policy, first.solver.stepvalue) == ("cosine", [])
    assert (first.solver.gamma, first.solver.weight_decay, first.solver.momentum) == (0, 0.01, 0.9)
    assert (second.train.steps, second.solver.base_lr) == (1000, 0.1)
    assert (second.solver.lr_policy, second.solver.momentum) == ("fixed", 0.5)


def test_what_is_zero_stays_zero_and_what_is_shared_stays_shared() -> None:
    _, _, third, fourth = recipes()
    assert third.prune == PruneConfig(keep={"ip*": 1.0})
    assert (fourth.prune, fourth.share) == (third.prune, third.share)
    assert fourth.share.bits == {"*": 4}


def test_a_run_that_was_pruned_itself_stays_so() -> None:
    pruned = PruneConfig(keep={"ip1": 0.1}, how="gradual", steps=700)
    run = Recipe(model=RUN.model, prune=pruned)
    (only,) = recipes("[[rounds]]\n[rounds.share]\nbits = {ip1 = 5}", run)
    assert only.prune == PruneConfig(keep={"ip1": 1.0})


def test_a_choice_takes_the_place_of_patterns_round_by_round() -> None:
    """Both rounds that prune keep the same part of what there was."""
    choice = {"conv1": LayerChoice(0.64, 6), "ip1": LayerChoice(0.01, 3)}
    first, second, third, _ = recipes(choice=choice)
    assert first.prune.keep == pytest.approx({"conv1": 0.8, "ip1": 0.1})
    assert second.prune.keep == pytest.approx({"conv1": 0.64, "ip1": 0.01})
    assert second.prune.threshold == {}
    assert third.share.bits == {"conv1": 6, "ip1": 3}


def test_a_share_of_steps_that_nobody_knows() -> None:
    text = '[[rounds]]\nprune_over = 0.5\n[rounds.prune]\nkeep = {"*" = 0.5}\n'
    with pytest.raises(RecipeError, match="round 'round': prune_over is a share"):
        recipes(f"{text}[rounds.train]\nepochs = 1\n")
