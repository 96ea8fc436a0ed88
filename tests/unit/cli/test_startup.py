"""Commands that only read or list import no torch: that is most of their time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import fedgraft.algorithms  # noqa: F401  (fills the registry)
from fedgraft.cli import main
from fedgraft.cli.overrides import config_of
from fedgraft.core.errors import FedgraftError
from fedgraft.core.registry import ALGORITHMS, listed_algorithms, own_options
from fedgraft.runs.folder import RunFolder

CODE = """
import sys
from fedgraft.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print("heavy:", sorted({"torch", "transformers", "matplotlib", "sklearn", "scipy", "numpy.ma"} & sys.modules.keys()))
"""


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for name in "ab":
        run = RunFolder.create(tmp_path / name, f'name = "{name}"\n', "digest")
        run.metrics_path.write_text('{"round": 0, "accuracy": 0.5}\n{"round": 1, "accuracy": 0.6, "train_loss": 1.0}\n')
    return [str(tmp_path / name) for name in "ab"]


COMMANDS = ["list", "show", "options", "presets", "algorithms", "partition", "compare", "--help"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_looking_needs_no_torch(command: str, runs: list[str], tmp_path: Path) -> None:
    given = {"list": [str(tmp_path)], "show": runs[:1], "partition": ["seed=1"]}
    words = {**given, "compare": [*runs, "--out", str(tmp_path / "page")]}.get(command, [])
    found = subprocess.run([sys.executable, "-c", CODE, command, *words], capture_output=True, text=True, check=False)
    assert found.stdout.endswith("heavy: []\n"), found.stdout[-300:] + found.stderr[-300:]


def test_the_listed_algorithms_are_those_of_the_zoo() -> None:
    listed = listed_algorithms()
    assert [*listed] == [*ALGORITHMS]
    for name, make in ALGORITHMS.items():
        assert listed[name] == ((make.__doc__ or "").strip().splitlines()[0], own_options(make))


def test_a_command_reads_its_own_signature_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.app, "registered_commands", [*main.app.registered_commands])
    monkeypatch.setattr(main.app, "registered_groups", [*main.app.registered_groups])
    main.keep_only("nothing of this name")
    assert len(main.app.registered_commands) > 10 and main.app.registered_groups
    main.keep_only("find-lr")
    assert [one.name for one in main.app.registered_commands] == ["find-lr"] and not main.app.registered_groups


def test_a_run_says_what_it_does_before_it_imports_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also into a pipe, where a line that waits in a buffer would be no sign of life."""
    said = []

    def stop() -> None:
        said.append(capsys.readouterr().out)
        raise FedgraftError("here torch would be imported")

    monkeypatch.setattr("rich.get_console", lambda: Console(width=20))
    monkeypatch.setattr(main, "import_runtime", stop)
    for quiet in (False, True):
        with pytest.raises(FedgraftError, match="here torch"):
            main._carry_out(config_of(["demo"]), tmp_path / "a run", quiet)
    assert said == [f"demo in {tmp_path / 'a run'}: loading the library\n", ""]
