"""The recipe's [data] section."""

from dataclasses import dataclass, field
from typing import Any

IMAGE_WORDS = ("augment", "crop", "pad", "mirror", "mean", "std")
"""Words of images of classes alone: what is done to a sample."""


@dataclass(frozen=True)
class DataConfig:
    """The data set and what is done to its samples.

    Args:
        name: Data set: fashion-mnist, mnist, cifar10, folder, packed or generated; a function of
            yours that returns one, package.module:function or path/file.py:function; or what the
            data layers of a net of Caffe's name, caffe:PATH.prototxt.
        path: Folder that holds its files; of packed data an address too, as s3://bucket/folder.
            Empty: the folder of that name in $FIRECAFFE_DATA or ~/.cache/firecaffe; for a net of
            Caffe's, the current folder, the net's or one above it.
        args: Arguments of that function, as `args = { root = "photos" }`.
        resize: Side in pixels to which encoded images are resized (folder and packed photos).
        decode_threads: Threads of each rank that read and decode images. 0: the host's cores,
            shared among its ranks.
        cache: Folder on a fast disk for copies of packed shards. Empty: they are read where they
            are.
        cache_bytes: Limit of that folder. 0: all but a tenth of its disk.
        order: samples (all in random order), or shards: the shards of packed data in random order,
            and samples in random order within each, for storage that dislikes random reads.
        balance: How often a training sample comes. none: once in each epoch. classes: every class
            as often as every other. own: by the weights that the data set has, its
            `sample_weights`. An epoch then is as many samples, drawn with replacement.
        on_error: What a broken image does. stop: it ends the run. skip: the next whole one stands
            in for it, and the run counts it.
        exif: What is done about photos that say (EXIF) how they are to be turned. ignore: they are
            read as they are stored, and counted. apply: they are turned.
        hold_out: Share of the training samples that is kept from training, to choose by: the
            validation samples that `train.eval_every` evaluates on, instead of the data set's own.
            0: none.
        augment: caffe (random crop, mirror), inception (a box of random area and proportions
            scaled to `crop`, mirror), or none.
        crop: Side in pixels of the crop: at random in training, from the center in a test. 0 keeps
            the size.
        pad: Rows and columns of zeros to add on each side before cropping.
        mirror: Mirror half of the training images left to right.
        mixup: Mix each training image with another of its micro-batch; the weights are drawn from
            Beta(mixup, mixup). 0: no mixing. With `cutmix` too, one of the two is drawn.
        cutmix: Put a box of another image into each, whose share is drawn likewise. 0: none.
        erasing: Probability that a box of a training image is set to 0, after normalization.
        mean: Mean to subtract, one value or one per channel, in units of full scale (0 to 1).
            Empty: none.
        std: Standard deviation to divide by, one value or one per channel, in units of full scale.
            Empty: none.
    """

    name: str = "fashion-mnist"
    path: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    resize: int = 256
    decode_threads: int = 0
    cache: str = ""
    cache_bytes: int = 0
    order: str = "samples"
    balance: str = "none"
    on_error: str = "stop"
    exif: str = "ignore"
    hold_out: float = 0.0
    augment: str = "caffe"
    crop: int = 0
    pad: int = 0
    mirror: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    erasing: float = 0.0
    mean: list[float] = field(default_factory=list)
    std: list[float] = field(default_factory=list)
