"""What people expect of a repository: versions agree, and what its files name is there."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import date
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def parsed(name: str) -> Any:
    return yaml.safe_load(text(name))


RELEASES = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", text("CHANGELOG.md"), re.M)
CITATION = parsed("CITATION.cff")


def test_the_newest_release_is_the_projects_version() -> None:
    assert RELEASES[0][0] == PROJECT["version"] == CITATION["version"]
    assert date.fromisoformat(RELEASES[0][1]) == CITATION["date-released"]


def test_releases_go_down_and_changes_have_the_kinds_of_the_standard() -> None:
    numbers = [[int(part) for part in number.split(".")] for number, _ in RELEASES]
    assert numbers == sorted(numbers, reverse=True)
    kinds = set(re.findall(r"^### (\w+)$", text("CHANGELOG.md"), re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_has_what_its_schema_requires() -> None:
    """Of the Citation File Format 1.2.0, as its guide tells it."""
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["license"] == PROJECT["license"]
    assert CITATION["authors"] == PROJECT["authors"]
    paper = CITATION["preferred-citation"]
    assert {"type", "title", "authors", "year"} <= paper.keys()
    names = [author["family-names"] for author in paper["authors"]]
    assert names == ["Iandola", "Moskewicz", "Ashraf", "Keutzer"]


FORMS = [path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.name != "config.yml"]


@pytest.mark.parametrize("path", sorted(FORMS))
def test_an_issue_form_asks_for_what_it_can_show(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert fields
    assert len(set(names)) == len(names)
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_a_bug_asks_for_what_a_run_leaves() -> None:
    form = text(".github/ISSUE_TEMPLATE/bug.yml")
    assert all(name in form for name in ("environment.json", "result.json", "firecaffe check"))


def targets() -> list[str]:
    return re.findall(r"^([a-z]+):", text("Makefile"), re.M)


def test_make_alone_says_a_line_on_each_target() -> None:
    alone = ["make", "--no-print-directory"]  # make may have started these tests
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, check=True)
    told = re.findall(r"^make ([a-z]+) +\S.*$", done.stdout, re.M)
    assert len(told) == len(done.stdout.splitlines())
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text("Makefile"), re.M)
    assert sorted(told) == sorted(targets()) == sorted(phony.split())


def commands_of_the_container() -> Iterator[str]:
    lines = re.findall(r"^(?:RUN|#|CMD)(.*)$", text("Dockerfile"), re.M)
    container = json.loads(text(".devcontainer/devcontainer.json"))
    yield from (re.sub(r'[\[\]",]', "", line) for line in [*lines, container["postCreateCommand"]])


def test_the_container_runs_targets_that_there_are() -> None:
    named = re.findall(r"\bmake ([a-z]+)", "\n".join(commands_of_the_container()))
    assert {"demo", "test"} <= set(named) <= set(targets())


def test_the_container_is_of_a_named_version() -> None:
    (base,) = re.findall(r"^FROM (\S+)$", text("Dockerfile"), re.M)
    version = re.fullmatch(r"python:(\d+\.\d+)-slim-bookworm", base)
    assert version is not None
    assert f"Programming Language :: Python :: {version[1]}" in PROJECT["classifiers"]
    container = json.loads(text(".devcontainer/devcontainer.json"))
    folder = ROOT / ".devcontainer"
    assert (folder / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert f"USER {container['remoteUser']}\n" in text("Dockerfile")


HOOKS = [hook for repo in parsed(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]


def test_hooks_are_programs_of_the_projects_own_environment() -> None:
    """So none needs the internet."""
    repos = parsed(".pre-commit-config.yaml")["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    programs = [hook["entry"].split()[0] for hook in HOOKS]
    assert all(re.fullmatch(r"\.venv/bin/[\w-]+", program) for program in programs)
    pytest.importorskip("pre_commit_hooks")
    scripts = {script.name for script in entry_points(group="console_scripts")} | {"ruff"}
    assert {Path(program).name for program in programs} <= scripts


def test_pre_commit_reads_its_file() -> None:
    pytest.importorskip("pre_commit")
    command = [sys.executable, "-m", "pre_commit", "validate-config", ".pre-commit-config.yaml"]
    subprocess.run(command, cwd=ROOT, check=True)


def test_the_metadata_says_which_pythons_and_systems() -> None:
    least = PROJECT["requires-python"].removeprefix(">=")
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named[0] == least
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(PROJECT["classifiers"])
