"""Files that belong together are all new or all as before."""

import os
from pathlib import Path

import pytest

from firecaffe.files import written_together


def write(paths: list[Path], content: bytes) -> None:
    with written_together(paths) as asides:
        for aside in asides:
            aside.write_bytes(content)


def refuses(*_: Path) -> None:
    raise PermissionError("no links here")


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_all_or_none(
    place: int, has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """place: of a file that cannot get its name."""
    if not has_links:
        monkeypatch.setattr(os, "link", refuses)
    paths = [tmp_path / name for name in ("a", "b", "c")]
    write(paths[1:2], b"before")
    blocked = paths[place]
    blocked.unlink(missing_ok=True)
    blocked.mkdir()
    with pytest.raises(IsADirectoryError):
        write(paths, b"after")
    assert {each.name for each in tmp_path.iterdir()} == {"b", blocked.name}
    assert blocked.is_dir()
    assert place == 1 or paths[1].read_bytes() == b"before"
    blocked.rmdir()
    write(paths, b"after")
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == dict.fromkeys(
        paths, b"after"
    )
