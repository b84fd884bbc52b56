"""Targets as people type them, and the search for them over a planted landscape."""

from collections.abc import Callable

import pytest

from firecaffe.errors import RecipeError
from firecaffe.shrink.pruning_rounds import (
    CLOSE,
    MAX_ATTEMPTS_OF_LOSS,
    MAX_ATTEMPTS_OF_SIZE,
    Attempt,
    best_of,
    next_aim,
    parse_target,
)

UNITS: dict[str, dict[str, float]] = {
    "ratio": {"40x": 40, "1.5X": 1.5},
    "bytes": {"27KB": 27_000, "27 kb": 27_000, "2KiB": 2048, "0.5MB": 500_000, "900B": 900},
    "points": {"0.1points": 0.1, "0 points": 0, ".3point": 0.3},
}


@pytest.mark.parametrize("kind", UNITS)
def test_each_unit(kind: str) -> None:
    for word, value in UNITS[kind].items():
        target = parse_target(word)
        assert target.kind == kind
        assert target.value == pytest.approx(value), word
        assert target.is_of_size == (kind != "points")


NO_TARGETS = ["", "x", "40", "-3x", "40xx", "27 kilos", "nanx", "1e3KB", "inf", "9" * 400 + "x"]


@pytest.mark.parametrize(
    ("word", "part"),
    [(word, r"expected a ratio \(40x\)") for word in NO_TARGETS]
    + [(word, " must be") for word in ("1x", "0.5x", "0x", "0KB", "0.4B")],
)
def test_no_target_and_no_file(word: str, part: str) -> None:
    with pytest.raises(RecipeError, match=f"target is .*{part}"):
        parse_target(word)


WEIGHTS = 250_000
WHOLE = 4 * WEIGHTS


def test_a_ratio_is_the_whole_file_against_four_bytes_a_weight() -> None:
    assert parse_target("40x").most_bytes(WEIGHTS) == WHOLE / 40
    assert parse_target("27KB").most_bytes(WEIGHTS) == 27_000


def search(word: str, made: Callable[[float], tuple[float, float]]) -> list[Attempt]:
    """made: the bytes and the loss that come of an aim in bytes."""
    target = parse_target(word)
    attempts: list[Attempt] = []
    while (aim := next_aim(target, attempts, WEIGHTS)) is not None:
        size, lost = made(aim)
        attempts.append(Attempt(aim, round(size), lost))
    return attempts


@pytest.mark.parametrize("word", ["40x", "25KB"])
def test_a_size_that_is_met_is_one_training(word: str) -> None:
    found = search(word, lambda aim: (0.97 * aim, 0.3))
    assert [each.aim_bytes for each in found] == [25_000]
    assert best_of(parse_target(word), found, WEIGHTS) == (0, True)


@pytest.mark.parametrize("off", [0.6, 1.3])
def test_a_wrong_estimate_is_corrected_by_what_the_file_came_to(off: float) -> None:
    found = search("40x", lambda aim: (off * aim, 0.3))
    assert len(found) == 2
    assert CLOSE * 25_000 <= found[1].bytes <= 25_000
    assert best_of(parse_target("40x"), found, WEIGHTS)[1]


def test_a_size_that_no_file_has_ends_with_the_nearest() -> None:
    found = search("1KB", lambda aim: (5_000 + aim, 3.0))
    assert len(found) == MAX_ATTEMPTS_OF_SIZE
    place, reached = best_of(parse_target("1KB"), found, WEIGHTS)
    assert not reached
    assert found[place].bytes == min(each.bytes for each in found)


def test_of_files_that_are_small_enough_the_one_that_lost_least_is_taken() -> None:
    attempts = [Attempt(40_000, 24_000, 0.1), Attempt(25_000, 15_000, 0.2)]
    assert best_of(parse_target("40x"), attempts, WEIGHTS) == (0, True)


@pytest.mark.parametrize("knee", [6.0, 33.0, 150.0])
def test_a_loss_is_searched_to_the_ratio_where_it_begins(knee: float) -> None:
    """Nothing is lost up to a ratio, and a point for each doubling from there."""

    def made(aim: float) -> tuple[float, float]:
        return aim, 0.0 if WHOLE / aim <= knee else 0.2 + WHOLE / aim / knee - 1

    found = search("0.1points", made)
    assert len(found) <= MAX_ATTEMPTS_OF_LOSS
    place, reached = best_of(parse_target("0.1points"), found, WEIGHTS)
    assert reached
    assert 0.65 * knee <= WHOLE / found[place].bytes <= knee


def test_a_loss_that_nothing_keeps_ends_at_a_large_file() -> None:
    found = search("0.1points", lambda aim: (aim, 0.5 + 1e-6 * aim))
    place, reached = best_of(parse_target("0.1points"), found, WEIGHTS)
    assert not reached
    assert found[place].lost == min(each.lost for each in found)
    assert len(found) <= MAX_ATTEMPTS_OF_LOSS


def test_the_search_goes_on_between_what_is_kept_and_what_is_lost() -> None:
    losses = iter([0.05, 0.4, 0.05, 0.3, 0.0, 0.0])
    found = search("0.1points", lambda aim: (aim, next(losses)))
    aims = [each.aim_bytes for each in found]
    assert aims[1] < aims[2] < aims[0]
    assert aims[2] > aims[3] > aims[1]
