"""The files around the package say what the package says: versions, commands, the gate."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from fedgraft.deploy.run_node import NodeOptions

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tracked() -> list[Path]:
    """Text files of the repository."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    found = [ROOT / name for name in done.stdout.splitlines()]
    return [
        path for path in found if path.is_file() and path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ""}
    ]


def test_one_version() -> None:
    import fedgraft

    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert fedgraft.__version__ == PROJECT["version"] == cited["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_package_is_typed_and_names_its_pythons() -> None:
    assert (ROOT / "src" / "fedgraft" / "py.typed").exists()
    for minor in (11, 12, 13):
        assert f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]


def test_the_workflow_calls_the_gate() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    assert "make test" in [step.get("run") for step in steps["jobs"]["test"]["steps"]]
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_pre_commit_runs_the_linters_of_make() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    lint = re.search(r"^lint:.*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert lint
    for line in lint[1].splitlines():
        words = line.strip().replace("$(BIN)/", ".venv/bin/").split()
        assert " ".join(words[:2] if words[0].endswith("ruff") else words[:1]) in hooks


def words_of_the_guide(command: str) -> list[set[str]]:
    """The options of each call of a deploy command in the guide."""
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    calls = [shlex.split(line) for line in text.splitlines() if line.startswith(f"fedgraft deploy {command} ")]
    return [{word for word in call if word.startswith("--")} for call in calls]


def test_a_node_without_its_process_is_not_healthy(tmp_path: Path) -> None:
    """The check itself is a process that names what it looks for: it must not find itself."""
    text = (ROOT / "containers" / "node.Dockerfile").read_text(encoding="utf-8")
    _, flag, code = words = json.loads(re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.M)[1])  # type: ignore[index]
    for number, command in (("1", ["fedgraft", "deploy", "node"]), ("7", words)):
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_bytes("\0".join(command).encode())
    call = [sys.executable, "-S", flag, code.replace("/proc", str(tmp_path))]
    assert subprocess.run(call, check=False).returncode == 1
    node = NodeOptions("h:9", tmp_path / "ca.crt", tmp_path / "north.key", 0)
    (tmp_path / "1" / "cmdline").write_bytes("\0".join(node.command()).encode())
    assert subprocess.run(call, check=False).returncode == 0


def test_containers_run_the_commands_of_the_guide() -> None:
    compose = yaml.safe_load((ROOT / "containers" / "compose.yaml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        command, *rest = service["command"]
        asked = {word for word in rest if word.startswith("--")}
        assert command == ("server" if name == "server" else "node")
        assert asked in words_of_the_guide(command), f"{name}: the guide has no `deploy {command}` with {sorted(asked)}"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        if name != "server":
            assert any(volume.endswith(":/data:ro") for volume in service["volumes"])
    for kind in ("node", "server"):
        text = (ROOT / "containers" / f"{kind}.Dockerfile").read_text(encoding="utf-8")
        assert "\nUSER fedgraft\n" in text and "\nHEALTHCHECK " in text
        extras = set(re.search(r"EXTRAS=(\S+)", text)[1].split(","))  # type: ignore[index]
        assert extras <= set(PROJECT["optional-dependencies"])


def test_no_file_names_a_package_registry() -> None:
    hosts = re.compile(
        "|".join(["pypi" + r"\.org", "pythonhosted" + r"\.org", "registry" + r"\.npmjs", "download" + r"\.pytorch"])
    )
    named = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if hosts.search(path.read_text(encoding="utf-8", errors="ignore"))
    ]
    assert not named


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    """What a user installs: weights, preset, page and types; no tests, no studies."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed").WheelBuilder
    (wheel,) = builder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    needed = [
        "models/nano/model.safetensors",
        "models/nano/config.json",
        "data/sources/digits.npz",
        "data/sources/digits.md",
        "config/demo.toml",
        "report/page/template.html",
        "report/page/charts.js",
        "studio/page/app.js",
    ]
    assert {f"fedgraft/{name}" for name in [*needed, "py.typed", "cli/main.py"]} <= names
    assert all(name.startswith(("fedgraft/", f"fedgraft-{PROJECT['version']}.dist-info/")) for name in names)
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "fedgraft").rglob("*.py")}
    assert source == {name for name in names if name.endswith(".py")}
