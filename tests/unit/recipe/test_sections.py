"""The recipe: its file, its identity, its words and their help."""

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from firecaffe import (
    CheckpointConfig,
    ExchangeConfig,
    ParallelConfig,
    PruneConfig,
    Recipe,
    RunConfig,
    SolverConfig,
    SynchronyConfig,
    TaskConfig,
    TrainConfig,
)
from firecaffe.cli.train import make_parser
from firecaffe.cli.typed_recipe import parse_recipe
from firecaffe.data import DataConfig
from firecaffe.errors import RecipeError
from firecaffe.models.config import ModelConfig
from firecaffe.recipe.checked_recipe import check_recipe
from firecaffe.recipe.identity import flatten, identity, to_toml

SECTIONS = get_type_hints(Recipe)

APART = [
    *(f"parallel.{word.name}" for word in dataclasses.fields(ParallelConfig)),
    *("prune.threshold", "share.bits", "share.start", "share.train", "share.gradient"),
]
"""What cannot be had with other words of OTHER; see test_parallel.py, test_constrained.py."""

# Every word has another value than its default.
OTHER = Recipe(
    model=ModelConfig("lenet", {"num_classes": 3, "a": {"b": [1]}}, "w.pt", ["c.*"], {"ip1": 9}),
    data=DataConfig(
        name="own_sets:photos",
        path="/some where/ü \"quoted\" 'data', no UTF-8: \udce9",
        resize=128,
        decode_threads=3,
        cache="/fast/disk",
        cache_bytes=10**9,
        on_error="skip",
        exif="apply",
        args={"root": "photos", "sizes": [1, 2], "more": {"a": 0.5}},
        balance="classes",
        hold_out=0.1,
        augment="none",
        crop=24,
        pad=4,
        mirror=True,
        mixup=0.2,
        cutmix=1.0,
        erasing=0.25,
        mean=[0.1, 1 / 3, 1e-30],
        std=[2.0],
    ),
    train=TrainConfig(
        global_batch_size=96,
        micro_batch_size=8,
        steps=70,
        seed=9,
        device="cpu",
        threads=2,
        autocast="bfloat16",
        channels_last=True,
        compile=True,
        deterministic=False,
        eval_every=7,
        eval_batch_size=33,
        stop_after=3,
        ema_decay=0.99,
        ema_warmup=True,
        batch_norm_samples=512,
    ),
    solver=SolverConfig(
        type="nesterov",
        args={"rho": 0.9},
        base_lr=1e-05,
        lr_policy="multistep",
        gamma=0.1,
        power=0.5,
        stepsize=11,
        stepvalue=[10, 20],
        warmup_steps=5,
        pct_start=0.25,
        div_factor=10.0,
        final_div_factor=500.0,
        base_momentum=0.8,
        momentum=0.85,
        momentum2=0.99,
        rms_decay=0.9,
        delta=1e-06,
        weight_decay=0.0005,
        decay_form="decoupled",
        clip_gradients=35.0,
        scale="sqrt",
        reference_batch_size=32,
        momentum_form="caffe",
        momentum_correction=True,
        trust=0.02,
        lr_mult={"*.bias": 2.0},
        decay_mult={"@vector": 0.0, 'a.b"c': 0.5},
    ),
    exchange=ExchangeConfig(
        algorithm="halving_doubling",
        compressor="int8",
        compressor_level=1,
        bucket_bytes=1_000_000,
        shared_memory=False,
        timeout_s=0.5,
        silent_s=0.6,
    ),
    checkpoint=CheckpointConfig(every=12, every_s=3.5, keep_last=7, best=True),
    run=RunConfig(
        folder="runs/mine",
        tensorboard=False,
        loggers=["mlflow"],
        digests=True,
        cluster="mine.toml",
        tuned="by hand",
    ),
    task=TaskConfig(
        name="segmentation",
        args={"ignore_index": 255, "num_classes": 2},
        label_smoothing=0.1,
        class_weights=[1.0, 2.5],
        metrics=["f1", "mean_iou"],
        metric="mean_iou",
    ),
    synchrony=SynchronyConfig(
        shares_every=3,
        in_flight=2,
        server="sharded",
        lock="none",
        learners=5,
        backup_workers=2,
        dropped="again",
        max_staleness=3,
        gradients_per_update=2,
        staleness_rate="inverse",
        compensate="gap",
        server_momentum="delayed_nesterov",
        warm_steps=7,
        clock="simulated",
        speeds="measured",
        speeds_from="rank-0.jsonl",
        spread=0.5,
        slow_factor=3.0,
        replicas=2,
        local_steps=5,
        growth_coefficient=0.02,
        warm_epochs=2,
        warm_until_drop=True,
        outer="nesterov",
        outer_lr=0.6,
        outer_momentum=0.8,
        inner_momentum="zero",
        overlap_steps=1,
        fragments=3,
    ),
    prune=PruneConfig({"fc*": 0.1}, {}, "surgery", 50, 5, "all"),
)


