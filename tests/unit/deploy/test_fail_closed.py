"""What a node does when something is missing, damaged, or made to mislead: it refuses, and says so without the data."""

from __future__ import annotations

import io
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.support.errors import raises
from tests.support.tiny import tiny

import fedgraft
from fedgraft.cli.console import echo, print_line, print_lines
from fedgraft.client.policy import parse
from fedgraft.config.load import load, validate
from fedgraft.core import text
from fedgraft.core.errors import FedgraftError, Refused
from fedgraft.core.messages import BadMessage, Request, pack, unpack
from fedgraft.data import cache_limit
from fedgraft.deploy.clean import removable, remove
from fedgraft.deploy.node import agreed_with_all
from fedgraft.deploy.node_state import NodeState
from fedgraft.deploy.run_node import NodeOptions
from fedgraft.engines.flower.node_link import public_reason
from fedgraft.report.display import LiveProgress, print_classes
from fedgraft.report.html import rows_csv

ENDLESS = "9" * 5000


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# ---- the policy ------------------------------------------------------------------------------------------------------


def started(tmp_path: Path, rules: str | None) -> NodeState:
    """A node that was started with these rules beside its key."""
    (tmp_path / "north.home").mkdir()
    if rules is not None:
        (tmp_path / "policy.toml").write_text(rules)
    NodeOptions("host:1", tmp_path / "ca.crt", tmp_path / "north.key", 0).pin_policy()
    return NodeState(tmp_path / "north.home")


def allowed(state: NodeState, *overrides: str) -> bool:
    try:
        agreed_with_all(tiny(*overrides), state.policies())
    except Refused:
        return False
    return True


def test_a_policy_that_is_removed_while_the_node_works_refuses_everything(tmp_path: Path) -> None:
    state = started(tmp_path, "rounds = 50\n")
    assert allowed(state)
    (tmp_path / "policy.toml").unlink()
    with raises("E-REFUSED-POLICY"):
        state.policies()
    (tmp_path / "north.home" / "policy.pinned").unlink()  # the broken variant: nobody remembers that there was one
    assert allowed(state)


def test_a_policy_may_become_stricter_and_weaker_only_when_the_node_is_started_anew(tmp_path: Path) -> None:
    state = started(tmp_path, "rounds = 5\n")
    assert allowed(state, "rounds.total=5") and not allowed(state, "rounds.total=6")
    (tmp_path / "policy.toml").write_text("rounds = 50\n")
    assert not allowed(state, "rounds.total=6")
    (tmp_path / "policy.toml").write_text("rounds = 3\n")
    assert not allowed(state, "rounds.total=5") and allowed(state, "rounds.total=3")
    NodeOptions("host:1", tmp_path / "ca.crt", tmp_path / "north.key", 0).pin_policy()
    (tmp_path / "policy.toml").write_text("rounds = 2\n")
    assert not allowed(state, "rounds.total=3")


def test_a_node_without_a_policy_takes_one_up_while_it_works(tmp_path: Path) -> None:
    state = started(tmp_path, None)
    assert state.policies() == () and allowed(state, "rounds.total=9")
    (tmp_path / "policy.toml").write_text("rounds = 3\n")
    assert not allowed(state, "rounds.total=9")


# ---- who can read what is stored -------------------------------------------------------------------------------------


def test_the_cache_and_what_a_node_stores_are_for_its_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDGRAFT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "fedgraft").mkdir(mode=0o755)
    cache_limit.make_room(1)
    assert mode(tmp_path / "fedgraft") == 0o700
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    monkeypatch.setenv("FEDGRAFT_CACHE", str(shared))
    cache_limit.make_room(1)
    assert mode(shared) == 0o755  # somebody chose it, and made it
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "new"))
    cache_limit.make_room(1)
    assert mode(tmp_path / "new") == 0o700
    state = NodeState(tmp_path / "north.home")
    state.store_models("run", {})
    (file,) = (tmp_path / "north.home" / "models").iterdir()
    assert mode(file) == 0o600 and mode(file.parent) == 0o700


def test_clean_removes_what_ended_runs_left_and_nothing_that_must_not_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "pixels").mkdir(parents=True)
    state = NodeState(tmp_path / "north.home")
    state.store_models("run", {})
    state.store(0, state.load(0), {})
    state.record(kind="response", bytes=1)
    assert [item.path.name for item in removable(state.home, with_cache=False)] == ["models"]
    remove(removable(state.home, with_cache=True))
    assert not (state.home / "models").exists() and not (tmp_path / "cache").exists()
    assert state.ledger.is_file() and (state.home / "audit.jsonl").is_file()


# ---- what an error tells ---------------------------------------------------------------------------------------------


def test_an_error_leaves_a_node_as_a_code_without_names_of_files() -> None:
    error = FedgraftError("E-DATA-IMAGE", "the image /data/Mueller_Anna_1962.png cannot be read", "remove it")
    assert public_reason(error) == "E-DATA-IMAGE; its log says more"
    assert "Mueller" in str(error)  # the sentence, which stays in the node's log
    assert public_reason(Refused("it has 9 rounds", "rounds")).startswith("refused by the rule 'rounds'")


