"""Fragments, in mode local: which parameters are averaged together.

The largest parameter goes first, each to the fragment that has the fewest elements so far. So all
are about as large as can be with whole parameters, the largest one is as large as the largest
parameter at least, and each has parameters of all depths.

Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication"; Graham 1969,
"Bounds on multiprocessing timing anomalies" (the largest first: 4/3 of the best at most).
"""

from collections.abc import Sequence

from firecaffe.errors import RecipeError


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """The places of each fragment's parameters, in ascending order. sizes: of all parameters.

    Raises: RecipeError if there are fewer parameters than fragments.
    """
    if fragments > len(sizes):
        raise RecipeError(
            f"synchrony.fragments is {fragments}, but the network has {len(sizes)} parameters that "
            "are trained; each fragment has one at least"
        )
    found = [list[int]() for _ in range(fragments)]
    held = [0] * fragments
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        # Of several the one with the fewest parameters, so that none is left without.
        lightest = min(range(fragments), key=lambda each: (held[each], len(found[each])))
        found[lightest].append(place)
        held[lightest] += sizes[place]
    return [sorted(each) for each in found]
