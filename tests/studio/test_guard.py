"""Who may ask a studio: the token, the cookie, foreign hosts and pages, actions, and paths outside the folder."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.studio import served, write_run

pytest.importorskip("starlette", reason="the extra `studio` is not installed")
pytest.importorskip("uvicorn", reason="the extra `studio` is not installed")

from fedgraft.studio import guard
from fedgraft.studio.views import studio_of

Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("guarded")
    write_run(root / "runs" / "first")
    (root / "secret.txt").write_text("outside")
    with served(studio_of(root / "runs", True, root / "index")) as running:
        yield running


def ask(server: Any, path: str, method: str = "GET", body: bytes = b"", **headers: str) -> Reply:
    """A request as anybody on this machine can send it, with the headers as they are."""
    sent = {"Host": f"127.0.0.1:{server.port}", "Content-Length": str(len(body)), "Connection": "close"}
    for name, value in headers.items():
        sent[name.replace("_", "-")] = value
    text = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in sent.items()) + "\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(text.encode() + body)
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    head, _, content = data.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    replied = {}
    for header in rest:
        name, _, value = header.partition(": ")
        replied[name.lower()] = value
    return int(first.split()[1]), replied, content


def enter(server: Any) -> tuple[str, str]:
    """Exchange the token; return the secret path and the cookie."""
    status, headers, _ = ask(server, f"/?token={server.studio.own.token}")
    assert status == 303
    return headers["location"], headers["set-cookie"].partition(";")[0]


def test_the_token_becomes_a_strict_cookie_of_a_secret_path(server: Any) -> None:
    status, headers, _ = ask(server, f"/?token={server.studio.own.token}")
    cookie = headers["set-cookie"]
    assert status == 303 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert f"Path={headers['location']}" in cookie and len(headers["location"]) > 40
    path, value = enter(server)
    status, headers, content = ask(server, path, Cookie=value)
    assert status == 200 and b"fedgraft studio" in content
    assert headers["content-security-policy"] == guard.POLICY
    assert "unsafe" not in guard.POLICY and "http" not in guard.POLICY
    assert headers["referrer-policy"] == "no-referrer" and headers["x-content-type-options"] == "nosniff"


def test_a_second_user_without_the_token_sees_nothing(server: Any) -> None:
    path, cookie = enter(server)
    attempts = [
        ask(server, "/"),
        ask(server, "/?token="),
        ask(server, "/?token=" + "A" * 43),
        ask(server, "/api/runs"),
        ask(server, path),
        ask(server, f"{path}api/runs"),
        ask(server, f"{path}api/runs", Cookie=f"{guard.COOKIE}=" + "A" * 43),
        ask(server, "/page/app.js", Cookie=cookie),
        ask(server, f"/{'A' * 43}/api/runs", Cookie=cookie),
    ]
    for status, _, content in attempts:
        assert status == 403 and b"first" not in content and server.studio.own.token.encode() not in content


def test_a_foreign_name_of_this_machine_is_refused(server: Any) -> None:
    """DNS rebinding: the browser believes that evil.example is this address, and sends its name."""
    path, cookie = enter(server)
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", "", "127.0.0.1:1"):
        assert ask(server, f"{path}api/runs", Cookie=cookie, Host=host)[0] == 421
    assert ask(server, f"{path}api/runs", Cookie=cookie, Host=f"localhost:{server.port}")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_that_other_pages_cause_are_refused(server: Any, site: str) -> None:
    """Another port of this machine is the same site: cookies go there, so the browser's own word decides."""
    path, cookie = enter(server)
    assert ask(server, f"{path}api/runs", Cookie=cookie, Sec_Fetch_Site=site)[0] == 403
    assert ask(server, f"{path}api/runs", Cookie=cookie, Sec_Fetch_Site="same-origin")[0] == 200


def test_an_action_needs_its_token_and_the_studios_own_page(server: Any) -> None:
    path, cookie = enter(server)
    origin = f"http://127.0.0.1:{server.port}"
    token = server.studio.own.action
    body = json.dumps({"run": "first"}).encode()
    refused: list[dict[str, str]] = [
        {},
        {"Origin": origin},
        {"X_Fedgraft_Action": token},
        {"Origin": "http://evil.example", "X_Fedgraft_Action": token},
        {"Origin": "null", "X_Fedgraft_Action": token},
        {"Origin": origin, "X_Fedgraft_Action": "A" * 43},
    ]
    for headers in refused:
        assert ask(server, f"{path}api/stop", "POST", body, Cookie=cookie, **headers)[0] == 403
    allowed = {"Origin": origin, "X_Fedgraft_Action": token}
    status, _, content = ask(server, f"{path}api/stop", "POST", body, Cookie=cookie, **allowed)
    assert status == 400 and json.loads(content)["code"] == "E-STUDIO-NOT-OURS"
    for method in ("PUT", "DELETE", "OPTIONS"):
        assert ask(server, f"{path}api/stop", method, body, Cookie=cookie, **allowed)[0] == 403
    status, _, content = ask(server, f"{path}api/start", "POST", b"[]", Cookie=cookie, **allowed)
    assert json.loads(content)["code"] == "E-STUDIO-BODY"
    status, _, content = ask(server, f"{path}api/start", "POST", b"{" * 100_050, Cookie=cookie, **allowed)
    assert json.loads(content)["code"] == "E-STUDIO-BODY"


def test_a_read_only_studio_has_no_actions(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first")
    with served(studio_of(tmp_path / "runs", False, tmp_path / "index")) as server:
        path, cookie = enter(server)
        boot = json.loads(ask(server, f"{path}api/boot", Cookie=cookie)[2])
        assert boot["actions"] is False and boot["action"] == ""
        headers = {"Origin": f"http://127.0.0.1:{server.port}", "X_Fedgraft_Action": server.studio.own.action}
        for name in ("start", "stop", "resume", "plan", "evaluate"):
            assert ask(server, f"{path}api/{name}", "POST", b"{}", Cookie=cookie, **headers)[0] == 404


def test_no_request_reaches_a_file_outside(server: Any) -> None:
    path, cookie = enter(server)
    for run in ("../secret.txt", "..", "/etc", "first/../../", "first/checkpoints", ".", "%2e%2e", "first%00"):
        status, _, content = ask(server, f"{path}api/run?run={run}", Cookie=cookie)
        assert status == 400 and b"outside" not in content
        assert json.loads(content)["code"] == "E-REPORT-NO-RUN"
    for place in ("../../secret.txt", "run.json", "/etc/passwd", "figures/../run.json"):
        status, _, content = ask(server, f"{path}api/picture?run=first&path={place}", Cookie=cookie)
        assert status == 400 and json.loads(content)["code"] == "E-STUDIO-PICTURE"
    for name in ("..%2f..%2fserver.py", "../server.py", "server.py", "template.html"):
        assert ask(server, f"{path}page/{name}", Cookie=cookie)[0] in {403, 404}


def test_the_guard_compares_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug would compare with ==: every comparison of a secret goes through `hmac.compare_digest`."""
    compared = []
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert guard.same("a", "a") and not guard.same("a", "b") and len(compared) == 2