# ---- what is shown ---------------------------------------------------------------------------------------------------

EVIL = "a\x1b[2J|b<img src=x>\n=cmd() [x](javascript:1) \u202etxt"


def test_text_from_outside_is_shown_word_for_word_and_does_nothing() -> None:
    shown = text.printable(EVIL)
    assert "\x1b" not in shown and "\n" not in shown and "\u202e" not in shown and "|b<img" in shown
    cell = text.markdown_cell(EVIL)
    assert (
        r"\|b\<img" in cell
        and r"\[x\]" in cell
        and text.markdown_cell("balanced_accuracy 3*") == "balanced_accuracy 3*"
    )
    for formula in ("=1+1", "+1", "-1", "@x", "\t=1"):
        assert text.csv_cell(formula).startswith("'")
    assert text.csv_cell("north") == "north"
    table = rows_csv([{"=site": "=cmd()", "accuracy": -0.5}])
    assert "'=cmd()" in table and "'=site" in table and ",-0.5" in table


@pytest.mark.parametrize("show", [print_line, print_lines, echo])
def test_every_line_of_a_command_is_made_printable(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    show(EVIL)
    shown = capsys.readouterr().out
    assert "|b<img src=x>" in shown and "\x1b" not in shown and "\u202e" not in shown
    assert (len(shown.splitlines()) == 1) is (show is not print_lines)


def test_tables_and_phases_on_a_terminal_are_made_printable() -> None:
    file = io.StringIO()
    console = Console(file=file, width=200, color_system=None)
    print_classes(console, [EVIL], {})
    LiveProgress(console).print_line(EVIL)
    assert file.getvalue().count("|b<img src=x>") == 2
    assert "\x1b" not in file.getvalue() and "\u202e" not in file.getvalue()


def test_commands_print_by_these_functions_only() -> None:
    """`typer.echo` and `print` would show text from outside as it is."""
    found = []
    for file in sorted((Path(fedgraft.__file__).parent / "cli").glob("*.py")):
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            if re.search(r"\b(typer|click)\.s?echo\b|(?<![\w.])print\(", line):
                found.append(f"{file.name}:{number}")
    assert [place for place in found if not place.startswith("console.py:")] == []
    assert found, "console.py itself is found, so the search finds"


# ---- numbers without end ---------------------------------------------------------------------------------------------


def test_an_integer_of_any_length_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[rounds]\ntotal = {ENDLESS}\n")
    reads: list[Any] = [
        lambda: load(file),
        lambda: load(None, [f"rounds.total={ENDLESS}"]),
        lambda: load(None, [f"rounds.total={'9' * 400}"]),
        lambda: validate({"seed": 10**400}),
        lambda: parse(f"rounds = {ENDLESS}"),
        lambda: parse(f"rounds = {'9' * 400}"),
    ]
    for read in reads:
        with pytest.raises(FedgraftError) as caught:
            read()
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    for request in (Request("r", 10**400, 0, "train"), Request("r", 0, 0, "train", settings={"lr": 10**400})):
        with pytest.raises(BadMessage):
            unpack(Request, pack(request))


@pytest.mark.skipif(os.name != "posix", reason="modes of files are those of POSIX")
def test_a_secret_that_was_cut_is_refused(tmp_path: Path) -> None:
    from fedgraft.runs.secrets import read_or_draw_secret, secret_path, store_secret

    folder = tmp_path / "run"
    folder.mkdir()
    secret = read_or_draw_secret(folder)
    store_secret(folder, secret, needed=True)
    path = secret_path(folder)
    assert len(secret) == 32 and mode(path) == 0o600 and read_or_draw_secret(folder) == secret
    for damaged in (b"", path.read_bytes()[:-2], b"zz" * 32):
        path.write_bytes(damaged)
        with raises("E-RUN-SECRET-DAMAGED"):
            read_or_draw_secret(folder)


def test_status_says_for_whom_a_secure_run_waits_and_deployments_add_their_own_noise() -> None:
    from fedgraft.deploy.coordinator import with_clients
    from fedgraft.deploy.status import absent_from_sums

    names = ["north", "south", "east", "west"]
    secure = tiny("privacy.aggregation=secure", "partition.clients=4")
    assert absent_from_sums(secure, names, ["north", "south"]) == ["east", "west"]
    assert not absent_from_sums(secure, names, ["north", "south", "west"])
    assert not absent_from_sums(tiny(), names, [])
    noised = ["privacy.aggregation=secure", "privacy.dp.noise=1.0", "algorithm.weighting=uniform", "model.head=random"]
    deployed = with_clients(tiny(*noised), 4, names)
    assert deployed.privacy.dp is not None and deployed.privacy.dp.noise_source == "distributed"
    chosen = with_clients(tiny(*noised, "privacy.dp.noise_source=server"), 4, names)
    assert chosen.privacy.dp is not None and chosen.privacy.dp.noise_source == "server"
