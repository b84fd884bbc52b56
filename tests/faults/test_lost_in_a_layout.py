"""A rank that is killed in the middle of a training whose ranks hold one model together: it is
named, and the run goes on from its checkpoint to the bits of a run that nothing has happened to.
"""

from pathlib import Path

import pytest

from benchmarks.small_run import RECIPE, state_of
from tests.faults.test_injected_faults import check_restart, train

HEAD = 'parts = 2\nsplit = { "ip1" = "neurons", "ip2" = "inputs" }\n'
LAYOUTS = {
    "stages": 'data = 1\nstages = ["ip1"]\n',
    "split": f"data = 1\nmodel = 2\n{HEAD}",
    "one weird trick": f'data = 1\nmodel = 2\nscheme = "one_weird_trick"\n{HEAD}',
}
ALONE = {"stages": "", "split": HEAD, "one weird trick": HEAD}
"""What one worker has of it."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The state at the end of a run on one worker, by what it has of [parallel]."""
    found = {}
    for words in set(ALONE.values()):
        folder = tmp_path_factory.mktemp("undisturbed")
        recipe = folder / "recipe.toml"
        recipe.write_text(f"{RECIPE}\n[parallel]\n{words}")
        done = train(recipe, folder / "run", workers=1)
        assert done.returncode == 0, done.stderr
        found[words] = state_of(folder / "run")
    return found


@pytest.mark.parametrize(
    "name", ["stages", "one weird trick", pytest.param("split", marks=pytest.mark.slow)]
)
def test_a_killed_rank_is_named_and_the_run_goes_on(
    undisturbed: dict[str, str], name: str, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"{RECIPE}\n[parallel]\n{LAYOUTS[name]}")
    faults = ["kill:rank=1,step=8"]
    done = train(recipe, tmp_path / "run", "--max-restarts", "1", faults=faults, workers=2)
    check_restart(done, tmp_path / "run", "kill", undisturbed[ALONE[name]])
    assert "going on after step 6" in done.stdout
