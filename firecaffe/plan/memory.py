"""What one worker holds in memory during a step, in bytes."""

from firecaffe.plan.compute import HALF_PRECISION
from firecaffe.plan.update import update_of
from firecaffe.plan.workload import Workload

LIBRARY_BYTES = 600_000_000
"""Memory of a process with torch loaded, or of a GPU's context."""


ACTIVATIONS_HIGH = 1.2
"""Share of the activations that a step may hold on top of them: gradients under way, libraries'
copies in layouts of their own, and freed memory that an allocator keeps. Measured on a CPU by
`firecaffe bench step`, from micro-batches of 4 to 32: 0.27 (nin_cifar), 0.67 (resnet18), 1.1
(googlenet); 2.9 of the few that AlexNet has, which is outside.
"""

LIBRARY_LOW = 0.5
"""Share of LIBRARY_BYTES that a process may do with."""


def memory_band(parts: dict[str, float]) -> tuple[float, float]:
    """The least and the most that a worker may hold, of `memory_bytes`' parts."""
    whole = sum(parts.values())
    low = whole - (1 - LIBRARY_LOW) * parts["library"]
    return low, whole + ACTIVATIONS_HIGH * parts["activations"]


def memory_bytes(
    workload: Workload, world_size: int, in_memory: int = 1, is_whole: bool = True
) -> dict[str, float]:
    """Memory by what it is for. in_memory: the workers of a host that add gradients in memory which
    they share. is_whole: whether each worker has the whole model.

    Gradients: the buckets, in which their sums end.
    Running: what backward of the running micro-batch has made, which is kept until all of it has
    been put into the buckets.
    Sums: of the micro-batch tree's nodes that wait for their neighbors, one at each level at most.
    Buckets: what arrives, beside the gradients, of the largest one; in shared memory the others'
    parts of the sums that this worker makes. Optimizer: of the worker that has most, if each has a
    shard.
    Saving: what the first worker has more while it copies its state for a checkpoint, when no
    micro-batch is under way. A model in parts is written tensor by tensor.
    Updating: what an update makes for itself, as far as it is more than what was there before it,
    and after it for a checkpoint: no micro-batch is under way then either.
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
    found = {
        "parameters": weights + workload.frozen_bytes,
        "gradients": weights,
        "running": weights,
        "sums": weights * max(0, share.bit_length() - 1),
        "optimizer": updated * workload.optimizer_vectors,
        "activations": half * workload.activation_bytes * workload.micro_batch_size,
        "buckets": update.arriving_bytes(workload, world_size, of_buckets),
    }
    copied = found["parameters"] + found["optimizer"]
    found |= {"saving": copied if is_whole else 0.0, "updating": updated * workload.update_vectors}
    return beside_micro_batch(found) | {"library": float(LIBRARY_BYTES)}


def beside_micro_batch(parts: dict[str, float]) -> dict[str, float]:
    """The parts of a memory, of which "saving" and "updating" are given as all that they take. No
    micro-batch is under way then, nor is the other one; what is more than those is left of them.
    """
    under_way = parts["running"] + parts["sums"] + parts["activations"]
    saving = max(0.0, parts["saving"] - under_way)
    updating = max(0.0, parts["updating"] - under_way - saving)
    return parts | {"saving": saving, "updating": updating}
