"""The published sets in idx files: names, digests, and the address that has them.

Sources: https://github.com/zalandoresearch/fashion-mnist (address, md5) and Debian's package
dataset-fashion-mnist 0.0~git20200523.55506a9-1 (sha256 of the contents); torchvision's
datasets/mnist.py (address, md5 of MNIST), and the sha256 of what those four files hold.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class IdxFile:
    """One of the four files: its name, dimensions, and digests."""

    name: str
    num_dims: int
    published_md5: str  # of the .gz file at the address
    content_sha256: str  # of the file that is in it


@dataclass(frozen=True)
class IdxSet:
    """A data set of four files, training and test images and labels."""

    name: str
    url: str
    files: tuple[IdxFile, ...]


FASHION_MNIST = IdxSet(
    "fashion-mnist",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    (
        IdxFile(
            "train-images-idx3-ubyte.gz",
            3,
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        IdxFile(
            "train-labels-idx1-ubyte.gz",
            1,
            "25c81989df183df01b3e8a0aad5dffbe",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
        IdxFile(
            "t10k-images-idx3-ubyte.gz",
            3,
            "bef4ecab320f06d8554ea6380940ec79",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte.gz",
            1,
            "bb300cfdad3c16e7a12a480ee83cd310",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
)

MNIST = IdxSet(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        IdxFile(
            "train-images-idx3-ubyte.gz",
            3,
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        IdxFile(
            "train-labels-idx1-ubyte.gz",
            1,
            "d53e105ee54ea40749a09fcbcd1e9432",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        IdxFile(
            "t10k-images-idx3-ubyte.gz",
            3,
            "9fb629c4189551a2d022fa330f9573f3",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte.gz",
            1,
            "ec29112dd5afa0611ce80d1b7f02629c",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
)
