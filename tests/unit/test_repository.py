"""What people expect of a repository: versions agree, and what its files name is there."""

import json
import re
import subprocess
import tomllib
from datetime import date
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.models_pages import ROOT
from tests.kit.models_pages import page as text

PROJECT = tomllib.loads(text("pyproject.toml"))["project"]


def parsed(name: str) -> Any:
    return yaml.safe_load(text(name))


RELEASES = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", text("CHANGELOG.md"), re.M)


def test_the_newest_release_is_the_projects_version() -> None:
    citation = parsed("CITATION.cff")
    assert RELEASES[0][0] == PROJECT["version"] == citation["version"]
    assert date.fromisoformat(RELEASES[0][1]) == citation["date-released"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
    # What the Citation File Format 1.2.0 requires, as its guide tells it.
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title"} <= citation.keys()
    assert {"type", "title", "authors", "year"} <= citation["preferred-citation"].keys()


def test_releases_go_down_and_changes_have_the_kinds_of_the_standard() -> None:
    numbers = [[int(part) for part in number.split(".")] for number, _ in RELEASES]
    assert numbers == sorted(numbers, reverse=True)
    kinds = set(re.findall(r"^### (\w+)$", text("CHANGELOG.md"), re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


FORMS = [path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.name != "config.yml"]


@pytest.mark.parametrize("path", sorted(FORMS))
def test_an_issue_form_asks_for_what_it_can_show(path: Path) -> None:
    form = yaml.safe_load(path.read_text("utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    names = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert len(set(names)) == len(names) > 0
    for field in form["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert field["attributes"]["value" if field["type"] == "markdown" else "label"]
    assert any(field.get("validations", {}).get("required") for field in form["body"])


def targets() -> list[str]:
    return re.findall(r"^([a-z]+):", text("Makefile"), re.M)


def test_make_alone_says_a_line_on_each_target() -> None:
    alone = ["make", "--no-print-directory"]  # make may have started these tests
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = re.findall(r"^make ([a-z]+) +\S.*$", done.stdout, re.M)
    assert len(lines) == len(done.stdout.splitlines())
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text("Makefile"), re.M)
    assert sorted(lines) == sorted(targets()) == sorted(phony.split())


def test_the_container_is_of_a_named_version_and_runs_targets_that_there_are() -> None:
    dockerfile = text("Dockerfile")
    container = json.loads(text(".devcontainer/devcontainer.json"))
    commands = [*re.findall(r"^(?:RUN|#|CMD)(.*)$", dockerfile, re.M)]
    plain = re.sub(r'[\[\]",]', "", "\n".join([*commands, container["postCreateCommand"]]))
    assert {"demo", "test"} <= set(re.findall(r"\bmake ([a-z]+)", plain)) <= set(targets())
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)-slim-bookworm$", dockerfile, re.M)
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    file = ROOT / ".devcontainer" / container["build"]["dockerfile"]
    assert file.resolve() == ROOT / "Dockerfile"
    assert f"USER {container['remoteUser']}\n" in dockerfile


def test_hooks_are_programs_of_the_projects_own_environment() -> None:
    """So none needs the internet."""
    repos = parsed(".pre-commit-config.yaml")["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    programs = [hook["entry"].split()[0] for repo in repos for hook in repo["hooks"]]
    assert all(re.fullmatch(r"\.venv/bin/[\w-]+", program) for program in programs)
    pytest.importorskip("pre_commit_hooks")
    scripts = {script.name for script in entry_points(group="console_scripts")} | {"ruff"}
    assert {Path(program).name for program in programs} <= scripts


def test_pre_commit_reads_its_file() -> None:
    clientlib = pytest.importorskip("pre_commit.clientlib")
    assert clientlib.load_config(ROOT / ".pre-commit-config.yaml")


def test_the_oldest_python_is_the_first_that_is_named() -> None:
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert f">={classified[0]}" == PROJECT["requires-python"]
