"""Convert a caffemodel to first weights, for the layers whose names it has."""

from pathlib import Path

import torch
from safetensors.torch import save

from firecaffe.caffe import caffemodel
from firecaffe.caffe.message import CaffeError
from firecaffe.caffe.net import Net
from firecaffe.from_caffe.import_report import Note, Report


def first_weights(net: Net, path: Path, report: Report) -> bytes:
    """Return a file's tensors for a net, as safetensors; other layers start from their fillers.

    Raises: CaffeError if the file is invalid, a layer has another shape, or no layer is in it.
    """
    blobs = caffemodel.read(path)
    loaded = net.load({name: list(map(torch.from_numpy, arrays)) for name, arrays in blobs.items()})
    place = str(path)
    if not loaded.filled:
        raise CaffeError(
            f"{path}: no layer of the net has a name that the file knows; it has "
            f"{', '.join(loaded.unused[:4])} …"
        )
    report.understood.append(Note(place, f"weights of {', '.join(loaded.filled)}"))
    if loaded.fresh:
        report.changed.append(
            Note(
                place,
                f"not in the file, so they start as their fillers say: {', '.join(loaded.fresh)}",
            )
        )
    if loaded.unused:
        report.changed.append(Note(place, f"in the file alone: {', '.join(loaded.unused)}"))
    filled = {
        id(tensor)
        for name in loaded.filled
        for tensor in net.layers[name].state_dict(keep_vars=True).values()
    }
    return save(
        {
            name: tensor.detach().contiguous().clone()
            for name, tensor in net.state_dict(keep_vars=True).items()
            if id(tensor) in filled
        }
    )
