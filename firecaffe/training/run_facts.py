"""The file about.json of a run: what its recipe lacks and rebuilding its network needs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from firecaffe.data import Data, is_images
from firecaffe.data.dataset import Layout, Leaf, layout_of
from firecaffe.data.decode import DecodedSet
from firecaffe.errors import RunError
from firecaffe.files import write_json
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
    if layout is None or not isinstance(layout.inputs, Leaf):
        return (), ""
    return layout.inputs.shape, str(layout.inputs.dtype).removeprefix("torch.")


def write_about(folder: Path, about: About) -> None:
    write_json(folder / ABOUT, asdict(about))


def read_about(folder: Path) -> About | None:
    """Read the file; None if the run is older than it. Raises: RunError if it is damaged."""
    path = folder / ABOUT
    return read_file(path, About, RunError) if path.exists() else None