def parsed(path: Path, *options: str) -> Recipe:
    return parse_recipe(make_parser(), [str(path), *options])[0]


def changed(recipe: Recipe, name: str, value: Any) -> Recipe:
    section, word = name.split(".")
    config = dataclasses.replace(getattr(recipe, section), **{word: value})
    return dataclasses.replace(recipe, **{section: config})


def test_the_example_changes_every_word() -> None:
    default, other = flatten(Recipe()), flatten(OTHER)
    assert default.keys() == other.keys()
    # The length beside which there is no other; and what a compressor goes with alone, or not
    # (see test_update_at.py); nor the order that nothing can be held out beside.
    assert [name for name in default if default[name] == other[name]] == [
        *("data.order", "train.epochs", "exchange.update_at", "synchrony.mode", "synchrony.shares"),
        *APART,
    ]


@pytest.mark.parametrize("recipe", [Recipe(), OTHER], ids=["default", "other"])
def test_a_recipe_is_its_file(tmp_path: Path, recipe: Recipe) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe), encoding="utf-8", errors="surrogateescape")
    found = parsed(path)
    assert (found, flatten(found)) == (recipe, flatten(recipe))
    assert list(map(type, flatten(found).values())) == list(map(type, flatten(recipe).values()))
    assert to_toml(found) == to_toml(recipe)


def test_every_word_is_written() -> None:
    written = tomllib.loads(to_toml(OTHER))
    assert {f"{s}.{w}" for s, words in written.items() for w in words} == set(flatten(OTHER))


def test_a_word_of_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nsteps = 5\nseed = 3\n")
    recipe = parsed(path, "--train.steps", "8", "--solver.base_lr", "0.2")
    assert (recipe.train.steps, recipe.train.seed, recipe.solver.base_lr) == (8, 3, 0.2)


FREE = {
    "data.path",
    "data.decode_threads",
    "data.cache",
    "data.cache_bytes",
    "train.device",
    "train.eval_every",
    "train.stop_after",
    "train.eval_batch_size",
    "train.steps",
    "train.epochs",
    "exchange.algorithm",
    "exchange.bucket_bytes",
    "exchange.update_at",
    "exchange.shared_memory",
    "exchange.timeout_s",
    "exchange.silent_s",
    "checkpoint.every",
    "checkpoint.every_s",
    "checkpoint.keep_last",
    "checkpoint.best",
    "run.folder",
    "run.tensorboard",
    "run.loggers",
    "run.digests",
    "run.cluster",
    "run.tuned",
    "task.metrics",
    "task.metric",
    "synchrony.mode",
    "synchrony.shares",
    "synchrony.shares_every",
    "synchrony.in_flight",
    "synchrony.server",
}
"""What changes no bit of a training up to a given step."""


OF_A_SERVER = {f"synchrony.{word.name}" for word in dataclasses.fields(SynchronyConfig)} - FREE
"""What decides bits in a mode with a server, or with replicas, alone."""


def test_every_word_is_free_or_decides() -> None:
    found = identity(OTHER, 70).keys() - {*APART}
    assert found == flatten(OTHER).keys() - FREE - OF_A_SERVER - {*APART}
    served = identity(changed(OTHER, "synchrony.mode", "stale"), 70)
    # Who waits at the end depends on where that is.
    more = {"synchrony.mode", "train.steps", *OF_A_SERVER}
    assert served.keys() - identity(OTHER, 70).keys() == more


@pytest.mark.parametrize("name", [name for name in flatten(OTHER) if name not in APART])
def test_identity(name: str) -> None:
    """Each word changed alone, from the default to the other value."""
    start = Recipe()
    if name == "exchange.compressor_level":  # without a compressor it means nothing
        start = changed(start, "exchange.compressor", "int8")
    if name in OF_A_SERVER:
        start = changed(start, "synchrony.mode", "asynchronous")
    if name.startswith("prune."):  # without layers the others mean nothing
        start = changed(start, "prune.keep", {"*": 0.5})
    other = {**flatten(OTHER), "data.order": "shards"}
    found, default = (
        identity(recipe, 100) for recipe in (changed(start, name, other[name]), start)
    )
    words = [*default, *(found.keys() - default.keys())]
    differs = [word for word in words if found.get(word) != default.get(word)]
    if name == "exchange.compressor":
        assert found.keys() - default.keys() == {"exchange.compressor_level"}
        differs.remove("exchange.compressor_level")
    assert differs == ([] if name in FREE else [name])


def test_the_number_of_steps_decides_only_with_poly() -> None:
    assert "train.steps" not in identity(Recipe(), 100)
    poly = changed(Recipe(), "solver.lr_policy", "poly")
    assert identity(poly, 100)["train.steps"] == 100
    # However it was said: 100 steps, or epochs that come to 100.
    in_epochs = changed(changed(poly, "train.steps", 0), "train.epochs", 4)
    assert identity(in_epochs, 100) == identity(changed(poly, "train.steps", 100), 100)
    assert identity(poly, 100) != identity(poly, 101)


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_every_word_is_explained(section: str) -> None:
    kind = SECTIONS[section]
    explained = re.findall(r"^    (\w+): \S", inspect.getdoc(kind) or "", re.M)
    assert explained == [field.name for field in dataclasses.fields(kind)]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [Recipe(), OTHER], ids=["default", "other"])
