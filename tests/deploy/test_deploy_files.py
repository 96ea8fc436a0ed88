"""Files and processes of a federation without Flower's network: certificates, keys, permissions, refused options."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.support.errors import raises
from typer.testing import CliRunner

from fedgraft.cli.deploy_node import _number_of_nodes
from fedgraft.cli.main import app
from fedgraft.config.load import load
from fedgraft.deploy import control as federation_control
from fedgraft.deploy import folder as federation
from fedgraft.deploy import process as federation_process
from fedgraft.deploy.app import app_files
from fedgraft.deploy.control import RunState, failure_reason
from fedgraft.deploy.coordinator import resolve_run_folder
from fedgraft.deploy.door_link import describe_transfer
from fedgraft.deploy.door_paths import KEY_IN_USE
from fedgraft.deploy.keys import check_private_key, days_left, key_fingerprint, make_node_key, public_key_line
from fedgraft.deploy.limits import DEFAULT_REQUEST_MEGABYTES, request_limit
from fedgraft.deploy.node_loop import CONNECTED, FAILED, UNREACHABLE, WORKING
from fedgraft.deploy.run_node import NodeOptions, describe_log_line, node_failure

OVERRIDES = ["model.name=tiny", "partition.clients=2", "rounds.total=1"]


@pytest.fixture
def fed(tmp_path: Path) -> federation.FederationFolder:
    return federation.create_federation(tmp_path / "fed", load(None, OVERRIDES), ["north", "south"], "127.0.0.1")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def cli(*arguments: str) -> tuple[int, str]:
    """Run a command that must not raise; return its exit code and its output."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return result.exit_code, result.output


def test_private_files_are_private(fed: federation.FederationFolder, tmp_path: Path) -> None:
    private, public = make_node_key(tmp_path / "node", "north")
    assert [mode(p) for p in (fed.path, fed.certificates, fed.home, fed.path / "keys")] == [0o700] * 4
    assert [mode(fed.certificates / n) for n in ("ca.key", "server.key")] == [0o600] * 2
    assert mode(private) == 0o600
    assert b"PRIVATE" not in public.read_bytes()


def test_private_keys_are_private_under_an_open_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private, _ = make_node_key(tmp_path, "north")
        folder = federation.create_federation(tmp_path / "fed", load(None, OVERRIDES), ["a", "b"], "host.example")
    finally:
        os.umask(before)
    assert mode(private) == 0o600
    assert mode(folder.certificates / "ca.key") == 0o600
    assert mode(folder.path) == 0o700


def test_the_certificate_is_for_the_host_and_this_machine(tmp_path: Path) -> None:
    folder = federation.create_federation(tmp_path / "fed", load(None, OVERRIDES), ["a", "b"], "server.example")
    from cryptography import x509

    leaf = x509.load_pem_x509_certificate((folder.certificates / "server.crt").read_bytes())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"server.example", "localhost"}
    assert {str(ip) for ip in names.get_values_for_type(x509.IPAddress)} == {"127.0.0.1", "::1"}
    assert 390 < days_left(folder.certificates / "server.crt") < 398
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


@pytest.mark.parametrize("own", [True, False])
def test_tls_accepts_the_certificate_by_its_own_authority_only(tmp_path: Path, own: bool) -> None:
    config = load(None, OVERRIDES)
    ours = federation.create_federation(tmp_path / "ours", config, ["a", "b"], "server.example")
    other = federation.create_federation(tmp_path / "other", config, ["a", "b"], "server.example")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(ours.certificates / "server.crt", ours.certificates / "server.key")
    trusted = ours if own else other
    client = ssl.create_default_context(cafile=trusted.authority)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    up = ssl.MemoryBIO()
    down = ssl.MemoryBIO()
    near = client.wrap_bio(down, up, server_hostname="server.example")
    far = server.wrap_bio(up, down, server_side=True)

    def shake() -> None:
        for _ in range(4):
            for end in (near, far):
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue

    if own:
        shake()
        assert near.version() == "TLSv1.3"
    else:
        with pytest.raises(ssl.SSLCertVerificationError):
            shake()


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    private, _ = make_node_key(tmp_path, "north")
    before = private.read_bytes()
    with raises("E-DEPLOY-KEY-EXISTS", path=str(private)):
        make_node_key(tmp_path, "north")
    assert private.read_bytes() == before


