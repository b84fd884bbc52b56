"""The record of a compression as JSON: bytes, shares as fractions, ratios of whole files."""

from dataclasses import asdict
from math import ceil, log2
from pathlib import Path
from typing import Any

from firecaffe.compression.fcz import TensorReport
from firecaffe.compression.transfer import BYTES_PER_WEIGHT, seconds
from firecaffe.runs.run_folder import read_run_file
from firecaffe.shrink.compress_network import Compressed


def as_record(found: Compressed) -> dict[str, Any]:
    """Return one JSON object. Losses are in printed units: points of a share."""
    asked, whole = found.asked, found.weights * BYTES_PER_WEIGHT
    target = asked.target
    return {
        "network": asked.recipe.model.label,
        "from": asked.recipe.model.weights,
        "scheme": asked.scheme.name,
        "target": None if target is None else target.word,
        "reached": found.reached,
        "weights": found.weights,
        "float_bytes": whole,
        "metric": found.measure.name,
        "is_share": found.measure.is_share,
        "float": asdict(found.float_worth),
        **found.made.as_row,
        "file": str(asked.out if found.reached else found.made.path),
        "seconds_over_10_mbit_per_s": {
            "float": seconds(whole),
            "file": seconds(found.made.report.num_bytes),
        },
        "rounds": [{**asdict(trial), "folder": str(trial.folder)} for trial in found.made.rounds],
        "tensors": [tensor_row(tensor) for tensor in found.made.report.tensors],
        "tried": [made.as_row for made in found.tried],
        "sizes": sizes_in(asked.folder),
        "sensitivity": [asdict(layer) for layer in found.layers],
    }


def sizes_in(folder: Path) -> list[dict[str, Any]]:
    """Return all files of this network and scheme, for any target, by ratio. Raises RunError."""
    places = [path.parent for path in (*folder.glob("net.json"), *folder.glob("*/net.json"))]
    return sorted(
        (read_run_file(place, "net.json") for place in places), key=lambda row: row["ratio"]
    )


def tensor_row(each: TensorReport) -> dict[str, Any]:
    return {
        "name": each.name,
        "shape": list(each.shape),
        "size": each.size,
        "kept_share": each.kept / each.size if each.size else 0.0,
        "values": each.distinct,
        "bits": ceil(log2(each.distinct)) if each.distinct > 1 else 0,
        "bytes": each.num_bytes,
        "mask_bytes": each.mask_bytes,
        "symbol_bytes": each.symbol_bytes,
        "codebook_bytes": each.codebook_bytes,
        "floor_bytes": each.floor_bytes,
        "above_floor": each.num_bytes / each.floor_bytes - 1 if each.floor_bytes else 0.0,
    }
