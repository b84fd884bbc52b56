"""Torch's own tests of DistributedDataParallel with `parallelize` in its place.

Those that pass with DDP itself on two ranks with Gloo and no GPU (torch 2.13), but for `REFUSED`.
"""

from pathlib import Path

import pytest
import torch

from firecaffe.script.parallelize import parallelize
from tests.ranks.torch_ddp_tests import run
from tests.world import Ranks

ANOTHER_HOOK = "registers a communication hook of its own, and there is one already"

REFUSED = {
    "test_accumulate_gradients_no_sync_allreduce_hook": ANOTHER_HOOK,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": ANOTHER_HOOK,
    "test_ddp_comm_hook_logging": ANOTHER_HOOK,
    "test_ddp_hook_parity_allreduce": ANOTHER_HOOK,
    "test_ddp_hook_parity_allreduce_process_group": ANOTHER_HOOK,
    "test_ddp_hook_parity_post_localSGD": ANOTHER_HOOK,
    "test_ddp_hook_parity_powerSGD": ANOTHER_HOOK,
    "test_ddp_profiling_torch_profiler": "counts Gloo's all_reduces in a profile",
    "test_ddp_python_error_logged": "registers another hook, and looks into DDP's log for it",
    "test_ddp_static_graph_nested_types": "wraps a model that is in DDP already",
}
"""Test -> why it cannot pass."""

PASSING = (
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_logging_data_cpu",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_sink_noclone",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_detect_ddp_is_actually_static",
    "test_different_graph_across_ranks",
    "test_grads_same_across_ranks_with_no_sync",
    "test_invalid_static_graph",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_post_localSGD_optimizer_parity",
    "test_post_localSGD_optimizer_parity_grad_is_view",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
    "test_post_localSGD_optimizer_step_reload",
    "test_skip_all_reduce_unused_parameters",
    "test_stateless_api_with_ddp",
    "test_static_graph_api_cpu",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
)


def run_one(name: str, folder: str) -> str | int:
    torch.set_num_threads(1)
    return run(name, folder, parallelize)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSING)
def test_torchs_own_test_passes(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Each in processes of its own: some leave hooks or settings behind."""
    for wrapped in ranks.run(2, run_one, name, str(tmp_path)):
        # A skipped test says why; one that wraps no model shows nothing.
        assert isinstance(wrapped, int), wrapped
        assert wrapped > 0