def test_accepted(recipe: Recipe) -> None:
    check_recipe(recipe)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("train.threads", 0, "train.threads is 0"),
        ("solver.type", "adamax", "solver.type is 'adamax'"),
        ("solver.lr_policy", "cyclic", "solver.lr_policy is 'cyclic'"),
        ("exchange.algorithm", "star", "exchange.algorithm: no exchange 'star'; the exchanges are"),
        ("exchange.algorithm", "hierarchical(ring,tree)", "inner is 'ring'; it must be one of"),
        ("exchange.compressor", "gzip", "exchange.compressor is 'gzip'; it must be one of none,"),
        ("exchange.compressor_level", -1, "exchange.compressor_level is -1; it must be 0 to 20"),
        ("exchange.bucket_bytes", 0, "exchange.bucket_bytes is 0; it must be at least 1"),
        ("exchange.timeout_s", 0.0, "exchange.timeout_s is 0; it must be 0.1 to 1e+06 seconds"),
        ("exchange.timeout_s", float("nan"), "exchange.timeout_s is nan"),
        ("exchange.silent_s", 0.0, "exchange.silent_s is 0; it must be 0.1 to 1e+06 seconds"),
        ("checkpoint.every", -1, "checkpoint.every is -1; it must be at least 0"),
        ("checkpoint.keep_last", -1, "checkpoint.keep_last is -1; it must be at least 0"),
        (
            "checkpoint.every_s",
            float("nan"),
            "checkpoint.every_s is nan; it must be a finite number",
        ),
        ("synchrony.mode", "sometimes", "synchrony.mode is 'sometimes'; it must be one of"),
        ("synchrony.shares", "even", "synchrony.shares is 'even'; it must be one of 'equal'"),
        ("synchrony.shares_every", 0, "synchrony.shares_every is 0; it must be 1 to 10,000,000"),
        ("synchrony.learners", 0, "synchrony.learners is 0; it must be 1 to 4096"),
        ("synchrony.learners", 10**12, "synchrony.learners is 1000000000000; it must be 1 to 4096"),
        ("synchrony.backup_workers", -1, "synchrony.backup_workers is -1; it must be 0 to 4095"),
        ("synchrony.backup_workers", 4096, "synchrony.backup_workers is 4096; it must be 0 to 409"),
        ("synchrony.max_staleness", -1, "max_staleness is -1; it must be 0 to 10,000,000"),
        ("synchrony.gradients_per_update", 0, "gradients_per_update is 0; it must be 1 to 4096"),
        ("synchrony.warm_steps", -1, "synchrony.warm_steps is -1; it must be 0 to 10,000,000"),
        ("synchrony.spread", 1e-200, "synchrony.spread is 1e-200; it must be 0.01 to 10"),
        ("synchrony.spread", 1e20, "synchrony.spread is 1e+20; it must be 0.01 to 10"),
        ("synchrony.slow_factor", 0.5, "synchrony.slow_factor is 0.5; it must be 1 to 1000"),
        ("synchrony.slow_factor", 1e30, "synchrony.slow_factor is 1e+30; it must be 1 to 1000"),
    ],
)
def test_refused(name: str, value: object, words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        check_recipe(changed(Recipe(), name, value))


@pytest.mark.parametrize("algorithm", ["ring", "native", "double_tree", "hierarchical(tree,ring)"])
def test_exchanges_that_leave_the_tree(algorithm: str) -> None:
    recipe = changed(Recipe(), "synchrony.shares", "measured")
    for one in ("tree", "auto", "halving_doubling", "hierarchical(tree,tree)"):
        check_recipe(changed(recipe, "exchange.algorithm", one))
    with pytest.raises(RecipeError, match=re.escape(f"exchange.algorithm = {algorithm}: ")):
        check_recipe(changed(recipe, "exchange.algorithm", algorithm))


def test_who_looks_for_gradient_accumulation_is_told_of_micro_batches(tmp_path: Path) -> None:
    """In a file nothing was said but that there is no such word."""
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\naccumulate_grad_batches = 4\n")
    with pytest.raises(RecipeError, match=r"accumulate_grad_batches.*train\.micro_batch_size"):
        parsed(path)
    path.write_text("")
    with pytest.raises(RecipeError, match=r"gradient_acc.*train\.micro_batch_size"):
        parsed(path, "--train.gradient-accumulation-steps", "4")
    path.write_text("[train]\nglobal_batch_siz = 4\n")
    with pytest.raises(RecipeError, match=r"did you mean train\.global_batch_size\?"):
        parsed(path)
