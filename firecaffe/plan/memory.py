"""What one worker holds in memory during a step, in bytes."""

from firecaffe.plan.compute import HALF
from firecaffe.plan.workload import Workload

LIBRARY_BYTES = 600_000_000
"""Of a process with torch loaded, or of a GPU's context."""


def memory_bytes(workload: Workload, world_size: int) -> dict[str, float]:
    """By what it is for.

    Sums: of the micro-batch tree's nodes that wait for their neighbors, one at each level at most.
    Buckets: what arrives, beside the gradients, of the largest one.
    """
    weights = float(workload.parameter_bytes)
    share = -(-workload.num_micro_batches // world_size)
    half = 0.5 if workload.autocast in HALF else 1.0
    largest = max(workload.bucket_bytes, max(workload.tensors_bytes, default=0))
    return {
        "parameters": weights,
        "gradients": weights,
        "sums": weights * max(0, share.bit_length() - 1),
        "optimizer": weights * workload.optimizer_vectors,
        "activations": half * workload.activation_bytes * workload.micro_batch_size,
        "buckets": 2.0 * min(largest, weights),
        "library": float(LIBRARY_BYTES),
    }
