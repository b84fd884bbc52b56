"""firecaffe.train(…, workers=N) in a script, against the same script under torchrun."""

import json
from pathlib import Path

from tests.typed import python, torchrun

# No `if __name__ == "__main__"`: no worker runs the script again.
SCRIPT = """
import json, os, sys
import torch
from torch import nn
import firecaffe

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 2))

class Noting(firecaffe.Plugin):
    def __init__(self, folder):
        self.folder = folder

    def around_batches(self, batches, world):
        open(f"{self.folder}/{world.rank}-of-{world.world_size}", "w").close()
        return batches

    def check(self, world_size):
        if world_size == 3:
            raise firecaffe.DataError("not on three")

RECIPE = firecaffe.Recipe(
    train=firecaffe.TrainConfig(global_batch_size=16, micro_batch_size=4, steps=3),
    run=firecaffe.RunConfig(tensorboard=False),
)
IMAGES = (torch.arange(64 * 64).reshape(64, 1, 8, 8) % 251).to(torch.uint8)
DATA = firecaffe.TensorDataset(IMAGES, torch.arange(64) % 2, num_classes=2)

def train(train_set=DATA, **more):
    return firecaffe.train(RECIPE, Net, train_set, DATA, **more)

def told(**more):
    try:
        train(**more)
    except firecaffe.FirecaffeError as error:
        return [type(error).__name__, str(error), error.exit_code]
"""

WORKERS = """
RECIPE.write("recipe.toml")
by_path = firecaffe.train("recipe.toml", Net, DATA, DATA, workers=1)
result = train(workers=2, plugins=[Noting(os.getcwd())])
with open("workers.json", "w") as file:
    json.dump({
        "digest": result.weights_sha256,
        "outputs": result.model(IMAGES[:3] / 255).shape,
        "by path": by_path.weights_sha256,
        "plugins": json.load(open(result.folder / "result.json"))["plugins"],
        "wrong": told(workers=0),
        "restarts": told(max_restarts=1),
        "plugin": told(plugins=[Noting]),
        "refused": told(workers=3, plugins=[Noting(".")]),
        "wrong loss": told(workers=2, loss=3),
        "too many": told(workers=7),
        "one set": told(workers=2, train_set=[[1.0]]),
        "nowhere": told(workers=2, resume="nowhere"),
    }, file)
"""

TORCHRUN = """
result = train()
if os.environ["RANK"] == "0":
    again = told(workers=2)
    with open("torchrun.json", "w") as file:
        json.dump({"digest": result.weights_sha256, "again": again}, file)
"""


def test_workers_come_to_the_weights_of_torchrun(tmp_path: Path) -> None:
    for name, end in (("workers", WORKERS), ("torchrun", TORCHRUN)):
        (tmp_path / f"{name}.py").write_text(SCRIPT + end)
    started = python("workers.py", cwd=tmp_path)
    assert started.returncode == 0, started.stderr
    launched = torchrun(2, "torchrun.py", cwd=tmp_path)
    assert launched.returncode == 0, launched.stderr
    own = json.loads((tmp_path / "workers.json").read_text())
    other = json.loads((tmp_path / "torchrun.json").read_text())
    assert own["digest"] == own["by path"] == other["digest"]
    assert (tmp_path / "0-of-2").exists()
    assert (tmp_path / "1-of-2").exists()
    assert own["outputs"] == [3, 2]
    assert own["plugins"] == ["__main__.Noting"]
    assert own["wrong"][0] == "RecipeError"
    assert "workers is 0" in own["wrong"][1]
    assert own["restarts"][0] == "RecipeError"
    assert "max_restarts" in own["restarts"][1]
    assert own["plugin"][0] == "RecipeError"
    assert "plugins" in own["plugin"][1]
    assert own["refused"] == ["DataError", "not on three", 3]
    assert own["wrong loss"][0] == "RecipeError"
    # Before any worker is started: what ends a worker is a RankFailedError.
    assert own["too many"][0] == "RecipeError"
    assert own["one set"][0] == "DataError"
    assert own["nowhere"][0].endswith("CheckpointError") or own["nowhere"][0] == "RunError"
    assert other["again"][0] == "RecipeError"
    assert "workers" in other["again"][1]
