"""Torch's own tests of DistributedDataParallel, on CPUs, with `parallelize` in its place.

They are in torch's wheel (torch.testing._internal.distributed). Many ask for GPUs though nothing in
them needs one; here a GPU's number means the CPU. Those that pass with DDP itself on two ranks with
Gloo and no GPU (torch 2.13) pass, but for `REFUSED`.
"""

import os
import sys
import types
import unittest
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from firecaffe.script.ddp import parallelize
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

TIMEOUT_S = 30
MODULE = "torch.testing._internal.distributed.distributed_test"


def run(name: str, folder: str) -> str | int:
    """Why a test was skipped on this rank, else how many models it wrapped; raises as it does."""
    torch.set_num_threads(1)
    wrapped = 0

    def wrap(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        nonlocal wrapped
        wrapped += 1
        if arguments and not isinstance(arguments[0], str):
            arguments = ()  # device_ids
        for word in ("device_ids", "output_device"):
            options.pop(word, None)
        return parallelize(module, *arguments, **options)

    tests = load(folder)
    for part in ("barrier", "init_dir", "test_dir"):
        (Path(folder) / part).mkdir(exist_ok=True)
    suite = type("Suite", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {})
    test = suite(name)
    test.rank = int(os.environ["RANK"])
    test.file_name = f"{folder}/file"
    tests.Barrier.barrier_id = 0
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/init",
        rank=test.rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    with (
        patch.object(nn.parallel, "DistributedDataParallel", wrap),
        patch.object(tests, "DistributedDataParallel", wrap),
        OnCpu(),
        on_cpu(),
    ):
        try:
            test._barrier()
            getattr(test, name)()
        except (unittest.SkipTest, SystemExit) as skip:
            return f"skipped: {skip}"
        finally:
            dist.destroy_process_group()
    return wrapped


def load(folder: str) -> Any:
    """Torch's module of tests, whose decorators must not skip what asks for GPUs."""
    os.environ.update(BACKEND="gloo", TEMP_DIR=folder)
    if "expecttest" not in sys.modules and find_spec("expecttest") is None:
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub  # of its own assertions these tests use none
    from torch.testing._internal import common_distributed

    def keep(*_: Any) -> Any:
        return lambda function: function

    with (
        patch.object(common_distributed, "skip_if_lt_x_gpu", keep),
        patch.object(common_distributed, "skip_if_no_gpu", lambda function: function),
        patch.object(torch.cuda, "device_count", lambda: int(os.environ["WORLD_SIZE"])),
    ):
        return import_module(MODULE)


def cpu_of(device: Any) -> Any:
    """A device as it was asked for, but never a GPU."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or (
        isinstance(device, str | torch.device) and "cuda" in str(device)
    ):
        return torch.device("cpu")
    return device


class OnCpu(TorchFunctionMode):
    """A GPU's number, given to a function of torch's, means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = dict(kwargs or {})
        if "device" in words:
            words["device"] = cpu_of(words["device"])
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to and len(args) > 1 and not isinstance(args[1], Tensor):
            args = (args[0], cpu_of(args[1]), *args[2:])
        return func(*args, **words)


def on_cpu() -> Any:
    """Modules stay where they are, and there is nothing to wait for."""
    stack = ExitStack()
    to = nn.Module.to

    def to_cpu(module: nn.Module, *arguments: Any, **words: Any) -> nn.Module:
        if arguments:
            arguments = (cpu_of(arguments[0]), *arguments[1:])
        if "device" in words:
            words["device"] = cpu_of(words["device"])
        return to(module, *arguments, **words)

    stack.enter_context(patch.object(nn.Module, "cuda", lambda module, *_: module))
    stack.enter_context(patch.object(nn.Module, "to", to_cpu))
    for name in ("set_device", "synchronize"):
        stack.enter_context(patch.object(torch.cuda, name, lambda *_: None))
    stack.enter_context(
        patch.object(torch.cuda, "device_count", lambda: int(os.environ["WORLD_SIZE"]))
    )
    return stack


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSING)
def test_torchs_own_test_passes(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Each in processes of its own: some leave hooks or settings behind."""
    for wrapped in ranks.run(2, run, f"test_{name}", str(tmp_path)):
        # A skipped test says why; one that wraps no model shows nothing.
        assert isinstance(wrapped, int), wrapped
        assert wrapped > 0
