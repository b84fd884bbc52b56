"""The digest of all losses."""

from firecaffe.training.piece import extend_history


def test_history_tells_losses_apart_to_the_last_bit() -> None:
    losses = [0.1, 0.1 + 2**-56, 0.0, -0.0, 5e-324, *(float(x) for x in ("nan", "inf", "-inf"))]
    digests = [extend_history("", loss) for loss in losses]
    assert len(set(digests)) == len(losses)
    assert [extend_history("", loss) for loss in losses] == digests


def test_history_is_a_chain() -> None:
    def chain(*losses: float) -> str:
        history = ""
        for loss in losses:
            history = extend_history(history, loss)
        return history

    assert len({chain(1.0, 2.0), chain(2.0, 1.0), chain(1.0), chain(2.0), chain()}) == 5
    # SHA-256 of " 0x1.0000000000000p-1", by coreutils' sha256sum.
    assert chain(0.5) == "4b46b1a4f402036a08a39fe8d90608894b6909a75711f1584e906b338addc921"
