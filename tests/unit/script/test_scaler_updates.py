"""The updates of a scaler are counted for each training that asks, as those of a GAN's two do."""

from torch.amp.grad_scaler import GradScaler

from firecaffe.script.scaler_updates import after_each_update


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
