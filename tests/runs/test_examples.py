"""The examples run as they are, and the public names exist and cost nothing."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

import fedgraft

ROOT = Path(__file__).resolve().parents[2]
ENDINGS = {
    "one_round": r"validation accuracy after round 1: \d+\.\d %",
    "numpy_arrays": r"of the test images are right; the digit 8: \d+ % \(\d+ of \d+; \d+-\d+\)",
    "torch_dataset": r"validation \d+\.\d % -> \d+\.\d %",
    "hf_datasets": r"\('east', 'north', 'south'\) 0\.\d+",
    "folder_per_owner": r"taken for \d(.|\n)*\['README.md', 'config.json', 'model.safetensors'",
    "own_module": r"Net is yours again",
    "transformers_model": r"adapter \['README.md', 'adapter_config.json'(.|\n)*merged \['README.md', 'config.json'",
    "own_loss": r"cross_entropy: 0\.\d+(.|\n)*focal: 0\.\d+",
    "own_aggregation": r"refused: shortened: the weighting root needs each client",
    "callback": r"round 3: loss \d(.|\n)*test accuracy 0\.\d+",
}


NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in an empty folder with a cache of its own, warnings included in what comes back."""
    environment = {**os.environ, "FEDGRAFT_CACHE": str(cwd / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all examples: most of them look at the same digits through the same network."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDINGS)
def test_example_runs_as_it_is(
    name: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has everything loaded; a warning is an error here."""
    monkeypatch.setenv("FEDGRAFT_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert re.search(ENDINGS[name], output), output
    assert not list(tmp_path.iterdir())  # nothing is left where it was started


@pytest.mark.slow
def test_the_notebook_runs_cell_by_cell_and_has_no_outputs(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    script = "\n\n".join("".join(cell["source"]) for cell in cells) + "\nassert labels[0] == labels[1], labels"
    monkeypatch.setenv("FEDGRAFT_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    exec(compile(script, NOTEBOOK, "exec"), {})
    with pytest.raises(AttributeError, match="modell"):  # what is stale fails
        exec(compile(script.replace("fg.model(", "fg.modell("), NOTEBOOK, "exec"), {})


def test_every_example_is_tested() -> None:
    scripts = list((ROOT / "examples").glob("*.py"))
    assert {path.stem for path in scripts} == set(ENDINGS)


def test_public_names_exist_and_say_what_they_are() -> None:
    assert len(set(fedgraft.__all__)) == len(fedgraft.__all__)
    for name in fedgraft.__all__:
        value = getattr(fedgraft, name)
        if callable(value):
            assert value.__doc__, name
    assert set(fedgraft.__all__) <= set(dir(fedgraft))


def test_names_for_type_checkers_are_the_names_at_run_time() -> None:
    """Both come from one list; a line of it that is not read would be a name for type checkers only."""
    tree = ast.parse((ROOT / "src/fedgraft/__init__.pyi").read_text())
    imports = [(n.module, a.name, a.asname) for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names]
    assert imports == [(*home, name) for name, home in fedgraft._HOMES.items()]


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fedgraft.nothing


HEAVY = "import sys, {}; print(*sorted({{'torch', 'transformers', 'pydantic', 'numpy'}} & set(sys.modules)))"


@pytest.mark.parametrize(("module", "loaded"), [("fedgraft", ""), ("fedgraft.core.state", "numpy torch")])
def test_importing_fedgraft_is_light(module: str, loaded: str, tmp_path: Path) -> None:
    """The second case shows that the check sees what is loaded."""
    assert python("-c", HEAVY.format(module), cwd=tmp_path).stdout.strip() == loaded


@pytest.mark.filterwarnings("ignore:.*click.*:DeprecationWarning")
def test_commands_named_in_the_documents_exist() -> None:
    from fedgraft.cli.main import app

    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    known |= {group.name for group in app.registered_groups if isinstance(group.name, str)}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = [
        block for page in pages for block in re.findall(r"^```.*?^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    named = {word for block in blocks for word in re.findall(r"^fedgraft ([a-z-]+)", block, re.MULTILINE)}
    assert named and named <= known, named - known


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_config_page_is_what_the_command_prints() -> None:
    from fedgraft.config.load import describe_options

    page = (ROOT / "docs" / "config.md").read_text()
    block = re.findall(r"```\n(.*?)```", page, re.DOTALL)[0]
    missing = [line for line in describe_options() if line and line not in block.splitlines()]
    assert not missing, f"run `fedgraft options` again for docs/config.md; first difference: {missing[0]}"


DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def all_keys(section: type[BaseModel], prefix: str = "") -> set[str]:
    """Every config key and table by its full name, optional tables included."""
    keys: set[str] = set()
    for name, info in section.model_fields.items():
        inner = [t for t in (info.annotation, *get_args(info.annotation)) if isinstance(t, type)]
        keys.add(prefix + name)
        for kind in inner:
            if issubclass(kind, BaseModel):
                keys |= all_keys(kind, f"{prefix}{name}.")
    return keys


def strange_words(text: str) -> list[str]:
    """Config keys and source files that a document names in backticks or commands and that do not exist."""
    import fedgraft.algorithms  # noqa: F401  (fills the registry)
    from fedgraft.config.load import Config, known_keys
    from fedgraft.core.registry import ALGORITHMS, SOURCES, own_options
    from fedgraft.data import sources  # noqa: F401  (fills the registry)

    keys, package = all_keys(Config), ROOT / "src/fedgraft"
    keys |= {f"algorithm.{option}" for _, make in ALGORITHMS.items() for option in own_options(make)}
    keys |= {f"data.{option}" for _, make in SOURCES.items() for option in own_options(make)}
    keys |= set(known_keys())  # those of losses and schedules, which stand in their signatures
    quoted = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^fedgraft [^#\n]+", text, re.MULTILINE)
    overrides = [word for piece in quoted for word in re.findall(r"[A-Za-z_][\w./*-]*", piece)]
    roots = (package, ROOT / "tests", ROOT / "reproduction", ROOT / "benchmarks")  # below these a bare name will do
    there = [
        w for w in overrides if w.endswith(".py") and (list(ROOT.glob(w)) or any(list(root.rglob(w)) for root in roots))
    ]
    files = [w for w in overrides if w.endswith(".py") and w not in there]
    dotted = [
        w
        for w in overrides
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", w) and not w.endswith((".py", ".md", ".jsonl", ".toml"))
    ]
    return files + [w for w in dotted if w.partition(".")[0] in keys and w not in keys]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_documents_name_options_and_files_that_exist(page: Path) -> None:
    assert not strange_words(page.read_text())


def test_a_wrong_name_is_noticed() -> None:
    assert strange_words("`local.speed=3`, `local.lr`, `round.py`, `edit/nothing.py`") == [
        "edit/nothing.py",
        "local.speed",
    ]
