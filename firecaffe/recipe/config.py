"""The recipe's [train] and [checkpoint] sections. Their checks raise RecipeError."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from firecaffe.data import DataConfig
from firecaffe.errors import RecipeError
from firecaffe.value_checks import (
    BELOW_1,
    MAX_SAMPLES,
    MAX_STEPS,
    MAX_THREADS,
    NOT_NEGATIVE,
    UP_TO_1,
    Limits,
    check_limits,
)

LIMITS: dict[str, Limits] = {
    "global_batch_size": (1, MAX_SAMPLES),
    "micro_batch_size": (1, MAX_SAMPLES),
    "eval_batch_size": (1, MAX_SAMPLES),
    "batch_norm_samples": (0, MAX_SAMPLES),
    "threads": (1, MAX_THREADS),
    "steps": (0, MAX_STEPS),
    "epochs": (0, MAX_STEPS),
    "eval_every": (0, MAX_STEPS),
    "stop_after": (0, MAX_STEPS),
    "ema_decay": BELOW_1,
}


@dataclass(frozen=True)
class TrainConfig:
    """How long, in which batches and in which arithmetic a network is trained.

    Args:
        global_batch_size: Samples of one step, over all workers.
        micro_batch_size: Samples that go through the network at once. Micro-batches are the leaves
            of the summation tree, and BatchNorm computes its statistics over each. The number of
            workers never changes it.
        steps: Optimizer updates; or set `epochs`.
        epochs: Passes over the training data; or set `steps`. One, if neither is set.
        seed: Decides initial weights, the order of samples, augmentation and dropout.
        device: auto, cpu or cuda.
        threads: Intra-op threads of each worker on a CPU. They change bits; use 1 and more workers.
        autocast: Compute in bfloat16 or float16 where torch's autocast considers it safe.
        channels_last: Keep images and weights with the channels innermost in memory.
        compile: Train with code that torch.compile makes for the network. Its bits differ from
            those without, and are the same on any number of workers. Needs a C++ compiler on a CPU.
        deterministic: On a GPU, use only kernels that give the same bits every time.
        eval_every: Evaluate on the validation samples (`data.hold_out`, or those of the data set)
            every so many steps. The test samples are used once, at the end.
        stop_after: Stop after so many evaluations in a row without a better one. 0: never.
        ema_decay: Keep a moving average of the weights with this decay, as 0.999, and evaluate it
            instead of them. 0: none.
        ema_warmup: Begin with a smaller decay, so that the average soon forgets the first weights.
        batch_norm_samples: Before evaluations, estimate BatchNorm's statistics from so many
            training samples with the present weights. 0: use the running statistics.
        eval_batch_size: Samples of one evaluation batch on one worker.
    """

    global_batch_size: int = 128
    micro_batch_size: int = 16
    steps: int = 0
    epochs: int = 0
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    channels_last: bool = False
    compile: bool = False
    deterministic: bool = True
    eval_every: int = 0
    stop_after: int = 0
    ema_decay: float = 0.0
    ema_warmup: bool = False
    batch_norm_samples: int = 0
    eval_batch_size: int = 250

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of a step, of all workers together."""
        return self.global_batch_size // self.micro_batch_size

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the steps of the whole training."""
        return self.steps or (self.epochs or 1) * steps_per_epoch


@dataclass(frozen=True)
class CheckpointConfig:
    """When the state of a run is saved. Training continues while it is written.

    Args:
        every: Save every so many steps; 0: never by steps. The end is always saved.
        every_s: Save when so many seconds have passed since the last save; 0: never by time.
        keep_last: Number of newest checkpoints to keep; 0 keeps all. With one alone, there is none
            to go back to if the disk damages it.
        best: Save after every evaluation on validation samples that is better than all before, and
            keep the best checkpoint in addition to the newest; `checkpoints/best` names it.
    """

    every: int = 0
    every_s: float = 0.0
    keep_last: int = 3
    best: bool = False


def check_checkpoint(config: CheckpointConfig) -> None:
    check_limits("checkpoint", config, {"every": (0, inf), "keep_last": (0, inf)})
    if not 0 <= config.every_s < inf:
        raise RecipeError(f"checkpoint.every_s is {config.every_s:g}; it must be 0 or more seconds")


def check_train(config: TrainConfig) -> None:
    check_limits("train", config, LIMITS)


def check_mixing(data: DataConfig) -> None:
    limits = {"mixup": NOT_NEGATIVE, "cutmix": NOT_NEGATIVE, "erasing": UP_TO_1}
    check_limits("data", data, limits)


def check_batch(config: TrainConfig, num_samples: int) -> None:
    """Check the batch. Raises: RecipeError if a micro-batch of every step would be empty."""
    micro_batch = config.micro_batch_size
    most = -(-num_samples // micro_batch) * micro_batch
    if config.global_batch_size > most:
        raise RecipeError(
            f"train.global_batch_size is {config.global_batch_size}; there are {num_samples} "
            f"training samples, so it must be at most {most}"
        )
