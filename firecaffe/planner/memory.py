"""Bytes that one worker holds in memory during a step."""

from dataclasses import replace

from firecaffe.planner.cluster import Device
from firecaffe.planner.compute_time import HALF_PRECISION
from firecaffe.planner.update_price import update_of
from firecaffe.planner.workload import Workload

LIBRARY_BYTES = 600_000_000
"""Memory of a process with torch loaded, or of a GPU's context."""


ACTIVATIONS_HIGH = 1.2
"""Most extra memory of a step (gradients in flight, libraries' copies) over its activations.

Measured on a CPU by `firecaffe bench step`, with micro-batches of 4 to 32: 0.27 (nin_cifar), 0.67
(resnet18), 1.1 (googlenet). AlexNet, with few activations, is outside at 2.9.
"""

MOST_MICRO_BATCH = 256
"""The most images of a micro-batch that is not given: ImageNet's records took no more a device."""

MOST_OF_CORES = 8
"""The same without a library of GPUs: a core's rate grows no more, and leaves are shared better."""

LIBRARY_LOW = 0.5
"""The share of LIBRARY_BYTES that a process may do with."""


def memory_band(parts: dict[str, float]) -> tuple[float, float]:
    """The least and the most bytes that a worker may hold."""
    whole = sum(parts.values())
    low = whole - (1 - LIBRARY_LOW) * parts["library"]
    return low, whole + ACTIVATIONS_HIGH * parts["activations"]


def usual_micro_batch(workload: Workload, device: Device) -> int:
    """The largest power of two up to `most_micro_batch` that certainly fits the device, or 1."""
    size, memory = most_micro_batch(device), device.memory_bytes
    while size > 1:
        sized = replace(workload, micro_batch_size=size, global_batch_size=size)
        if memory_band(memory_bytes(sized, 1))[1] <= memory:
            break
        size //= 2
    return size


def most_micro_batch(device: Device) -> int:
    return MOST_MICRO_BATCH if device.library.startswith("cudnn") else MOST_OF_CORES


def memory_bytes(
    workload: Workload, world_size: int, in_memory: int = 1, is_whole: bool = True
) -> dict[str, float]:
    """Bytes of one worker by purpose. in_memory: workers of a host that add in shared memory.

    is_whole: whether each worker has the whole model. "gradients" are the buckets, which end up
    with the sums; "running" are gradients of the running micro-batch, until all are put into
    buckets. "sums" are nodes of the micro-batch tree that wait for neighbors, at most one on each
    level. "buckets" is what arrives of the largest one; in shared memory, the parts that this
    worker sums. "optimizer" is the largest shard, if workers update shards. For saving and updating
    see `beside_micro_batch`.
    """
    weights = float(workload.parameter_bytes)
    share = -(-workload.num_micro_batches // world_size)
    half = 0.5 if workload.autocast in HALF_PRECISION else 1.0
    largest = max(workload.bucket_bytes, max(workload.tensors_bytes, default=0))
    update = update_of(workload, world_size)
    updated = float(update.updated_bytes(workload, world_size))
    of_buckets = 2.0 * min(largest, weights)
    if in_memory > 1:
        of_buckets = weights * (in_memory - 1) / in_memory
    by_purpose = {
        "parameters": weights + workload.frozen_bytes,
        "gradients": weights,
        "running": weights,
        "sums": weights * max(0, share.bit_length() - 1),
        "optimizer": updated * workload.optimizer_vectors,
        "activations": half * workload.activation_bytes * workload.micro_batch_size,
        "buckets": update.arriving_bytes(workload, world_size, of_buckets),
    }
    copied = by_purpose["parameters"] + by_purpose["optimizer"]
    by_purpose |= {
        "saving": copied if is_whole else 0.0,
        "updating": updated * workload.update_vectors,
    }
    return beside_micro_batch(by_purpose) | {"library": float(LIBRARY_BYTES)}


REMEDIES = {
    "activations": "use smaller micro-batches",
    "running": "split the layers, or use a device with more memory",
    "sums": "use more workers, or larger micro-batches",
    "optimizer": "let each worker update a shard (exchange.update_at = shards)",
}


def remedy(parts: dict[str, float]) -> str:
    """Say what would make the largest part smaller."""
    largest = max(parts, key=parts.__getitem__)
    return REMEDIES.get(largest, REMEDIES["running"])


def beside_micro_batch(parts: dict[str, float]) -> dict[str, float]:
    """Reduce "saving" and "updating" to what they need beyond the memory that is free by then.

    "saving" is the first worker's copy of its state for a checkpoint (models in parts are written
    tensor by tensor). "updating" is what an update makes for itself. No micro-batch runs at either.
    """
    under_way = parts["running"] + parts["sums"] + parts["activations"]
    saving = max(0.0, parts["saving"] - under_way)
    updating = max(0.0, parts["updating"] - under_way - saving)
    return parts | {"saving": saving, "updating": updating}
