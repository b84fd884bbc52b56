"""Cluster files: the shipped ones load, and each mistake is told in one line with its word."""

import os
import tomllib
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from firecaffe.api.answer import as_table
from firecaffe.errors import RecipeError
from firecaffe.planner.cluster import load_cluster, parse_cluster, shipped

Words = dict[str, Any]


def words() -> Words:
    return {
        "about": "two hosts",
        "devices_per_node": 1,
        "device": {
            "name": "a device", "memory_bytes": 1e9, "memory_bytes_per_s": 1e10,
            "peak_flops": {"float32": 1e12}, "efficiency": 0.5, "overhead_s": 1e-5,
        },
        "links": [{"name": "net", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}],
    }  # fmt: skip


ASKED = {"titan", "dgx1-p100", "dgx-a100", "dgx-h100", "h200", "cpu-host"}
ASKED |= {f"ethernet-{rate}g" for rate in (1, 10, 25, 100)}
ASKED |= {f"infiniband-{rate}" for rate in ("fdr", "edr", "hdr", "ndr")}
ASKED |= {f"ec2-{name}" for name in ("p2", "p3", "p4d", "p5")}


def test_shipped_clusters_load_and_say_where_their_figures_are_from() -> None:
    assert {*shipped()} >= ASKED
    for name in shipped():
        cluster = load_cluster(name)
        assert cluster.name == name
        assert cluster.sources
        written = tomli_w.dumps(as_table(cluster))
        assert parse_cluster(tomllib.loads(written), name) == cluster


NET = words()["links"][0]
GONE = object()
MISTAKES: list[tuple[str, Any, str]] = [
    ("links", [], "$.links: expected array of length >= 1"),
    ("sources", [3], "$.sources[0]: expected str, got int, found 3"),
    ("colour", "red", "$: no word 'colour'; there are name, about"),
    ("links", GONE, "missing required field links"),
    ("links.0.bandwidth_bytes_per_s", 0, "links[0].bandwidth_bytes_per_s: expected float >= 1e-12"),
    ("links.0.group", 4, "the last link joins all"),
    ("links.0.colour", "red", "links[0]: no word 'colour'; there are name, latency_s"),
    ("links", [NET | {"group": 1}, NET], "must be a multiple"),
    ("device.overhead_s", 1e300, "overhead_s: expected float <= 1e+30, found 1e+300"),
    ("device.efficiency", GONE, "$.device: object missing required field efficiency"),
    ("device.efficiency", float("nan"), "efficiency: expected float >= 1e-12, found nan"),
    ("device.peak_flops", {"float16": 1e12}, "peak_flops.float32 is missing"),
    ("device.peak_flops", {"float32": -1}, "$.device.peak_flops[...]: expected float"),
    ("device.measured", 3, "$.device.measured: expected array, got int, found 3"),
    ("devices_per_node", 0, "devices_per_node: expected int >= 1, found 0"),
    ("devices_per_node", 1.5, "devices_per_node: expected int, got float, found 1.5"),
    ("storage", {"name": "a", "read_bytes_per_s": 0}, "$.storage.read_bytes_per_s: expected float"),
]


@pytest.mark.parametrize(("place", "value", "said"), MISTAKES)
def test_each_mistake_is_one_line_with_its_word(place: str, value: Any, said: str) -> None:
    spoiled: Any = words()
    *path, word = place.split(".")
    section = reduce(lambda part, key: part[int(key) if key.isdigit() else key], path, spoiled)
    if value is GONE:
        del section[word]
    else:
        section[word] = value
    with pytest.raises(RecipeError) as error:
        parse_cluster(spoiled, "mine")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_cluster_that_is_not_there_or_no_regular_bounded_file(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("links = [")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\0")
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "long.toml").write_text("#" * 1_000_001)
    for name, said in (
        ("none", "No such file"),
        ("bad", "is no TOML"),
        ("bytes", "is no TOML"),
        ("pipe", r"pipe.toml: .*no regular file"),
        ("long", r"long.toml: .*longer than 1000000 bytes"),
    ):
        with pytest.raises(RecipeError, match=said):
            load_cluster(str(tmp_path / f"{name}.toml"))
    with pytest.raises(RecipeError, match="no cluster 'atlantis'; there are cpu-host"):
        load_cluster("atlantis")


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=80)
@given(st.sampled_from(["device", "links", "storage", "prices", "name"]), VALUES)
def test_no_content_gives_a_traceback(section: str, value: Any) -> None:
    spoiled = words()
    spoiled[section] = value
    with suppress(RecipeError):
        parse_cluster(spoiled, "fuzz")
