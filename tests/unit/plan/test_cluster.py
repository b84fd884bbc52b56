"""Cluster files: the shipped ones load, and each mistake is told in one line with its word."""

import os
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.cli.cluster_file import as_words
from firecaffe.errors import RecipeError
from firecaffe.plan.cluster import load_cluster, parse_cluster, shipped

Words = dict[str, Any]


def words() -> Words:
    return {
        "about": "two hosts",
        "devices_per_node": 1,
        "device": {
            "name": "a device",
            "memory_bytes": 1e9,
            "memory_bytes_per_s": 1e10,
            "peak_flops": {"float32": 1e12},
            "efficiency": 0.5,
            "overhead_s": 1e-5,
        },
        "links": [{"name": "net", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}],
    }


@pytest.mark.parametrize("name", shipped())
def test_shipped_clusters_load_and_say_where_their_figures_are_from(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.sources
    assert parse_cluster(tomllib.loads(_written(cluster)), name) == cluster


def _written(cluster: Any) -> str:
    import tomli_w

    return tomli_w.dumps(as_words(cluster))


def test_the_clusters_that_people_ask_for_are_there() -> None:
    asked = {"titan", "dgx1-p100", "dgx-a100", "dgx-h100", "h200", "cpu-host"}
    asked |= {f"ethernet-{rate}g" for rate in (1, 10, 25, 100)}
    asked |= {f"infiniband-{rate}" for rate in ("fdr", "edr", "hdr", "ndr")}
    asked |= {f"ec2-{name}" for name in ("p2", "p3", "p4d", "p5")}
    assert asked <= set(shipped())


def without(section: str, word: str) -> Callable[[Words], Any]:
    return lambda w: w[section].pop(word)


def put(section: str, word: str, value: Any) -> Callable[[Words], Any]:
    return lambda w: w[section].update({word: value})


MISTAKES: list[tuple[Callable[[Words], Any], str]] = [
    (lambda w: w.update(links=[]), "$.links: expected array of length >= 1"),
    (put("device", "overhead_s", 1e300), "overhead_s: expected float <= 1e+30, found 1e+300"),
    (lambda w: w.update(sources=[3]), "$.sources[0]: expected str, got int, found 3"),
    (lambda w: w.update(colour="red"), "$: no word 'colour'; there are name, about"),
    (lambda w: w.pop("links"), "missing required field links"),
    (lambda w: w.pop("device"), "missing required field device"),
    (lambda w: w.pop("about"), "missing required field about"),
    (
        lambda w: w["links"][0].update(bandwidth_bytes_per_s=0),
        "links[0].bandwidth_bytes_per_s: expected float >= 1e-12, found 0",
    ),
    (lambda w: w["links"][0].update(latency_s=-1), "latency_s: expected float >= 0.0, found -1"),
    (lambda w: w["links"][0].update(group=4), "the last link joins all"),
    (
        lambda w: w["links"][0].update(colour="red"),
        "links[0]: no word 'colour'; there are name, latency_s",
    ),
    (lambda w: w["links"].insert(0, {**w["links"][0], "group": 1}), "must be a multiple"),
    (without("device", "efficiency"), "$.device: object missing required field efficiency"),
    (put("device", "efficiency", "much"), "efficiency: expected float, got str, found 'much'"),
    (put("device", "efficiency", 0), "efficiency: expected float >= 1e-12, found 0"),
    (put("device", "efficiency", float("inf")), "efficiency: expected float <= 1e+30, found inf"),
    (put("device", "efficiency", float("nan")), "efficiency: expected float >= 1e-12, found nan"),
    (put("device", "peak_flops", {"float16": 1e12}), "peak_flops.float32 is missing"),
    (put("device", "peak_flops", {"float32": -1}), "$.device.peak_flops[...]: expected float"),
    (put("device", "measured", 3), "$.device.measured: expected array, got int, found 3"),
    (lambda w: w.update(devices_per_node=0), "devices_per_node: expected int >= 1, found 0"),
    (
        lambda w: w.update(devices_per_node=1.5),
        "devices_per_node: expected int, got float, found 1.5",
    ),
    (
        lambda w: w.update(storage={"name": "a", "read_bytes_per_s": 0}),
        "$.storage.read_bytes_per_s: expected float",
    ),
]


@pytest.mark.parametrize(("spoil", "said"), MISTAKES)
def test_each_mistake_is_one_line_with_its_word(spoil: Callable[[Words], Any], said: str) -> None:
    spoiled = words()
    spoil(spoiled)
    with pytest.raises(RecipeError) as error:
        parse_cluster(spoiled, "mine")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no cluster 'atlantis'; there are cpu-host"):
        load_cluster("atlantis")
    with pytest.raises(RecipeError, match="No such file"):
        load_cluster(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_text("links = [")
    with pytest.raises(RecipeError, match="is no TOML"):
        load_cluster(str(tmp_path / "bad.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\0")
    with pytest.raises(RecipeError, match="is no TOML"):
        load_cluster(str(tmp_path / "bytes.toml"))


def test_a_cluster_file_is_regular_and_bounded(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(RecipeError, match=r"pipe.toml: .*no regular file"):
        load_cluster(str(tmp_path / "pipe.toml"))
    (tmp_path / "long.toml").write_text("#" * 1_000_001)
    with pytest.raises(RecipeError, match=r"long.toml: .*longer than 1000000 bytes"):
        load_cluster(str(tmp_path / "long.toml"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=150)
@given(st.sampled_from(["device", "links", "storage", "prices", "name"]), VALUES)
def test_no_content_gives_a_traceback(section: str, value: Any) -> None:
    spoiled = words()
    spoiled[section] = value
    with suppress(RecipeError):
        parse_cluster(spoiled, "fuzz")
