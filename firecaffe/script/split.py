"""A network split over the ranks of a group, for a user's own training loop."""

import json
import weakref
from collections.abc import Mapping

from torch import nn
from torch.distributed import ProcessGroup

from firecaffe.cluster.from_script import from_script
from firecaffe.inventory.network_state import check_state
from firecaffe.parallel.flow import PartGroup
from firecaffe.parallel.layer_split import Split, check_parts, choose_layers, replace_layers
from firecaffe.script.script_arguments import (
    ArgumentError,
    check_group,
    check_network,
    check_not_wrapped,
    check_timeout_s,
    check_whole_number,
    warn_of_own_state,
)
from firecaffe.script.script_exchange import join_launched_world, leave, meet, share_network
from firecaffe.user_code import shown


@from_script
def split_layers(
    model: nn.Module,
    layers: Mapping[str, str],
    process_group: ProcessGroup | None = None,
    *,
    parts: int | None = None,
    timeout_s: float | None = None,
) -> Split:
    """Split layers of a network over the ranks of a group.

    Each rank holds some parts of the weights, and so of gradients and of the optimizer's state. All
    ranks of the group must call this, and then train with the same samples, in the same steps; make
    the optimizer afterwards. This joins the launcher's world if `torch.distributed` is not
    initialized yet, as `parallelize` does, and gives all ranks the first one's weights and buffers.
    The result has the same bits on any number of ranks with the same `parts`.

    Args:
        model: The network, on its device, not in DDP. It is changed: its layers are replaced.
        layers: How each layer is split, by patterns of layers' names: `neurons` or `inputs` for a
            Linear, `filters` or `channels` (of its input) for a Conv2d. A BatchNorm is split with
            the `neurons` or `filters` of the layer before it. `rows` cuts the images of a Conv2d
            or a BatchNorm2d. `paths` is for a module that returns `torch.cat` of several, as
            Inception. The last pattern that matches decides.
        process_group: The ranks that hold one model together; by default all.
        parts: The number of parts of a layer; each rank holds equally many. By default one for
            each rank, and then the number of ranks changes bits.
        timeout_s: See `parallelize`.

    Raises: RecipeError, with the layer's name, if it cannot be split; LaunchError if the ranks do
    not find each other; AgreementError if they have different arguments or networks.

    Source: Krizhevsky 2014 (arXiv 1404.5997); Shoeybi et al. 2019 (Megatron-LM).
    """
    check_network("split_layers", "model", model)
    instead = "split the network first, and give what comes to DDP over the ranks of equal parts"
    check_not_wrapped("split_layers", "model", model, instead)
    if any(isinstance(module, Split) for module in model.modules()):
        raise ArgumentError("split_layers: model is split already; name all layers in one call")
    _check_layers(layers)
    check_group("split_layers", process_group)
    if parts is not None:
        check_whole_number("split_layers", "parts", parts, 1)
    check_timeout_s(timeout_s)
    check_state(model)
    chosen = choose_layers(model, layers)
    if parts is not None:
        check_parts(model, chosen, parts)  # before joining a world, which would stay
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if not devices:
        raise ArgumentError("split_layers: the network has no parameter")
    if len(devices) > 1:
        raise ArgumentError(
            f"split_layers: the parameters are on {', '.join(devices)}; take one device"
        )
    device = next(model.parameters()).device
    join_launched_world(device, timeout_s)
    world, _ = meet(process_group, device, timeout_s)
    num_parts = world.world_size if parts is None else parts
    if num_parts % world.world_size:
        size = world.world_size
        below, above = num_parts // size * size, -(-num_parts // size) * size
        would = f"{below} or {above}" if below else str(above)
        raise ArgumentError(
            f"split_layers: {size} ranks cannot hold {num_parts} parts equally; take parts={would}"
        )
    share_network(world, model, {"the words of split": json.dumps([chosen, num_parts])})
    group = PartGroup(world, num_parts)
    weakref.finalize(group, leave, world)  # after the last copy of the network
    warn_of_own_state(model, "split_layers", averages=False)
    return replace_layers(model, chosen, group)


def _check_layers(layers: object) -> None:
    example = "{'classifier.*': 'neurons'}"
    if not isinstance(layers, Mapping):
        raise ArgumentError(
            f"split_layers: layers is {shown(layers)}; expected a table, as {example}"
        )
    if not layers:
        raise ArgumentError(f"split_layers: no layer is named; say {example}")
    for pattern, word in layers.items():
        if not (isinstance(pattern, str) and isinstance(word, str)):
            asked = f"{shown(pattern)}: {shown(word)}"
            raise ArgumentError(f"split_layers: layers has {asked}; expected names, as {example}")
