"""Who may ask the studio: only this machine's browser that was given the token, and only pages of the studio itself.

Anybody on this machine can connect to a port of the loopback address, and any page in the browser can send requests
there. So:

- the first address carries a random token, which is exchanged for a cookie (HttpOnly, SameSite=Strict) that the browser
  sends only below a second random path: cookies are shared by all ports of a host, paths are not;
- the Host header must name this machine (a foreign name that resolves to it is DNS rebinding);
- requests that other sites or other ports caused are refused by `Sec-Fetch-Site`;
- actions are POST requests with a further token in a header, which no form of another site can send, and `Origin` must
  be this studio;
- the content security policy allows the studio's own files alone: no inline script, no inline style, no other host.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "fedgraft-studio"
ACTION_HEADER = "x-fedgraft-action"
"""Carries the action token of a POST request."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy of every page of the studio."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response; a response may have its own `content-security-policy` instead."""
_HOSTS = ("127.0.0.1", "localhost")


def _token() -> str:
    """Return a new random token of 256 bits."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Secrets:
    """The random secrets of one studio process."""

    token: str = field(default_factory=_token)
    """In the address that the command prints."""
    path: str = field(default_factory=_token)
    """The folder of all addresses behind the first one."""
    cookie: str = field(default_factory=_token)
    action: str = field(default_factory=_token)
    """Sent by the studio's own page with every action."""

    @property
    def prefix(self) -> str:
        """Return the path below which everything is, with a slash at its end."""
        return f"/{self.path}/"


def same(left: str, right: str) -> bool:
    """Return whether two secrets are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(left.encode(), right.encode())


class Guard:
    """Middleware that passes a request on to `app` only if its sender may ask; see the module for the rules.

    Args:
        port: that the studio listens on.
    """

    def __init__(self, app: ASGIApp, own: Secrets, port: int) -> None:
        self.app = app
        self.own = own
        self.hosts = {f"{host}:{port}" for host in _HOSTS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on."""
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get("host", "") not in self.hosts:
            await _refuse(send, 421, "This address is not the studio's own.")
            return
        if scope["path"] == "/":
            await self._enter(scope, send)
            return
        reason = self._reason_to_refuse(scope, headers)
        if reason:
            await _refuse(send, 403, reason)
            return
        inner = dict(scope)
        inner["path"] = "/" + scope["path"].removeprefix(self.own.prefix)
        inner["raw_path"] = inner["path"].encode()

        async def send_with_headers(message: Message) -> None:
            """Add the headers that every response has."""
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                for name, value in HEADERS.items():
                    if name.encode() not in present:
                        message["headers"].append((name.encode(), value.encode()))
            await send(message)

        await self.app(inner, receive, send_with_headers)

    async def _enter(self, scope: Scope, send: Send) -> None:
        """Exchange the token of the first address for the cookie, and go on to the page."""
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        token = (query.get("token") or [""])[0]
        if not same(token, self.own.token):
            await _refuse(send, 403, "Open the address that `fedgraft studio` printed; it has the token.")
            return
        cookie = f"{COOKIE}={self.own.cookie}; Path={self.own.prefix}; HttpOnly; SameSite=Strict"
        await _respond(send, 303, b"", [("location", self.own.prefix), ("set-cookie", cookie)])

    def _reason_to_refuse(self, scope: Scope, headers: dict[str, str]) -> str:
        """Return why a request is not passed on; empty if it is."""
        folder = scope["path"].lstrip("/").partition("/")[0]
        if not same(folder, self.own.path) or not scope["path"].startswith(self.own.prefix):
            return "Open the address that `fedgraft studio` printed; it has the token."
        if not same(_cookie_of(headers.get("cookie", "")), self.own.cookie):
            return "This browser has no cookie of the studio: open the address that `fedgraft studio` printed."
        if headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return "Another page asked for this."
        if scope["method"] in {"GET", "HEAD"}:
            return ""
        if scope["method"] != "POST":
            return "The studio answers GET and POST only."
        if headers.get("origin", "").removeprefix("http://") not in self.hosts:
            return "Another page asked for this."
        if not same(headers.get(ACTION_HEADER, ""), self.own.action):
            return "The action's token is missing."
        return ""


def _cookie_of(header: str) -> str:
    """Return the studio's cookie in a Cookie header; empty without it."""
    for item in header.split(";"):
        name, _, value = item.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


async def _refuse(send: Send, status: int, sentence: str) -> None:
    """Answer with a sentence instead of what was asked for."""
    await _respond(send, status, f"{sentence}\n".encode(), [("content-type", "text/plain; charset=utf-8")])


async def _respond(send: Send, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
    """Send a whole response with the headers that every response has."""
    pairs = [*headers, *HEADERS.items(), ("content-length", str(len(body)))]
    raw = [(name.encode(), value.encode()) for name, value in pairs]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
