"""Functions for a script's own loop: what they are given wrongly, in one line; and what they do."""

import copy
import datetime
import inspect
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule

import firecaffe
from benchmarks.training.unusual.layers import PIXELS, WIDTH, Clamp, Words
from benchmarks.training.unusual.teachers import Teacher
from firecaffe.cluster.groups import group_of_one
from firecaffe.errors import RecipeError, RunError
from firecaffe.script.local import after_each_update
from firecaffe.script.script_arguments import warn_of_own_state
from firecaffe.script.script_exchange import host_key, ranks_per_host

# --- arguments ------------------------------------------------------------------------------------

NET = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
SGD = optim.SGD(NET.parameters(), 0.1)
LAYERS = {"0": "neurons"}


SHARDED = nn.Sequential(nn.Linear(2, 2))
# As `torch.distributed.fsdp.fully_shard` does.
SHARDED[0].__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})


def wrapper() -> optim.Optimizer:
    """As accelerate's: an Optimizer that has never been made as one."""
    made = optim.SGD.__new__(optim.SGD)
    made.__dict__["param_groups"] = SGD.param_groups
    return made


def in_backward() -> nn.Module:
    """As `torch.distributed.optim._apply_optimizer_in_backward` leaves it."""
    model: Any = nn.Linear(2, 2)
    model.weight._in_backward_optimizers = []
    return cast(nn.Module, model)


def function(steps: int, rate: float = 0.1) -> None: ...


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]

