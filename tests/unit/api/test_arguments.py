"""Arguments of functions that are paths."""

import shutil
from pathlib import Path

import pytest

import firecaffe
from firecaffe.api.argument_checks import paths_of
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import FOLDER, load_cluster


@pytest.mark.parametrize("value", ["", "a\0b", 3, [Path("a"), "b\0"]])
def test_what_is_no_path_is_refused(value: object) -> None:
    with pytest.raises(RecipeError, match="runs is "):
        paths_of("runs", value)


def test_a_cluster_file_may_have_a_comma_in_its_path(tmp_path: Path) -> None:
    mine = tmp_path / "titan, mine.toml"
    shutil.copy(FOLDER / "titan.toml", mine)
    for cluster in (mine, [mine], [str(mine), "titan"]):
        planned = firecaffe.plan(model="lenet", workers=1, cluster=cluster)
        assert planned.plans[0].cluster.name == load_cluster(str(mine)).name
    named = firecaffe.plan(model="lenet", workers=1, cluster="titan,ethernet-1g")
    assert [plan.cluster.name for plan in named.plans] == ["titan", "ethernet-1g"]
