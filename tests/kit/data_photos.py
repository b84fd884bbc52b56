"""Photos as files, in folders by part and class, in tar files, and packed into shards."""

import io
import tarfile
from pathlib import Path
from typing import Literal

import simplejpeg
import torch
from PIL import Image

from firecaffe.data.hash import hash64
from firecaffe.data.pack_images import Packing, PackOptions
from firecaffe.data.pack_sources import open_source
from firecaffe.data.packed import PackedPart, PackedSet, read_list
from firecaffe.data.shard_files import LocalFiles, ShardFiles

CLASSES = ("cat", "dog")
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def draw(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (5, 9)) -> None:
    """Write an image of one color; size: width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def picture(rows: int, columns: int, mode: str = "RGB") -> Image.Image:
    """Noise of 8 x 8, enlarged: photos are smooth."""
    noise = torch.randint(0, 256, (8, 8, 3), generator=torch.Generator().manual_seed(1))
    small = Image.frombytes("RGB", (8, 8), bytes(noise.flatten().tolist()))
    return small.resize((columns, rows), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, name: str, **words: object) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **words)
    return file.getvalue()


def photo(number: int, rows: int = 24, columns: int = 32) -> bytes:
    """A smooth JPEG of some hundred bytes; every number has another."""
    noise = hash64(number, torch.arange(4 * 4 * 3)).remainder(256).to(torch.uint8)
    small = Image.frombytes("RGB", (4, 4), bytes(noise.tolist()))
    pixels = torch.frombuffer(bytearray(small.resize((columns, rows)).tobytes()), dtype=torch.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels.view(rows, columns, 3).numpy(), 90))


def make_folder(folder: Path, train: int = 30, test: int = 6) -> Path:
    """So many photos of two classes in turn."""
    for part, count in (("train", train), ("test", test)):
        for number in range(count):
            path = folder / part / CLASSES[number % 2] / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photo(number + 1000 * (part == "test")))
    return folder


def write_tar(path: Path, members: dict[str, bytes], mode: Literal["w", "w:gz"] = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def long_header() -> bytes:
    """A header of tar that Python searches by the square of its bytes."""
    header = tarfile.TarInfo("name")
    header.type, header.size = tarfile.XHDTYPE, 1 << 15
    return header.tobuf() + b"%d a=" % header.size + b"0" * (header.size - 9) + b"\n"


def pack(
    source: Path, dest: Path, workers: int = 2, resize: int = 0, raw: bool = False
) -> PackedSet:
    options = PackOptions(resize=resize, raw=raw, shard_bytes=4000)
    return Packing(open_source(source), dest, options, workers).run()


def part_of(root: Path | str, files: ShardFiles | None = None) -> PackedPart:
    """The training part, read in place or from these files."""
    return PackedPart(read_list(str(root)), "train", files or LocalFiles(root))


def flip(path: Path, at: int) -> None:
    """Change one bit of a byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
