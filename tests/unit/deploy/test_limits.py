"""Size limits at both ports: what is too large is replaced by an error before it is received; the rest passes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto

from fedgraft.deploy import audit, gate, limits
from fedgraft.deploy.helper import PollPacer
from fedgraft.deploy.process import NODE_STATE_VARIABLE

RUN = 5
LIMIT = 1 << 20


def message(reply_to: str = "") -> Message:
    return make_message(Metadata(RUN, "request", 1, 7, reply_to, "", 0.0, 6e10, "train"), RecordDict())


def tree(objects: int) -> Any:
    """Return the tree of a message with this many objects."""
    leaves = [SimpleNamespace(children=[]) for _ in range(objects - 1)]
    return SimpleNamespace(children=leaves)


MOST_OBJECTS = 1 + limits.EXTRA_OBJECTS  # of a message of at most one chunk


@pytest.mark.parametrize(("objects", "too_large"), [(MOST_OBJECTS, False), (MOST_OBJECTS + 1, True)])
def test_a_request_over_the_owners_limit_is_refused_recorded_and_answered(
    objects: int, too_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "north.home"
    home.mkdir()
    (tmp_path / "policy.toml").write_text("request_megabytes = 1\n")
    monkeypatch.setenv(NODE_STATE_VARIABLE, str(home))
    inserted: list[Message] = []
    fetched: list[Any] = []
    loop = SimpleNamespace(_insert_message=lambda response, state, store: inserted.append(response))

    def pull(**arguments: Any) -> int:
        received, _ = arguments["receive"]()
        fetched.append(received)
        return int(received.metadata.run_id)

    guarded = gate._pull_guarded(loop, pull, PollPacer())
    run = guarded(get_fab=None, receive=lambda: (message(), tree(objects)), state=None, object_store=None)
    assert run == RUN
    assert len(fetched) == (not too_large)
    if too_large:
        (response,) = inserted
        assert response.error.reason == limits.request_too_large(LIMIT)
        (line,) = audit.read_entries(home / "audit.jsonl")
        assert (line["kind"], line["bytes"], line["why"]) == ("refused", 0, limits.request_too_large(LIMIT))


def test_a_poll_without_a_request_passes() -> None:
    assert limits.limit_requests(lambda: None, LIMIT)() is None


class LinkState:
    """The state of a SuperLink, which stores messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def start_session(self, run: int) -> str:
        return f"session of run {run}"

    def store_message_and_object_tree(self, response: Message, tree: Any, session: str) -> None:
        self.messages.append(response)

    def store_object(self, run: int, session: str, object_id: str, data: bytes) -> None:
        assert data


@pytest.mark.parametrize(("limit", "too_large"), [(limits.LEAST_RESPONSE_LIMIT, False), (LIMIT, True)])
def test_a_response_over_the_published_limit_is_replaced_by_an_error(
    limit: int, too_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(limits, "bound_arrays", lambda limit: None)
    assert limits.published_response_limit() == limits.LEAST_RESPONSE_LIMIT
    limits.publish_response_limit(limit)
    assert limits.published_response_limit() == limit
    state = LinkState()
    request = SimpleNamespace(
        messages_list=[message_to_proto(message("an earlier request"))], message_object_trees=[tree(MOST_OBJECTS + 1)]
    )
    push = limits.limit_responses(lambda request, state: "accepted")
    response = push(request=request, state=state)
    if too_large:
        (stored,) = state.messages
        assert stored.error.reason == limits.response_too_large(limit)
        assert list(response.results) == [stored.object_id]
    else:
        assert response == "accepted" and not state.messages


def test_an_honest_response_of_a_large_network_is_below_its_limit() -> None:
    parameters = 90_000_000
    width = 768
    classes = 1000
    vectors = 3 * 4 * parameters
    sums = 8 * (width + 1) * (width + 1 + classes)
    assert limits.response_limit(parameters, width, classes) > vectors + sums
    assert limits.response_limit(10, 2, 2) == limits.LEAST_RESPONSE_LIMIT


@pytest.mark.parametrize(
    ("declared", "parts", "outcome"),
    [(b"10", [10], "read"), (b"11", [], 413), (b"words", [], 413), (b"0", [6, 6], "disconnected")],
)
def test_an_http_request_longer_than_one_object_is_not_read(declared: bytes, parts: list[int], outcome: Any) -> None:
    """The declared length is checked before reading, the actual length while reading."""
    sent: list[Any] = []
    events: list[str] = []
    messages = [{"type": "http.request", "body": bytes(size)} for size in parts]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(response: Any) -> None:
        sent.append(response)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for _ in parts:
            received = await receive()
            events.append(received["type"])

    middleware = limits.RequestSizeLimit(app, ("/v1/fleet/",), most=10)
    scope = {"type": "http", "path": "/v1/fleet/push", "headers": [(b"content-length", declared)]}
    asyncio.run(middleware(scope, receive, send))
    if outcome == 413:
        assert sent[0]["status"] == 413 and not events
    elif outcome == "disconnected":
        assert events == ["http.request", "http.disconnect"]
    else:
        assert events == ["http.request"] and not sent
