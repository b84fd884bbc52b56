"""The contents of a run's folders: about.json, and a folder on each host without rank 0's.

Rank 0 marks the run's folder with a name that no other run has. A rank that does not see the mark
shares no disk with rank 0. It records its timings, and the faults that it hears of, in a folder on
its own host. Checkpoints and the result are rank 0's.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from firecaffe.cluster.agree import gather_text
from firecaffe.cluster.world import World
from firecaffe.data import Data, is_images
from firecaffe.data.dataset import Layout, TensorLayout, layout_of
from firecaffe.data.decode import DecodedSet
from firecaffe.errors import RunError
from firecaffe.files import alone_in, write_json
from firecaffe.runs.environment import describe_environment
from firecaffe.runs.run_folder import (
    ENVIRONMENT,
    MARK,
    RunConfig,
    apart_mark,
    continue_run_folder,
    mark_of,
)
from firecaffe.schema import read_file
from firecaffe.training.given_parts import Parts, counts_of

ABOUT = "about.json"

Size = Annotated[int, Meta(ge=0, le=10**9)]


@dataclass(frozen=True)
class About:
    """Facts that the network was built for and that no recipe states."""

    num_classes: Size | None
    in_channels: Size | None
    class_names: tuple[str, ...]
    sample_CHW: tuple[Size, ...]
    """The images' shape before cropping. Empty unless samples are images of bytes with classes."""
    is_decoded: bool
    """Whether the samples are encoded images, which are decoded and scaled when they are read."""
    input_shape: tuple[Size, ...]
    """The shape of one sample as the network receives it. Empty if inputs are not one tensor."""
    input_dtype: str
    given: tuple[str, ...]
    """The arguments of `firecaffe.train` that replaced what the recipe names."""


def about_of(parts: Parts, data: Data) -> About:
    test = data.test
    CHW: tuple[int, ...] = ()
    is_decoded = isinstance(test, DecodedSet)
    if is_images(test) and (is_decoded or _inputs(layout_of(test))[1] == "uint8"):
        CHW = tuple(test.sample_CHW)
    shape, dtype = _inputs(data.layout)
    given_parts = {
        "model": parts.model,
        "loss": parts.loss,
        "task": parts.task,
        "train_set": parts.train,
    }
    return About(
        *counts_of(data.train),
        class_names=data.class_names,
        sample_CHW=CHW,
        is_decoded=is_decoded,
        input_shape=shape,
        input_dtype=dtype,
        given=tuple(name for name, value in given_parts.items() if value is not None),
    )


# The facts of a network without a run folder.
NOTHING = About(None, None, (), (), False, (), "", ())


def _inputs(layout: Layout | None) -> tuple[tuple[int, ...], str]:
    if layout is None or not isinstance(layout.inputs, TensorLayout):
        return (), ""
    return layout.inputs.shape, str(layout.inputs.dtype).removeprefix("torch.")


def write_about(folder: Path, about: About) -> None:
    write_json(folder / ABOUT, asdict(about))


def read_about(folder: Path) -> About | None:
    """Read the file; None if the run is older than it. Raises: RunError if it is damaged."""
    path = folder / ABOUT
    return read_file(path, About, RunError) if path.exists() else None


MOST_NAMED = 4


@dataclass(frozen=True)
class Places:
    first: Path
    """Rank 0's folder."""
    own: Path
    """The folder in which this rank records: rank 0's, or one on its own host."""
    is_apart: bool = False
    """Whether this rank does not see rank 0's folder, even if its own has the same path."""
    apart: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Host and folder of each rank that does not see rank 0's."""

    def notes(self, host: str) -> list[str]:
        if not self.apart:
            return []
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, where in self.apart.items():
            ranks.setdefault(where, []).append(rank)
        said = [
            f"{name} keeps the timings of rank {', '.join(map(str, numbers))} in {folder}"
            for (name, folder), numbers in list(ranks.items())[:MOST_NAMED]
        ]
        if len(ranks) > MOST_NAMED:
            said.append(f"{len(ranks) - MOST_NAMED} others in theirs")
        return [
            f"checkpoints are in {self.first / 'checkpoints'} on {host} alone, for no disk with "
            f"that folder is shared: {'; '.join(said)}"
        ]


def find_places(world: World, words: RunConfig, first: Path, mark: str, goes_on_at: int) -> Places:
    """Find where each rank records; make folders on hosts that do not see `first`, rank 0's.

    All ranks call it. Rows of an earlier attempt after step `goes_on_at` are done again. Raises:
    RunError if such a folder cannot be made, or is another run's.
    """
    sees, marks = mark_of(first) == mark, (mark, apart_mark(mark))
    local_folder = first if sees else Path(words.folder or Path("runs", first.name)).absolute()
    if not sees:
        _make(local_folder, first, mark, goes_on_at, world.host)
    said = gather_text(world, "" if sees else json.dumps([world.host, str(local_folder)]))
    # Another rank of this host may have made and marked it by now. Or it is rank 0's, which a slow
    # shared disk shows late.
    if mark_of(local_folder) not in marks:
        raise RunError(
            f"run.folder {local_folder} exists already on {world.host}, which does not see "
            f"{first} of rank 0; two runs never write into one folder"
        )
    apart = {rank: tuple(json.loads(text)) for rank, text in enumerate(said) if text}
    return Places(first, local_folder, not sees, apart)


def _make(folder: Path, first: Path, mark: str, goes_on_at: int, host: str) -> None:
    try:
        folder.mkdir(parents=True)
        (folder / "timings").mkdir()
        facts = {**describe_environment(), MARK: apart_mark(mark), "folder_of_rank_0": str(first)}
        write_json(folder / ENVIRONMENT, facts)
    except FileExistsError:
        if mark_of(folder) == apart_mark(mark):
            with alone_in(folder):
                continue_run_folder(folder, goes_on_at)
    except OSError as error:
        raise RunError(f"run.folder {folder} on {host}: {error.strerror}") from error
