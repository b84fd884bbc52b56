"""Short patterns of parameter names that stand for one value per parameter."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence


def as_patterns(values: Mapping[str, float]) -> dict[str, float]:
    """Return patterns for a multiplier of each parameter, as `{"*.bias": 2.0}`.

    The last pattern that matches counts. A parameter without a match has 1.
    """
    found = {}
    for kind in dict.fromkeys(map(_kind, values)):  # weight, bias
        of_kind = [value for name, value in values.items() if _kind(name) == kind]
        most = Counter(of_kind).most_common(1)[0][0]
        if most != 1:
            found[f"*.{kind}"] = most
    if len(set(values.values())) == 1 and found:
        return {"*": next(iter(found.values()))}
    usual = {name: found.get(f"*.{_kind(name)}", 1.0) for name in values}
    others = {name: value for name, value in values.items() if value != usual[name]}
    for value in dict.fromkeys(others.values()):
        names = [name for name, own in others.items() if own == value]
        alike = {name for name, own in values.items() if own == value}
        found.update(dict.fromkeys(grouped(names, list(values), alike), value))
    return found


def grouped(names: Sequence[str], among: Sequence[str], may: Collection[str] = ()) -> list[str]:
    """Return patterns for names: a layer's if `names` and `may` have all of it, else each name."""
    found: list[str] = []
    wanted = {*names, *may}
    for name in names:
        layer = name.rpartition(".")[0]
        of_layer = [each for each in among if each.startswith(f"{layer}.")]
        is_whole = layer and len(of_layer) > 1 and wanted.issuperset(of_layer)
        found.append(f"{plain(layer)}.*" if is_whole else plain(name))
    return list(dict.fromkeys(found))


def plain(name: str) -> str:
    return re.sub(r"[*?[]", r"[\g<0>]", name)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