def test_a_fingerprint_is_the_one_ssh_keygen_prints(tmp_path: Path) -> None:
    _, public = make_node_key(tmp_path, "north")
    try:
        printed = subprocess.run(["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("needs ssh-keygen")
    assert key_fingerprint(public) in printed


def test_registering_refuses_what_is_no_public_key_of_a_node(fed: federation.FederationFolder, tmp_path: Path) -> None:
    private, public = make_node_key(tmp_path, "north")
    with raises("E-DEPLOY-PRIVATE-KEY-SENT"):
        fed.register("north", private)
    with raises("E-DEPLOY-UNKNOWN-NODE", name="west"):
        fed.register("west", public)
    with raises("E-DEPLOY-NO-PUBLIC-KEY"):
        fed.register("north", tmp_path / "nothing.pub")
    (tmp_path / "junk.pub").write_text("ssh-rsa junk")
    with raises("E-DEPLOY-BAD-PUBLIC-KEY"):
        fed.register("north", tmp_path / "junk.pub")
    fed.register("north", public)
    with raises("E-DEPLOY-KEY-SHARED", name="south", other="north"):
        fed.register("south", public)
    assert fed.registered() == ["north"]
    assert public_key_line(fed.key("north")) == public_key_line(public)


def test_a_readable_private_key_is_refused(tmp_path: Path) -> None:
    private, _ = make_node_key(tmp_path, "north")
    check_private_key(private)
    private.chmod(0o644)
    with raises("E-DEPLOY-KEY-READABLE"):
        check_private_key(private)


@pytest.mark.parametrize(
    ("overrides", "names", "host", "code"),
    [
        ([*OVERRIDES, "data.source=folder", "data.path=here"], ["a", "b"], "h", "E-DEPLOY-DATA-PATH"),
        (OVERRIDES, ["a", "b", "c"], "h", "E-DEPLOY-CLIENT-COUNT"),
        (OVERRIDES, [], "h", "E-DEPLOY-NO-NODES"),
        (OVERRIDES, ["a", "a"], "h", "E-DEPLOY-NODE-NAMES"),
        (OVERRIDES, ["a", "b/c"], "h", "E-DEPLOY-NODE-NAME"),
        (OVERRIDES, ["a", "b"], "https://h", "E-DEPLOY-HOST"),
        ([*OVERRIDES, "engine=batched"], ["a", "b"], "h", "E-DEPLOY-ENGINE"),
    ],
)
def test_what_cannot_be_deployed_is_refused(
    tmp_path: Path, overrides: list[str], names: list[str], host: str, code: str
) -> None:
    with raises(code):
        federation.create_federation(tmp_path / "fed", load(None, overrides), names, host)
    assert not (tmp_path / "fed").exists()


def test_init_writes_a_federation_and_prints_the_next_steps(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    overrides = ["deploy", "init", "demo", "model.name=tiny", "--folder", str(folder), "--names", "north,south"]
    code, text = cli(*overrides, "--host", "10.1.2.3")
    assert code == 0, text
    for part in ("ca.crt", "deploy register", "deploy server", "--superlink 10.1.2.3:PORT", "--id 1", "deploy submit"):
        assert part in text
    opened = federation.open_federation(folder)
    assert (opened.host, opened.names, opened.config.partition.clients) == ("10.1.2.3", ("north", "south"), 2)
    assert {str(p.relative_to(folder / "app")) for p in (folder / "app").rglob("*.*")} == set(app_files())
    with raises("E-DEPLOY-FOLDER-EXISTS"):
        cli(*overrides)


def test_wrong_options_of_a_node_are_refused_before_it_starts(fed: federation.FederationFolder, tmp_path: Path) -> None:
    private, _ = make_node_key(tmp_path, "north")
    authority = fed.authority
    NodeOptions("127.0.0.1:9", authority, private, 0).check()
    junk = tmp_path / "junk.crt"
    junk.write_text("junk")
    for options, code in (
        (NodeOptions("127.0.0.1", authority, private, 0), "E-DEPLOY-SUPERLINK"),
        (NodeOptions("https://h:9", authority, private, 0), "E-DEPLOY-SUPERLINK"),
        (NodeOptions("h:9", tmp_path / "no.crt", private, 0), "E-DEPLOY-NO-CERTIFICATE"),
        (NodeOptions("h:9", junk, private, 0), "E-DEPLOY-BAD-CERTIFICATE"),
        (NodeOptions("h:9", authority, tmp_path / "no.key", 0), "E-DEPLOY-NO-PRIVATE-KEY"),
        (NodeOptions("h:9", authority, private, -1), "E-DEPLOY-NODE-ID"),
        (NodeOptions("h:9", authority, private, 0, tmp_path / "no", "folder"), "E-DEPLOY-NO-DATA"),
        (NodeOptions("h:9", authority, private, 0, tmp_path, "zip"), "E-DEPLOY-SOURCE"),
        (NodeOptions("h:9", authority, private, 0, None, "npz"), "E-DEPLOY-SOURCE-WITHOUT-DATA"),
    ):
        with raises(code):
            options.check()
    junk.chmod(0o600)
    with raises("E-DEPLOY-BAD-PRIVATE-KEY"):
        check_private_key(junk)


def test_commands_refuse_what_is_missing(fed: federation.FederationFolder, tmp_path: Path) -> None:
    with raises("E-DEPLOY-NO-PUBLIC-KEY"):
        cli("deploy", "register", str(fed.path), "north", str(tmp_path / "nothing.pub"))
    with raises("E-DEPLOY-NO-FEDERATION"):
        cli("deploy", "status", str(tmp_path))
    with raises("E-DEPLOY-SERVER-STOPPED"):
        cli("deploy", "submit", str(fed.path))
    assert cli("deploy", "status", str(fed.path)) == (
        0,
        f"server: not running; start it with: fedgraft deploy server {fed.path}\n",
    )


def test_damaged_files_of_a_federation_are_refused(fed: federation.FederationFolder, tmp_path: Path) -> None:
    fed.server_record.write_text("{")
    with raises("E-DEPLOY-SERVER-RECORD"):
        federation_process.read_server_record(fed.server_record)
    (fed.path / "federation.toml").write_text("host = 3")
    with raises("E-DEPLOY-FEDERATION-DAMAGED"):
        federation.open_federation(fed.path)


def test_the_limit_of_requests_is_read_from_the_policy(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    assert request_limit(policy) == DEFAULT_REQUEST_MEGABYTES << 20
    policy.write_text("request_megabytes = 32")
    assert request_limit(policy) == 32 << 20
    for text in ("request_megabytes = ", "request_megabytes = [3]"):
        policy.write_text(text)
        with raises("E-DEPLOY-POLICY", path=str(policy)):
            request_limit(policy)


def test_a_missing_flower_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    with raises("E-MISSING-EXTRA", extra="flower"):
        federation_control.require_flower()


def test_the_reason_of_a_failed_run_is_read_from_its_log() -> None:
    died = RunState(1, "failed", "ServerApp failed with exception: boom")
    log = "INFO: begin\nTraceback (most recent):\n  File x\nfedgraft.core.errors.FedgraftError: client 2 has no data.\n"
    assert failure_reason(died, log) == "client 2 has no data."
    assert failure_reason(died, "INFO: begin\nKeyError: 'x'\nINFO: end") == "KeyError: 'x'"
    assert failure_reason(died, "INFO: begin") == "ServerApp failed with exception: boom"


def test_the_reason_of_a_nodes_end_is_its_last_line(tmp_path: Path) -> None:
    options = NodeOptions("h:9", tmp_path / "ca.crt", tmp_path / "north.key", 3)
    table = {"code": "E-DEPLOY-NODE-KEY-REFUSED", "message": "it is not registered", "hint": "register it"}
    error = node_failure(f"{KEY_IN_USE}\n{FAILED}{json.dumps(table)}\n", options)
    assert (error.code, error.message, error.hint) == tuple(table.values())
    error = node_failure("something\nsomething else\n", options)
    assert (error.code, error.fields["last_line"]) == ("E-DEPLOY-NODE-ENDED", "something else")


def test_a_rehearsal_has_a_node_for_each_owner_of_the_data(tmp_path: Path) -> None:
    """With three nodes for four owners the fourth was left out without a word, after minutes."""
    for owner in ("anna", "ben", "cleo", "dora"):
        for kind in "ab":
            (tmp_path / "owners" / owner / kind).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(tmp_path / "owners" / owner / kind / f"{number}.png")
    place = ["data.source=owners", f"data.path={tmp_path / 'owners'}"]
    by_owner = load(None, [*place, "partition.kind=by_site"])
    assert _number_of_nodes(by_owner, None) == _number_of_nodes(by_owner, 4) == 4
    with raises("E-CLI-NODES-OWNERS", owners=4, nodes=3):
        _number_of_nodes(by_owner, 3)
    divided = load(None, [*place, "partition.kind=iid"])
    assert (_number_of_nodes(divided, None), _number_of_nodes(divided, 5)) == (3, 5)


def test_a_small_request_is_told_in_kilobytes() -> None:
    whole = {"delivered": True, "up_total": 0, "down": 2_612, "down_total": 3_482}
    assert describe_transfer(whole) == "receives its request, 2.6 of 3.5 kB (75 %)"
    assert describe_transfer({**whole, "down_total": 5_000_000}) == "receives its request, 0.0 of 5.0 MB (0 %)"


def test_lines_of_a_nodes_log_become_messages_to_its_owner(tmp_path: Path) -> None:
    """The messages are the product: the owner reads them, and docs/deploy.md explains them."""
    options = NodeOptions("h:9", tmp_path / "ca.crt", tmp_path / "north.key", 3)
    messages = {
        f"{CONNECTED} 5": "connected to h:9 as client 3; Ctrl-C ends the node",
        f"{KEY_IN_USE}\n": f"h:9 reports: {KEY_IN_USE}; trying again for up to 60 s",
        f"{WORKING} train.request": "working on a request (train)",
        UNREACHABLE: "h:9 does not answer; trying again",
    }
    assert {line: describe_log_line(line, options) for line in messages} == messages
    assert describe_log_line("INFO: nothing", options) is None


def test_a_run_folder_is_checked_before_a_run_starts(fed: federation.FederationFolder, tmp_path: Path) -> None:
    from fedgraft.config.load import to_toml
    from fedgraft.runs.folder import RunFolder

    assert resolve_run_folder(fed, tmp_path / "new", False) == tmp_path / "new"
    with raises("E-DEPLOY-NOTHING-TO-RESUME"):
        resolve_run_folder(fed, tmp_path / "new", True)
    RunFolder.create(tmp_path / "half", to_toml(fed.config), fed.config.digest)
    with raises("E-DEPLOY-RUN-UNFINISHED"):
        resolve_run_folder(fed, tmp_path / "half", False)
    assert resolve_run_folder(fed, tmp_path / "half", True) == tmp_path / "half"
    RunFolder.create(tmp_path / "other", "", "another")
    with raises("E-DEPLOY-RUN-CONFIG"):
        resolve_run_folder(fed, tmp_path / "other", True)


def sleeper(tmp_path: Path, text: str) -> subprocess.Popen[bytes]:
    return federation_process.spawn([sys.executable, "-c", text], tmp_path, tmp_path / "log")


def test_end_takes_a_process_and_its_children_and_no_other(tmp_path: Path) -> None:
    nap = "import subprocess,sys,time;c=subprocess.Popen([sys.executable,'-c','import time;time.sleep(60)']);"
    ours = sleeper(tmp_path, nap + "print(c.pid,flush=True);time.sleep(60)")
    other = sleeper(tmp_path, nap + "time.sleep(60)")
    while not (tmp_path / "log").read_text().strip():
        time.sleep(0.05)
    child = int((tmp_path / "log").read_text().split()[0])
    known = federation_process.process_id(ours)
    stranger = federation_process.process_id(other)
    born = federation_process.ProcessId(child, federation_process._start_time(child) or 0)
    assert known.alive and born.alive
    assert federation_process.end_process(known)
    ours.wait()
    assert not known.alive and not born.alive
    assert stranger.alive
    assert not federation_process.end_process(known)
    assert federation_process.end_process(stranger)
    other.wait()


def test_a_number_that_belongs_to_somebody_else_is_left_alone(tmp_path: Path) -> None:
    other = sleeper(tmp_path, "import time;time.sleep(60)")
    known = federation_process.process_id(other)
    earlier = federation_process.ProcessId(known.pid, known.began - 1)  # the same number, another process
    assert not federation_process.end_process(earlier)
    assert known.alive
    federation_process.end_process(known)
    other.wait()


def test_a_bound_process_and_its_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """The parent gets no chance to tell: it is killed. An unbound process stays, so the check can fail."""
    nap = "import subprocess,sys,time;c=subprocess.Popen([sys.executable,'-c','import time;time.sleep(60)']);"
    gate = "from fedgraft.deploy.process import end_with_parent as e;e();" + nap
    gate += "print(c.pid,flush=True);time.sleep(60)"
    parent = (
        "import sys,time;from pathlib import Path;from fedgraft.deploy.process import spawn\n"
        f"home=Path({str(tmp_path)!r})\n"
        f"for name in ('bound','free'): print(spawn([sys.executable,'-c',{gate!r}],home,home/name,name=='bound').pid)\n"
        "sys.stdout.flush();time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    for name in ("bound", "free"):
        while not (tmp_path / name).exists() or not (tmp_path / name).read_text().strip():
            time.sleep(0.05)
        pids.append(int((tmp_path / name).read_text().split()[0]))
    bound, free, child_of_bound, child_of_free = (
        federation_process.ProcessId(pid, federation_process._start_time(pid) or 0) for pid in pids
    )
    process.kill()
    process.communicate()
    federation_process._wait_for_end([bound, child_of_bound], 20)
    assert not bound.alive and not child_of_bound.alive
    assert free.alive and child_of_free.alive
    assert federation_process.end_process(free)


def test_why_a_run_ended_is_recorded_if_the_superlink_does_not_know(fed: federation.FederationFolder) -> None:
    fed.record_run(5, fed.path / "a")
    fed.record_run(6, fed.path / "b")
    fed.record_end(5, "the server was gone")
    assert (fed.end_reason(5), fed.end_reason(6), fed.end_reason(7)) == ("the server was gone", "", "")
    assert [record["folder"] for record in fed.runs()] == [str(fed.path / "a"), str(fed.path / "b")]


def test_a_taken_port_is_refused() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with raises("E-DEPLOY-PORT", port=taken.getsockname()[1]):
            federation_process.check_port("127.0.0.1", taken.getsockname()[1])
    federation_process.check_port("127.0.0.1", federation_process.free_port())


def test_flower_inherits_no_settings_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLWR_OIDC_ENABLED", "FLWR_INTERNAL_GRPC_CONTROL_API", "FORWARDED_ALLOW_IPS", "UVICORN_HOST"):
        monkeypatch.setenv(name, "1")
    environment = federation_process.flower_environment(tmp_path)
    own = {name for name in environment if name.startswith(("FLWR_", "UVICORN_", "FORWARDED"))}
    assert own == {
        "FLWR_HOME",
        "FLWR_TELEMETRY_ENABLED",
        "FLWR_DISABLE_UPDATE_CHECK",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL",
    }
    assert (environment["FLWR_TELEMETRY_ENABLED"], environment["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")


def test_status_describes_who_is_in_which_round() -> None:
    def line(number: int, ids: list[int], **dropped: str) -> dict[str, Any]:
        drops = [{"client": int(name[1:]), "reason": reason} for name, reason in dropped.items()]
        return {"round": number, "clients": {"ids": ids}, "dropped": drops}

    lines = [line(1, [0, 1]), line(2, [0], c1="no answer within 6 s"), line(3, [0, 1], c2="claims 7 examples")]
    assert federation.describe_contributions(lines) == {
        0: "in 3 of 3 rounds (1-3)",
        1: "in 2 of 3 rounds (1, 3); left out last in round 2: no answer within 6 s",
        2: "in 0 of 3 rounds (none); left out last in round 3: claims 7 examples",
    }
    assert federation.describe_contributions([{"round": 1, "dropped": []}]) is None  # under differential privacy


TERMINAL = """
import os, signal, sys, time
from fedgraft.cli.deploy_node import install_signal_handlers
install_signal_handlers()
os.kill(os.getpid(), signal.SIGHUP)
print("into a closed terminal", flush=True)
open(sys.argv[1], "w").write("done")
"""


def test_a_closed_terminal_ends_nothing(tmp_path: Path) -> None:
    """The reader of the terminal is gone, as after a lost connection; without the handler the signal would end it."""
    import pty

    ours, theirs = pty.openpty()
    done = tmp_path / "done"
    process = subprocess.Popen([sys.executable, "-c", TERMINAL, str(done)], stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.close(ours)
    assert process.wait(60) == 0 and done.read_text() == "done"
    usual = "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup hands down that it is ignored
    bare = TERMINAL.replace("install_signal_handlers()\n", usual)
    assert subprocess.run([sys.executable, "-c", bare, str(done)]).returncode == -signal.SIGHUP
