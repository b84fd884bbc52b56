"""`firecaffe.bench_data`: images/s of each stage of the input, and the slowest stage."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

from firecaffe.api.answer import Answer, numbers_table, write_cluster
from firecaffe.api.argument_checks import (
    check_count,
    check_number,
    cluster_to_write,
    path_of,
    wrong,
)
from firecaffe.cluster.from_script import from_script
from firecaffe.cluster.process_settings import compute_threads, keep_freed_memory
from firecaffe.data import DataConfig
from firecaffe.data.decode import decode_threads
from firecaffe.data.pack_images import Part, Source
from firecaffe.data.pack_sources import open_source
from firecaffe.data.packed import LIST, PackedPart, read_list
from firecaffe.data.shard_files import is_remote, open_files
from firecaffe.data.sources import check_words
from firecaffe.errors import DataError
from firecaffe.measure.input import (
    InputStage,
    StoredImages,
    encoded_stages,
    formats,
    raw_stages,
    sample,
)
from firecaffe.planner.cluster import Storage
from firecaffe.resume_advice import option

WHOLE_INPUT = ("together, warm", "together, cold")


@dataclass(frozen=True, repr=False)
class InputRates(Answer):
    """Images/s of each stage of the input, alone and together."""

    about: str
    """The path, and the kind of data there."""
    threads: int
    """Decoding threads."""
    image_bytes: float
    """Mean bytes of a stored image."""
    stages: Sequence[InputStage]
    """The stages, alone and together, with their images/s."""
    formats: Mapping[str, float]
    """Images/s read from storage, cold, for the same images in each format."""
    advice: Sequence[str] = ()
    """Lines on the slowest stage, on what a training's rate needs, and on other formats."""
    lines: Sequence[str] = ()
    """The file that was written."""

    def rate(self, name: str) -> float | None:
        """Return the images/s of a stage; None if it was not measured."""
        return next((stage.images_per_s for stage in self.stages if stage.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the rates, with the advice as "said"."""
        record = dataclasses.asdict(self)
        del record["lines"]
        return record | {"said": record.pop("advice")}

    def _parts(self) -> Iterator[RenderableType]:
        size = f"{self.image_bytes / 1e3:.3g} kB an image"
        title = f"{self.about}; {size}; {self.threads} threads"
        table = numbers_table("stage", "images/s", "MB/s", texts=("stage",), title=title)
        for stage in self.stages:
            read = f"{stage.bytes_per_s / 1e6:,.1f}" if stage.bytes_per_s else ""
            table.add_row(stage.name, f"{stage.images_per_s:,.0f}", read)
        yield table
        yield from (*self.advice, *self.lines)


@from_script
def bench_data(
    path: str | Path,
    *,
    model_rate: float = 0.0,
    images: int = 1000,
    threads: int = 0,
    resize: int = 256,
    crop: int = 224,
    cluster: str | Path = "",
    write: str | Path = "",
    overwrite: bool = False,
) -> InputRates:
    """Measure the input of a packed data set, a folder of images or tar files.

    Args:
        path: Where the images are.
        model_rate: The images/s that a node's training needs.
        images: Measure at most so many, drawn at random.
        threads: Decoding threads; 0 for one for each core.
        resize: `data.resize`.
        crop: `data.crop`.
        cluster: With `write`: the cluster, or its file, that the file starts from.
        write: A cluster file for `plan`, FILE.toml, with the rates of storage and decoding.
        overwrite: Replace that file if it exists.

    Raises: RecipeError for a wrong argument; DataError if there is nothing to read.
    """
    for name, value in {"images": images, "resize": resize, "crop": crop}.items():
        check_count(name, value, 1)
    check_count("threads", threads, 0)
    if crop > resize:
        raise wrong("crop", crop, f"at most {option('resize')}, which is {resize}")
    config = DataConfig(
        "own",
        resize=resize,
        crop=crop,
        augment="inception",
        mirror=True,
        mean=[0.485, 0.456, 0.406],
        std=[0.229, 0.224, 0.225],
        decode_threads=threads,
    )
    check_words(config)
    check_number("model_rate", model_rate)
    if model_rate < 0:
        raise wrong("model_rate", f"{model_rate:g}", "images per second")
    extended = cluster_to_write(write, overwrite, cluster)
    place = str(path_of("path", path))
    keep_freed_memory()  # as in a training
    with compute_threads(1):
        rates = _measure(str(path) if is_remote(str(path)) else place, config, images)
    lines = []
    if extended is not None:
        extended = dataclasses.replace(extended, storage=storage_of(rates))
        lines.append(write_cluster(write, extended))
    return dataclasses.replace(rates, advice=advice(rates, model_rate), lines=lines)


def _measure(path: str, config: DataConfig, most_images: int) -> InputRates:
    threads = decode_threads(config.decode_threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_remote(path) or (Path(path) / LIST).is_file():
        packed = read_list(path)
        name = "train" if "train" in packed.parts else next(iter(packed.parts), "")
        if not name:
            raise DataError(f"{path}: holds no images")
        part = PackedPart(packed, name, open_files(path))
        files = [] if is_remote(path) else [Path(path) / info.file for info in part.infos]
        stored = StoredImages(part.read, sample(len(part), most_images), files)
        if packed.kind == "raw":
            own = dataclasses.replace(config, mean=[], std=[])
            stages = raw_stages(part, stored, threads, own, device)
        else:
            stages = encoded_stages(part, stored, threads, config, device)
        about, shape = f"{path}, packed ({packed.kind})", packed.shape
    else:
        source = open_source(Path(path))
        if source.kind == "raw":
            raise DataError(f"{path}: {source.about} are held in memory; pack them to measure")
        encoded = _AsEncoded(source)
        chosen = sample(len(encoded), most_images)
        stored = StoredImages(encoded.read, chosen, _files_of(Path(path), encoded.part))
        stages = encoded_stages(encoded, stored, threads, config, device)
        about, shape = f"{path}, {source.about}", source.shape
    contents = [len(stored.read(number)) for number in stored.samples[:100]]
    beside = Path.cwd() if is_remote(path) else Path(path).resolve().parent
    rates = formats(stored, shape, threads, beside)
    return InputRates(about, threads, sum(contents) / len(contents), stages, rates)


class _AsEncoded:
    shard_counts: tuple[int, ...] = ()

    def __init__(self, source: Source) -> None:
        self.part = source.parts.get("train") or next(iter(source.parts.values()))
        self.num_classes = len(source.classes)
        self.class_names = tuple(source.classes)

    def __len__(self) -> int:
        return len(self.part)

    def read(self, number: int) -> bytes:
        return self.part.read(number)

    def name(self, number: int) -> str:
        return self.part.names[number]

    def labels(self, samples_B: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.part.labels)[samples_B]


def _files_of(path: Path, part: Part) -> list[Path]:
    if path.is_file():
        return [path]
    return (
        [path / name for name in part.names]
        if (path / part.names[0]).is_file()
        else sorted(path.glob("*.tar"))
    )


def storage_of(rates: InputRates) -> Storage:
    cold = next((stage for stage in rates.stages if stage.name == "storage, cold"), rates.stages[0])
    together = rates.rate("together, warm") or 0.0
    return Storage(
        "as `firecaffe bench data` found it",
        read_bytes_per_s=cold.bytes_per_s,
        error=0.15,
        decoded_images_per_s=together,
    )


def advice(measured: InputRates, model_rate: float) -> list[str]:
    """Return lines on the bottleneck, the needs of `model_rate` images/s and other formats."""
    alone = [stage for stage in measured.stages if stage.name not in WHOLE_INPUT]
    slowest = min(alone, key=lambda stage: stage.images_per_s)
    lines = [f"what limits: {slowest.name}, {slowest.images_per_s:,.4g} images/s"]
    together = measured.rate("together, warm")
    cold = measured.rate("storage, cold")
    if model_rate > 0:
        needs = []
        if together:
            needs.append(f"{ceil(model_rate / (together / measured.threads))} decoding threads")
        if cold:
            node = f"{cold * measured.image_bytes / 1e6:,.4g} MB/s"
            needs.append(f"{ceil(model_rate / cold)} times this storage ({node} cold)")
        rate = min(known for known in (together, cold, slowest.images_per_s) if known)
        enough = "is enough" if rate >= model_rate else "is not enough"
        lines.append(
            f"for {model_rate:,.4g} images/s: {' and '.join(needs) or 'no more threads'}; what is "
            f"here {enough}"
        )
    others = [f"{name} {rate:,.0f} images/s" for name, rate in measured.formats.items()]
    lines.append(f"the same images written anew, read cold at random: {', '.join(others)}")
    return lines
