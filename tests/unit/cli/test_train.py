"""`firecaffe train` checks once what its ranks then get, for every number of hosts."""

from pathlib import Path
from typing import Any

import pytest

from firecaffe.cli import main, start_training, train
from firecaffe.recipe import checked_recipe, refusals
from firecaffe.recipe.checked_recipe import Prepared

WORDS = """
[model]
name = "lenet"
[data]
name = "generated"
[train]
steps = 1
global_batch_size = 8
micro_batch_size = 4
device = "cpu"
"""


def test_a_recipe_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, checks, given = tmp_path / "recipe.toml", [], {}
    path.write_text(f'{WORDS}\n[run]\nfolder = "{tmp_path}/run"\n')
    once = refusals.check_together

    def launch(argv: list[str], *_: Any, **words: Any) -> list[Path]:
        given.update(words)
        monkeypatch.setattr(train, "handed", lambda: given["for_ranks"])
        assert main(["train", "what ranks do not read"]) == 0
        return [tmp_path / "run"]

    def check_together(*args: Any, **words: Any) -> None:
        checks.append(args)
        once(*args, **words)

    monkeypatch.setattr(checked_recipe, "check_together", check_together)
    monkeypatch.setattr(start_training, "launch", launch)
    assert main(["train", str(path), "--train.seed", "3"]) == 0
    assert isinstance(given["for_ranks"], Prepared)
    assert given["for_ranks"].recipe.train.seed == 3
    assert len(checks) == 1


def test_plugins_are_asked_for_every_number_of_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "recipe.toml", []
    path.write_text(WORDS)
    monkeypatch.setattr(start_training, "check_with", lambda _, ranks: asked.append(ranks))
    monkeypatch.setattr(start_training, "launch", lambda *_, **__: [])
    hosts = ["--nnodes", "1:2", "--rdzv-endpoint", "localhost:29400", "--nproc-per-node", "1"]
    assert main(["train", str(path), *hosts]) == 0
    assert asked == [2, 1]
