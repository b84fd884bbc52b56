"""The recipe's [model] section."""

from dataclasses import dataclass, field
from typing import Any

from firecaffe.reference import without_folder


@dataclass(frozen=True)
class ModelConfig:
    """The network.

    Args:
        name: A network of docs/models, or a function that returns one:
            package.module:function, path/file.py:function, timm:NAME, torchvision:NAME; or a net
            of Caffe's, caffe:PATH.prototxt.
        args: Arguments of that function, as `args = { width = 32 }`.
        weights: What the first weights are taken from: a file, safetensors, .fcz or a state_dict
            of torch.save; a run's folder; or a checkpoint, as RUN/checkpoints/best. A resumed run
            does not read it. Empty: fresh ones, by the seed.
        freeze: Patterns of the names of parameters that are not trained, as
            `freeze = ["layer1.*"]`.
        low_rank: Layers that are two of lower rank, by patterns of layers' names, as
            `low_rank = { "classifier.0" = 128 }`. The last pattern that matches decides.
    """

    name: str = "nin_small"
    args: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    freeze: list[str] = field(default_factory=list)
    low_rank: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tells its steps from another network's: the name, with what changes it."""
        name = without_folder(self.name)
        words = [f"{word}={value!r}" for word, value in sorted(self.args.items())]
        words += [f"freeze={self.freeze!r}"] if self.freeze else []
        words += [f"low_rank={self.low_rank!r}"] if self.low_rank else []
        return f"{name}({', '.join(words)})" if words else name
