"""What goes between stages whose layers are split: a tensor in parts goes on in parts.

Each worker of a stage sends its parts to the worker of the next one that has the same. So what
follows there is computed part by part, as it is without stages, and a part is what is sent.
"""

from typing import Any

from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from firecaffe.parallel.parts import PartGroup
from firecaffe.parallel.stages import Stage
from firecaffe.parallel.tensor import TensorInParts, whole

PARTS = "firecaffe: parts of a tensor"
"""The first key of what stands for such a tensor on its way."""


def pass_in_parts(stage: Stage, group: PartGroup) -> None:
    """Lets a stage take and give tensors in parts; what the last one gives is whole. group: the
    ranks that hold the stage.
    """

    def take(_: nn.Module, taken: tuple[Any, ...]) -> Any:
        return tree_map(lambda each: _in_parts(each, group), taken, is_leaf=_stands_for_parts)

    def give(_: nn.Module, __: Any, given: Any) -> Any:
        return whole(given) if stage.is_last else tree_map_only(TensorInParts, _on_its_way, given)

    stage.module.register_forward_pre_hook(take)
    stage.module.register_forward_hook(give)


def _on_its_way(tensor: TensorInParts) -> dict[str, Any]:
    tensor.check_followed()
    return {PARTS: tensor.own, "cut": tensor.cut, "dim": tensor.cut_dim, "maker": tensor.maker}


def _stands_for_parts(value: Any) -> bool:
    return isinstance(value, dict) and PARTS in value


def _in_parts(value: Any, group: PartGroup) -> Any:
    if not _stands_for_parts(value):
        return value
    return TensorInParts(group, value[PARTS], value["cut"], value["dim"], value["maker"])