T, P, N = firecaffe.train, firecaffe.parallelize, firecaffe.launch
L, S = firecaffe.adapt.average_locally, firecaffe.adapt.split_layers
A, H = firecaffe.adapt.attach, firecaffe.adapt.ddp_hook
SLOWMO = {"outer": "slowmo"}
DELAYED = {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": nn.Parameter()}
FROZEN = nn.Linear(2, 2).requires_grad_(False)
SPARSE = nn.Sequential(nn.Embedding(3, 2, sparse=True))
BARE = nn.Sequential(nn.BatchNorm2d(2, affine=False))
META = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
INT8 = {"compressor": "int8"}

CALLS: list[Call] = [
    (T, (firecaffe.Recipe(),), {"modle": nn.Linear}, "train: .*'modle'; did you mean model"),
    (P, ([NET],), {}, r"parallelize: module is \[Sequential.*one network"),
    (P, (nn.Linear,), {}, r"parallelize: module is the class Linear; .*Linear\(…\)"),
    (P, (None,), {}, "parallelize: module is None; expected a network"),
    (P, (lambda: NET,), {}, "parallelize: module is <function.*not what makes it"),
    (P, (), {}, "parallelize: .*'module'"),
    (P, (SHARDED,), {}, "module.0 is in FSDPModule already"),
    (P, (NET,), {"exchang": "tree"}, "'exchang'; did you mean exchange"),
    (P, (NET,), {"bucket_cap": 1}, "'bucket_cap'; did you mean bucket_cap_mb"),
    (P, (NET,), {"exchange": None}, "exchange is None; it must be a name"),
    (P, (NET,), {"exchange": "star"}, "no exchange 'star'.*tree.*, auto"),
    (P, (NET,), {"exchange": "ring", **INT8}, "int8 adds in the order of the tree.*ring"),
    (P, (NET,), {"compressor": ["int8"]}, r"compressor is \['int8'\]; it must be one of none, "),
    (P, (NET,), {"device_ids": "tree"}, "exchange='tree'"),
    (P, (NET,), {"mixed_precision": object()}, "mixed_precision"),
    (P, (NET,), DELAYED, "delay_all_reduce_named_params"),
    (P, (NET,), {"timeout_s": 0.0}, "timeout_s is 0"),
    (P, (NET,), {"timeout_s": "5"}, "timeout_s is '5'; it must be a number"),
    (P, (NET,), {"timeout_s": datetime.timedelta(5)}, "timeout_s is datetime.*number of seconds"),
    (P, (NET,), {"process_group": [0, 1]}, r"process_group is \[0, 1\]; expected a group"),
    (P, (NET,), {"process_group": dist.GroupMember.NON_GROUP_MEMBER}, "this rank is not in"),
    (P, (nn.ReLU(),), {}, "no parameter to train"),
    (P, (FROZEN,), {}, "no parameter to train"),
    (P, (in_backward(),), {}, "in backward"),
    (P, (META,), {}, "on cpu, meta"),
    (P, (nn.Linear(2, 2).double(),), INT8, "torch.float64"),
    (P, (SPARSE,), INT8, "int8.* 0 are sparse"),
    (L, ([NET], SGD), {}, "average_locally: model is .*one network"),
    (L, (SHARDED, SGD), {}, "average_locally: model.0 is in FSDPModule already"),
    (L, (NET, optim.SGD), {}, r"optimizer is the class SGD; .*SGD\(model.parameters\(\)"),
    (L, (NET, None), {}, "average_locally: optimizer is None; expected a torch.optim.Optimizer"),
    (L, (NET, wrapper()), {}, r"average_locally: optimizer is a wrapper \(SGD\)"),
    (L, (nn.Linear(2, 2), SGD), {}, "optimizer has none of the model's parameters"),
    (L, (NET, SGD), {"evry": 3}, "average_locally: .*'evry'; did you mean every"),
    (L, (NET,), {}, "average_locally: .*'optimizer'; it takes model, optimizer, every"),
    (L, (NET, SGD), {"every": 2.5}, "average_locally: every is 2.5; it must be a whole number"),
    (L, (NET, SGD), {"every": True}, "average_locally: every is True"),
    (L, (NET, SGD), {"outer": ["average"]}, r"outer is \['average'\]; it must be one of"),
    (L, (NET, SGD), {**SLOWMO, "outer_lr": "1"}, "average_locally: outer_lr is '1'"),
    (L, (NET, SGD), {**SLOWMO, "outer_momentum": "0"}, "outer_momentum is '0'"),
    (L, (NET, SGD), {"scaler": 1024.0}, "scaler is 1024.0; expected a torch.amp.GradScaler"),
    (L, (NET, SGD), {"process_group": 0}, "average_locally: process_group is 0"),
    (S, ([NET], LAYERS), {}, "split_layers: model is .*one network"),
    (S, (SHARDED, LAYERS), {}, "split_layers: model.0 is in FSDPModule already"),
    (S, (NET, [("0", "neurons")]), {}, r"split_layers: layers is \[.*expected a table"),
    (S, (NET, "0"), {}, "split_layers: layers is '0'; expected a table"),
    (S, (NET, None), {}, "split_layers: layers is None"),
    (S, (NET, {0: "neurons"}), {}, "split_layers: layers has 0: 'neurons'; expected names"),
    (S, (NET, {"0": 2}), {}, "split_layers: layers has '0': 2; expected names"),
    (S, (NET, {}), {}, "split_layers: no layer is named"),
    (S, (BARE, {"0": "rows"}), {}, "split_layers: .* no parameter"),
    (S, (NET, LAYERS), {"part": 2}, "split_layers: .*'part'; did you mean parts"),
    (S, (NET, LAYERS), {"parts": 2.0}, "split_layers: parts is 2.0; it must be a whole number"),
    (S, (NET, LAYERS), {"parts": 0}, "split_layers: parts is 0; .* at least 1"),
    (S, (NET, LAYERS), {"timeout_s": "1"}, "timeout_s is '1'"),
    (S, (NET, LAYERS), {"timeout_s": -1.0}, "timeout_s"),
    (S, (NET, LAYERS), {"process_group": 3}, "split_layers: process_group is 3"),
    (A, (NET, None, "runs/mine"), {}, "attach: optimizer is None"),
    (A, (NET, optim.SGD, "runs/mine"), {}, "attach: optimizer is the class SGD"),
    (A, ([NET], SGD, "runs/mine"), {}, "attach: model is .*one network"),
    (A, (NET, SGD, None), {}, "attach: folder is None; expected the path of a folder"),
    (A, (NET, SGD, ""), {}, "attach: folder is ''"),
    (A, (NET, SGD), {"fodler": "runs"}, "attach: .*'?fold"),
    (H, (3,), {}, "exchange is 3; it must be a name"),
    (H, (), {"process_group": 3}, "ddp_hook: process_group is 3"),
    (H, (), {"compresor": "int8"}, "ddp_hook: .*'compresor'; did you mean compressor"),
    (N, (function, 2), {"arg": (1,)}, "launch: .*'arg'; did you mean args"),
    (N, (function, 2), {"args": 1}, r"launch: args is 1; expected the arguments in a tuple"),
    (N, (function, 2), {"args": "ab"}, "launch: args is 'ab'; expected"),
    (N, (function, 2), {"kwargs": [1]}, r"launch: kwargs is \[1\]; expected the arguments by name"),
    (N, (function, 2), {"kwargs": {1: 2}}, "launch: kwargs is {1: 2}"),
    (N, (function, 2), {}, "launch: function: missing a required argument: 'steps'"),
    (N, (function, 2), {"kwargs": {"step": 3}}, "launch: function: .*'steps?'"),
    (N, (function, 2), {"args": (1,), "kwargs": {"rat": 3}}, "'rat'; did you mean rate"),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_one_line_before_anything_is_joined(call: Call) -> None:
    called, args, kwargs, line = call
    with pytest.raises(RecipeError, match=line) as caught:
        called(*args, **kwargs)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


def test_an_error_is_also_of_the_kind_that_ddp_raises() -> None:
    with pytest.raises(TypeError):
        P(NET, exchang="tree")
    with pytest.raises(ValueError, match="star"):
        P(NET, exchange="star")
    with pytest.raises(RuntimeError, match="no parameter"):
        P(nn.ReLU())
    reducer = patch("torch._dynamo.config.optimize_ddp", "python_reducer")
    with reducer, pytest.raises(ValueError, match="python_reducer"):
        P(NET)


def test_what_is_done_already_is_not_done_twice(tmp_path: Path) -> None:
    attached = A(NET, SGD, tmp_path / "one")
    with pytest.raises(RecipeError, match=r"timed already, into .*one"):
        A(NET, SGD, tmp_path / "two")
    assert not (tmp_path / "two").exists()
    attached.detach()
    A(NET, SGD, tmp_path / "two").detach()
    with group_of_one(torch.device("cpu")):
        averaged = L(NET, SGD)
        with pytest.raises(RecipeError, match="averaged already"):
            L(NET, SGD)
        averaged.detach()
        L(NET, SGD).detach()
        with pytest.raises(RecipeError, match="module is in DistributedDataParallel already"):
            P(P(NET))
        split = S(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), LAYERS)
        with pytest.raises(RecipeError, match="split already"):
            S(split, {"model.1": "neurons"})


def test_a_ddp_around_that_of_parallelize_is_told_in_its_first_forward() -> None:
    """As accelerate's `prepare` and Lightning's own strategies make one."""
    with group_of_one(torch.device("cpu")):
        inner = P(nn.Linear(4, 2))
        inputs = torch.ones(1, 4)
        inner(inputs)
        for outer in (inner, nn.Sequential(inner)):
            both = nn.parallel.DistributedDataParallel(outer)
            with pytest.raises(RecipeError, match="in another DistributedDataParallel"):
                both(inputs)
        inner(inputs)  # by itself as before

        class Student(nn.Linear):
            """Calls another network that is in a DDP of its own."""

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                outputs: torch.Tensor = super().forward(inputs) - inner(inputs)
                return outputs

        nn.parallel.DistributedDataParallel(Student(4, 2))(inputs)


def test_without_a_word_the_exchange_is_chosen_as_in_a_recipe() -> None:
    for function in (P, L, H):
        default = inspect.signature(function).parameters["exchange"].default
        assert default == firecaffe.ExchangeConfig().algorithm == "auto"


def test_comm_hook_joins_nothing() -> None:
    """A launcher such as Lightning's starts the other ranks, and the group, after it."""
    H("tree")
    assert not dist.is_initialized()
    with pytest.raises(RecipeError, match="no exchange"):
        H("star")


# --- hosts, first forwards and scalers ------------------------------------------------------------


def test_ranks_of_a_host_stand_together() -> None:
    assert ranks_per_host(["a", "a", "b", "b"]) == [2, 2]
    assert ranks_per_host(["a", "b", "b"]) == [1, 2]
    assert ranks_per_host(["a", "b", "a"]) == [1, 1, 1]


def test_a_host_is_also_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for rank, local_rank in ((0, 0), (1, 1), (2, 0)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        keys.append(host_key())
    assert ranks_per_host(keys) == [2, 1]
    monkeypatch.delenv("LOCAL_RANK")
    assert ranks_per_host([host_key(), keys[0]]) == [1, 1]


IMAGES, VALUES = torch.randn(2, 1, 8, 8), torch.randn(2, WIDTH)
assert IMAGES[0].numel() == PIXELS


def told(network: nn.Module, inputs: torch.Tensor, averages: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_own_state(network, "parallelize", averages)
        network.eval()(inputs)
        network.train()(inputs)
        network(inputs)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("network", "inputs", "averages", "said"),
    [
        (Words(max_norm=0.1), IMAGES, False, "parallelize.*table.weight"),
        # An average takes trained weights, and no others.
        (Words(max_norm=0.1), IMAGES, True, ""),
        (Teacher(), VALUES, True, "teacher.weight, teacher.bias"),
        (nn.Sequential(Clamp()), VALUES, True, "extra state of 0"),
        (nn.Sequential(nn.Linear(WIDTH, 2), nn.BatchNorm1d(2)), VALUES, False, ""),
    ],
)
def test_state_that_forward_changes_is_told_once(
    network: nn.Module, inputs: torch.Tensor, averages: bool, said: str
) -> None:
    lines = told(network, inputs, averages)
    assert len(lines) == bool(said)
    assert re.search(said, " ".join(lines))
    assert not network._forward_hooks
    assert not network._forward_pre_hooks


def test_a_copy_looks_for_itself() -> None:
    network = Words(max_norm=0.1)
    warn_of_own_state(network, "parallelize", averages=False)
    with pytest.warns(UserWarning, match=r"table\.weight"):
        copy.deepcopy(network)(IMAGES)
    assert network._forward_hooks


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert not told(Words(max_norm=0.1), IMAGES, averages=False)
    monkeypatch.undo()


def test_several_are_called_and_each_ends_by_itself() -> None:
    scaler, called = GradScaler("cpu", enabled=False), list[str]()
    ends = [after_each_update(scaler, lambda: called.append("a"))]
    ends.append(after_each_update(scaler, lambda: called.append("b")))
    scaler.update()
    ends[0]()
    ends[0]()
    scaler.update()
    assert called == ["a", "b", "b"]
    ends[1]()
    scaler.update()
    assert called == ["a", "b", "b"]


def test_arguments_without_room_are_told_with_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")  # `write` names no file

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match=f"{tmp_path}: no room .* TMPDIR"):
        firecaffe.launch(print, 1, args=("all of it",))
    assert not list(tmp_path.iterdir())
