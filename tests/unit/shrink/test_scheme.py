"""Schemes that come along, and what a file of one's own may say."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from firecaffe.errors import RecipeError
from firecaffe.shrink.scheme import FOLDER, find_scheme, scheme_of

KNOWN = sorted(path.stem for path in FOLDER.glob("*.toml"))


def test_those_of_the_help_come_along() -> None:
    assert {"best", "deep_compression"} <= set(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_each_prunes_and_shares_and_says_what_it_is(name: str) -> None:
    scheme = find_scheme(name)
    assert scheme.about
    words = [section for each in scheme.rounds for section in each.sections]
    assert words.index("prune") < words.index("share")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[rounds]]\nlength = 0.5\n[rounds.prune]\nkeep = { "ip*" = 0.2 }\n')
    scheme = find_scheme(str(path))
    (each,) = scheme.rounds
    assert (scheme.name, each.name, each.length, each.rate) == ("mine", "round", 0.5, 1.0)
    assert each.sections == {"prune": {"keep": {"ip*": 0.2}}}
    assert (scheme.code, scheme.biases, scheme.normalization) == ("best", 32, "keep")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rounds"),
        ("rounds = 3", "has no rounds"),
        ("cod = 'huffman'", "no word cod; .* did you mean 'code'"),
        ("code = 'zip'", "code is 'zip', expected one of best, huffman, range"),
        ("biases = 8", "biases is 8, expected one of 32, 16"),
        ("normalization = 'drop'", "normalization is 'drop', expected one of keep, fold"),
        ("[low_rank]\nrank = {a = 3}\nenergy = {b = 0.9}", "low_rank has rank and energy"),
        ("[low_rank]\nranks = {a = 3}", "no word low_rank.ranks; .* did you mean 'rank'"),
        ("[low_rank]\nrank = {a = 0.5}", "low_rank.rank 'a' is 0.5; it must be a whole number"),
        ("[low_rank]\nenergy = {a = 1}", "low_rank.energy 'a' is 1; it must be above 0 and below"),
        ("[low_rank]\nrank = 3", "low_rank.rank is 3; expected a section"),
        ("[[rounds]]\nlenght = 1", "no word rounds 1.lenght; .* did you mean 'length'"),
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
    words: dict[str, Any] = tomllib.loads(text)
    with pytest.raises(RecipeError, match=f"scheme x: .*{message}"):
        scheme_of("x", words, "scheme x")


def test_a_scheme_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"there are best, deep.* did you mean 'best'"):
        find_scheme("bets")
    with pytest.raises(RecipeError, match="No such file"):
        find_scheme(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("[[")
    with pytest.raises(RecipeError, match="is no TOML"):
        find_scheme(str(tmp_path / "bad.toml"))
