"""Torch's own tests of DistributedDataParallel with `parallelize` in its place.

Those that pass with DDP itself on two ranks with Gloo and no GPU (torch 2.13), but for `REFUSED`.
"""

from pathlib import Path

import pytest
import torch

from firecaffe.script.parallelize import parallelize
from tests.ranks.torch_ddp_tests import run
from tests.world import Ranks

REFUSED = {
    "registers a communication hook of its own, and there is one already": """
        accumulate_gradients_no_sync_allreduce_hook
        accumulate_gradients_no_sync_allreduce_with_then_hook
        ddp_comm_hook_logging ddp_hook_parity_allreduce ddp_hook_parity_allreduce_process_group
        ddp_hook_parity_post_localSGD ddp_hook_parity_powerSGD""",
    "registers another hook, and looks into DDP's log for it": "ddp_python_error_logged",
    "counts Gloo's all_reduces in a profile": "ddp_profiling_torch_profiler",
    "wraps a model that is in DDP already": "ddp_static_graph_nested_types",
}
"""Why a test cannot pass -> tests."""

PASSING = """
DistributedDataParallelCPU DistributedDataParallelCPU_grad_is_view
DistributedDataParallel_requires_grad DistributedDataParallel_with_amp_and_grad_is_view
accumulate_gradients_no_sync accumulate_gradients_no_sync_grad_is_view
compute_bucket_assignment_by_size_sparse_error_without_logger ddp_broadcast_buffer
ddp_broadcast_buffer_via_hook ddp_broadcast_buffers_deprecation_warning ddp_bucket_cap_mb_list
ddp_buffer_hook_allreduce ddp_buffer_hook_allreduce_return_future
ddp_build_debug_param_to_name_mapping_requires_grad ddp_control_flow_different_across_ranks
ddp_control_flow_same_across_ranks ddp_create_graph ddp_device_mesh_initialization
ddp_forward_backward_hook ddp_init_sync_buffers_with_forward_sync_buffers_false
ddp_join_respects_forward_sync_buffers_false ddp_logging_data_cpu
ddp_model_diff_num_params_across_ranks ddp_multiple_nested_unused_params_error ddp_namedtuple
ddp_new_tensor_in_fwd ddp_new_tensor_in_fwd_static_graph ddp_remove_autograd_hooks
ddp_returns_tensor_with_no_grad ddp_sink_noclone ddp_sync_module_states ddp_uneven_input_exception
ddp_uneven_input_join_disable ddp_unused_params_rebuild_buckets_exception ddp_zero_output_features
detect_ddp_is_actually_static different_graph_across_ranks grads_same_across_ranks_with_no_sync
invalid_static_graph output_unused_in_loss_dict_module output_unused_in_loss_tuple_module
post_localSGD_optimizer_parity post_localSGD_optimizer_parity_grad_is_view
post_localSGD_optimizer_parity_with_hierarchical_sgd
post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view
post_localSGD_optimizer_step_reload skip_all_reduce_unused_parameters stateless_api_with_ddp
static_graph_api_cpu static_graph_multi_forward undefined_grad_parity_unused_parameters
""".split()
"""Names without the `test_` that each begins with."""


def run_one(name: str, folder: str) -> str | int:
    torch.set_num_threads(1)
    return run(name, folder, parallelize)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSING)
def test_torchs_own_test_passes(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Each in processes of its own: some leave hooks or settings behind."""
    for wrapped in ranks.run(2, run_one, f"test_{name}", str(tmp_path)):
        # A skipped test says why; one that wraps no model shows nothing.
        assert isinstance(wrapped, int), wrapped
        assert wrapped > 0
