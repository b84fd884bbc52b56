"""`firecaffe train RECIPE.toml`: train, on N local ranks or in the world that torchrun made."""

from firecaffe.cluster.handover import handed
from firecaffe.recipe.checked_recipe import Prepared


def main(argv: list[str]) -> int:
    # A rank loads nothing that its launcher alone uses, nor a launcher what its ranks do.
    if isinstance(prepared := handed(), Prepared):
        from firecaffe.training.build_training import train_prepared

        train_prepared(prepared)
        return 0
    from firecaffe.cli.start_training import start

    return start(argv)
