"""`firecaffe bench data PATH`: images/s of each stage of the input, and the slowest stage."""

from __future__ import annotations

import dataclasses
import json
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from firecaffe.api.answer import make_console, numbers_table, write_cluster
from firecaffe.cli.arguments import Parser
from firecaffe.cli.shared_options import add_cluster_file, cluster_to_write
from firecaffe.cluster.process_settings import keep_freed_memory
from firecaffe.data.config import DataConfig
from firecaffe.errors import DataError, RecipeError
from firecaffe.planner.cluster import Storage

if TYPE_CHECKING:
    import torch

    from firecaffe.data.pack_images import Part, Source
    from firecaffe.measure.input import InputStage

USAGE = "PATH [--model-rate R] [--threads N] [--write FILE.toml [--overwrite]] [options]"
ABOUT = (
    "Measure the input of a packed data set, a folder of images or tar files: images/s of storage "
    "(cold and warm), decoding, cropping, batching and copying, alone and together."
)

NOTES = (
    "It says what limits and, with --model-rate, how many decoding threads and how much of this "
    "storage the rate takes. It also measures the same images as a folder of files and packed.",
    "Cold: the system is asked to forget the files. It may still know the names of new files, "
    "which favors the folder.",
    "--write puts the rates of storage and decoding into a cluster file, so that `plan` knows when "
    "a training waits for its data.",
)


def make_parser() -> Parser:
    parser = Parser("bench data", USAGE, ABOUT, notes=NOTES)
    add = parser.add
    add("path", type=str, help="a packed data set, a folder of images, or tar files")
    add("--model-rate", default=0.0, metavar="R", help="images/s that a node's training needs")
    add("--images", default=1000, metavar="N", help="measure at most so many, drawn at random")
    add("--threads", default=0, metavar="N", help="threads; 0: one for each core")
    add("--resize", default=256, metavar="S", help="data.resize")
    add("--crop", default=224, metavar="S", help="data.crop")
    add_cluster_file(parser, "the cluster file to write")
    add("--json", action="store_true", help="print JSON")
    return parser


WHOLE_INPUT = ("together, warm", "together, cold")


@dataclasses.dataclass(frozen=True)
class InputRates:
    about: str
    threads: int
    image_bytes: float
    stages: list[InputStage]
    formats: dict[str, float]
    """Images/s read from storage, cold, for the same images in each format."""

    def rate(self, name: str) -> float | None:
        return next((stage.images_per_s for stage in self.stages if stage.name == name), None)


def main(argv: list[str]) -> int:
    import torch

    from firecaffe.data.sources import check_words

    options = make_parser().parse_args(argv)
    if options.images < 1 or not 0 < options.crop <= options.resize:
        raise RecipeError("--images and --crop are 1 or more, --resize at least --crop")
    check_words(DataConfig(resize=options.resize, decode_threads=options.threads))
    if not 0 <= options.model_rate < float("inf"):
        raise RecipeError(f"--model-rate is {options.model_rate:g}; it must be images per second")
    cluster = cluster_to_write(options)
    torch.set_num_threads(1)
    keep_freed_memory()  # as in a training
    rates = measure(options)
    if cluster is not None:
        path = Path(options.write)
        write_cluster(path, dataclasses.replace(cluster, name=path.stem, storage=storage_of(rates)))
    advised = advice(rates, options.model_rate)
    if options.json:
        print(json.dumps({**dataclasses.asdict(rates), "said": advised}, indent=2))
        return 0
    console = make_console()
    console.print(_table(rates))
    for line in advised:
        console.print(line, markup=False, soft_wrap=True)
    if options.write:
        print(f"wrote {options.write}")
    return 0


def measure(options: Any) -> InputRates:
    """Measure the input at `options.path`. Raises DataError if there is nothing to read."""
    import torch

    from firecaffe.data.decode import decode_threads
    from firecaffe.data.pack_sources import open_source
    from firecaffe.data.packed import LIST, PackedPart, read_list
    from firecaffe.data.shard_files import is_remote, open_files
    from firecaffe.measure.input import StoredImages, encoded_stages, formats, raw_stages, sample

    threads = decode_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = DataConfig(
        "own",
        resize=options.resize,
        crop=options.crop,
        augment="inception",
        mirror=True,
        mean=[0.485, 0.456, 0.406],
        std=[0.229, 0.224, 0.225],
    )
    path = options.path
    if is_remote(path) or (Path(path) / LIST).is_file():
        packed = read_list(path)
        name = "train" if "train" in packed.parts else next(iter(packed.parts), "")
        if not name:
            raise DataError(f"{path}: holds no images")
        part = PackedPart(packed, name, open_files(path))
        files = [] if is_remote(path) else [Path(path) / info.file for info in part.infos]
        stored = StoredImages(part.read, sample(len(part), options.images), files)
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
        stored = StoredImages(
            encoded.read, sample(len(encoded), options.images), _files_of(Path(path), encoded.part)
        )
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
        import torch

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


def _table(rates: InputRates) -> Table:
    title = f"{rates.about}; {rates.image_bytes / 1e3:.3g} kB an image; {rates.threads} threads"
    table = numbers_table("stage", "images/s", "MB/s", texts=("stage",), title=title)
    for stage in rates.stages:
        read = f"{stage.bytes_per_s / 1e6:,.1f}" if stage.bytes_per_s else ""
        table.add_row(stage.name, f"{stage.images_per_s:,.0f}", read)
    return table
