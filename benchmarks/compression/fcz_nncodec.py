"""Sizes of a network by nncodec, for benchmarks/compression/fcz.py, by a Python that has it.

    PYTHON benchmarks/compression/fcz_nncodec.py TENSORS.npz FOLDER

Prints JSON: the bytes of the indices of each tensor's codebook, exactly (`exact`); of nncodec's own
codebook mode (`codebook`); and of its uniform quantization with dependent quantizers by parameter
(`uniform`), whose decoded tensors it leaves as FOLDER/QP.npz. What nncodec loads and does not need
to code tensors (pandas, torchvision, data sets) is stood in for.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np

ABSENT = ("pandas", "torchvision", "torchvision.models", "torchvision.transforms", "wandb")
PARTS = (
    "use_case_init",
    "tensorflow_model",
    *("applications", "applications.datasets", "applications.models", "applications.settings"),
    *("applications.utils", "applications.utils.evaluation", "applications.utils.train"),
    "applications.utils.transforms",
)
for stand_in in (*ABSENT, *(f"nncodec.framework.{part}" for part in PARTS)):
    sys.modules[stand_in] = MagicMock()

from nncodec import nnc  # type: ignore[import-not-found]  # noqa: E402

QP = range(-32, -7, 2)


Tensors = dict[str, Any]


def coded(tensors: Tensors, **words: Any) -> tuple[int, Tensors]:
    settings: dict[str, Any] = {
        "qp": 0,
        "nonweight_qp": 0,
        "use_dq": False,
        "codebook_mode": 0,
        "opt_qp": False,
    }
    settings |= {"param_opt": True, "row_skipping": True, "return_bitstream": True}
    settings |= {"verbose": False, "device_id": 0, "bitstream_path": "/dev/null", **words}
    with contextlib.redirect_stdout(io.StringIO()):
        stream = nnc.compress(tensors, **settings)
        decoded = nnc.decompress(stream)
    return len(stream), {name: np.asarray(decoded[name], np.float32) for name in tensors}


def indices(tensor: Any) -> Any:
    """0 for 0, and 1, 2, … and -1, -2, … for the values above and below, as nncodec likes them."""
    found = np.zeros(tensor.shape, np.float32)
    for sign in (1, -1):
        for place, value in enumerate(np.unique(tensor[sign * tensor > 0])[::sign], 1):
            found[tensor == value] = sign * place
    return found


def main() -> None:
    tensors = dict(np.load(sys.argv[1]))
    whole = {name: indices(each) for name, each in tensors.items()}
    exact, decoded = coded(whole)
    assert all(np.array_equal(decoded[name], each) for name, each in whole.items())
    codebooks = sum(2 * len(np.unique(each[each != 0])) for each in tensors.values())
    found: dict[str, Any] = {"exact": exact + codebooks, "uniform": {}}
    found["codebook"], _ = coded(tensors, codebook_mode=2, qp=-32, nonweight_qp=-75)
    for qp in QP:
        found["uniform"][qp], decoded = coded(tensors, qp=qp, nonweight_qp=qp, use_dq=True)
        np.savez(Path(sys.argv[2], f"{qp}.npz"), **decoded)
    print(json.dumps(found))


main()
