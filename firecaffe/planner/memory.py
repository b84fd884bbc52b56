"""Bytes that one worker holds in memory during a step."""

from dataclasses import replace

from firecaffe.planner.cluster import Device
from firecaffe.planner.compute_time import HALF_PRECISION
from firecaffe.planner.update_price import update_of
from firecaffe.planner.workload import Workload

LIBRARY_BYTES = 600_000_000
"""Memory of a process with torch loaded, or of a GPU's context."""


SLACK = 0.77
"""Additional memory on a CPU, over that of activations and passing gradients. Fitted.

The median of the 16 one-worker rows of benchmarks/results/memory.md.
"""

SLACK_LOW = 0.5
"""The least share of that slack, so that each of these rows is in the band (googlenet: 0.55)."""

ACTIVATIONS_HIGH = 0.5
"""The most uncounted memory, over the same sum. With LIBRARY_BYTES, it covers all these rows."""

MAX_MICRO_BATCH = 256
"""The largest default micro-batch, in images: ImageNet's records took no more on a device."""

MAX_MICRO_BATCH_ON_CPU = 8
"""The largest on a CPU: a core's rate grows no more, and more leaves can be shared evenly."""

LIBRARY_LOW = 0.5
"""The share of LIBRARY_BYTES that a process may do with."""


def memory_band(parts: dict[str, float]) -> tuple[float, float]:
    """The least and the most bytes that a worker may hold."""
    whole = sum(parts.values())
    low = whole - (1 - LIBRARY_LOW) * parts["library"]
    low -= (1 - SLACK_LOW) * parts["allocator"]
    return low, whole + ACTIVATIONS_HIGH * (parts["activations"] + parts["backward"])


def usual_micro_batch(workload: Workload, device: Device) -> int:
    """The largest power of two up to `most_micro_batch` that certainly fits the device, or 1."""
    size, memory = most_micro_batch(device), device.memory_bytes
    while size > 1:
        sized = replace(workload, micro_batch_size=size, global_batch_size=size)
        if memory_band(on_device(memory_bytes(sized, 1), device))[1] <= memory:
            break
        size //= 2
    return size


def on_device(parts: dict[str, float], device: Device) -> dict[str, float]:
    """Add what the device's allocator takes; that of GPUs is assumed to take nothing."""
    slack = 0.0 if _is_gpu(device) else SLACK * (parts["activations"] + parts["backward"])
    return parts | {"allocator": slack}


def most_micro_batch(device: Device) -> int:
    return MAX_MICRO_BATCH if _is_gpu(device) else MAX_MICRO_BATCH_ON_CPU


def _is_gpu(device: Device) -> bool:
    return device.library.startswith("cudnn")


def memory_bytes(
    workload: Workload, world_size: int, in_memory: int = 1, is_whole: bool = True
) -> dict[str, float]:
    """Bytes of one worker by purpose. in_memory: workers of a host that add in shared memory.

    is_whole: whether each worker has the whole model. "activations" is what autograd keeps at the
    worst moment of backward, and "backward" the gradients of a layer's output and input then.
    "gradients" are the buckets, which end up with the sums; "running" are gradients of the running
    micro-batch, until all are put into buckets. "sums" are nodes of the micro-batch tree that wait
    for neighbors, at most one on each level. "buckets" is what arrives of the largest one; in
    shared memory, the parts that this worker sums. "optimizer" is the largest shard, if workers
    update shards. For saving, updating and evaluating see `beyond_free_memory`.
    """
    weights = float(workload.parameter_bytes)
    share = -(-workload.num_micro_batches // world_size)
    kept, passing = _worst_moment(workload)
    half = 0.5 if workload.autocast in HALF_PRECISION else 1.0
    largest = max(workload.bucket_bytes, max(workload.tensors_bytes, default=0))
    update = update_of(workload, world_size)
    updated = float(update.updated_bytes(workload, world_size))
    of_buckets = 2.0 * min(largest, weights) * (world_size > 1)
    if in_memory > 1:
        of_buckets = weights * (in_memory - 1) / in_memory
    by_purpose = {
        "parameters": weights + workload.frozen_bytes,
        "gradients": weights,
        "running": weights,
        "sums": weights * max(0, share.bit_length() - 1),
        "optimizer": updated * workload.optimizer_vectors,
        "activations": half * kept,
        "backward": half * passing,
        "buckets": update.arriving_bytes(workload, world_size, of_buckets),
    }
    copied = by_purpose["parameters"] + by_purpose["optimizer"]
    by_purpose |= {
        "saving": copied if is_whole else 0.0,
        "updating": updated * workload.update_vectors,
        "evaluating": evaluating_bytes(workload),
    }
    return beyond_free_memory(by_purpose) | {"library": float(LIBRARY_BYTES)}


def _worst_moment(workload: Workload) -> tuple[float, float]:
    """Bytes of a micro-batch that are kept and passed on when they take most, as float32.

    After a layer's backward, its activations are freed, and its weights' gradients exist.
    """
    size, made = workload.micro_batch_size, float(workload.parameter_bytes)
    # Activations of other micro-batches, or gathered from other workers.
    kept = workload.activation_bytes - sum(layer.kept_bytes for layer in workload.layers)
    worst, most = (0.0, 0.0), -1.0
    for layer in workload.layers:
        kept += layer.kept_bytes
        passing = layer.moved_bytes if layer.backward_share else 0.0
        if most < size * (kept + passing) + made:
            worst, most = (size * kept, size * passing), size * (kept + passing) + made
        made -= sum(layer.parameters_bytes)
    return worst


def evaluating_bytes(workload: Workload) -> float:
    """Input and output of the largest call of an evaluation, as float32."""
    largest = max((layer.moved_bytes for layer in workload.layers), default=0.0)
    return workload.eval_batch_size * largest


REMEDIES = {
    "activations": "use smaller micro-batches",
    "backward": "use smaller micro-batches",
    "allocator": "use smaller micro-batches",
    "evaluating": "use a smaller train.eval_batch_size",
    "running": "split the layers, or use a device with more memory",
    "sums": "use more workers, or larger micro-batches",
    "optimizer": "let each worker update a shard (exchange.update_at = shards)",
}


def remedy(parts: dict[str, float]) -> str:
    largest = max(parts, key=parts.__getitem__)
    return REMEDIES.get(largest, REMEDIES["running"])


def beyond_free_memory(parts: dict[str, float]) -> dict[str, float]:
    """Reduce memory needed between micro-batches to what exceeds the memory that is free then.

    "saving" is the first worker's copy of its state for a checkpoint (models in parts are written
    tensor by tensor). "updating" is the temporary memory of an update, "evaluating" the input and
    output of the largest call. No micro-batch runs during any of these.
    """
    free = sum(parts[name] for name in ("running", "sums", "activations", "backward"))
    beyond = dict[str, float]()
    for name in ("saving", "updating", "evaluating"):
        beyond[name] = max(0.0, parts[name] - free)
        free += beyond[name]
    return parts | beyond
