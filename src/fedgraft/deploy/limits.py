"""Size limits at the port: what is too large is refused before it is received, by the server and by the node.

Flower sends a message as a tree of objects, an array as chunks of at most `CHUNK` bytes, and accepts any size. Here no
HTTP request to the server and no HTTP response to a node may be longer than one object (`BODY`), and no message may
name more objects than its limit in bytes needs; and no process builds an array over it, however often one chunk is
repeated in it. The server's limit for responses is published by the run, which knows its network
(`publish_response_limit`); the node's limit for requests is in the owner's policy (`request_megabytes`). In place of a
message that is too large the receiver gets an error, and the run continues.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError

CHUNK = 5 << 20
BODY = CHUNK + (1 << 17)
"""Most bytes of one HTTP request or response: an object of one chunk and Flower's envelope around it."""
EXTRA_OBJECTS = 8
"""Objects of a message besides the chunks of its arrays."""
LEAST_RESPONSE_LIMIT = 64 << 20
"""The limit for responses before a run has published a larger one."""
DEFAULT_REQUEST_MEGABYTES = 1024
_LIMIT_FILE = "response-limit"
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


# ---- the limits ------------------------------------------------------------------------------------------------------


def response_limit(parameters: int, width: int, classes: int) -> int:
    """Return the most bytes that an honest response can have with this network: three vectors, and sums for a head."""
    head_sums = 16 * (width + 1) * (width + 1 + classes)
    return max(LEAST_RESPONSE_LIMIT, 12 * parameters + head_sums + (16 << 20))


def publish_response_limit(limit: int) -> None:
    """Write the limit for the bytes of a response to a file that the server's port reads.

    Build no larger arrays here.
    """
    bound_arrays(limit)
    home = os.environ.get("FLWR_HOME")
    if home:
        (Path(home) / _LIMIT_FILE).write_text(str(limit))


def published_response_limit() -> int:
    """Return the limit that the latest run published."""
    path = Path(os.environ.get("FLWR_HOME", ".")) / _LIMIT_FILE
    if not path.is_file():
        return LEAST_RESPONSE_LIMIT
    return int(path.read_text() or LEAST_RESPONSE_LIMIT)


def request_limit(policy: Path) -> int:
    """Return the most bytes of a request, from the owner's policy, without the imports that its other rules need."""
    if not policy.is_file():
        return DEFAULT_REQUEST_MEGABYTES << 20
    try:
        table = tomllib.loads(policy.read_text())
        return int(table.get("request_megabytes", DEFAULT_REQUEST_MEGABYTES)) << 20
    except (ValueError, TypeError) as error:  # TOMLDecodeError is a ValueError
        raise FedgraftError(
            "E-DEPLOY-POLICY",
            f"the policy {policy} cannot be read: {error}",
            "correct it, or write it again with: fedgraft deploy policy",
            path=str(policy),
        ) from None


def request_too_large(limit: int) -> str:
    """Return the reason that the server gets in place of the response to a request over the limit."""
    return f"the request is larger than the {limit >> 20} MB that its owner's policy allows"


def response_too_large(limit: int) -> str:
    """Return the reason that the run gets in place of a response over the limit."""
    return f"its response is larger than the limit of {limit >> 20} MB"


def too_large(tree: Any, limit: int) -> bool:
    """Return whether a message of this tree of objects may exceed the limit in bytes.

    Walk no more of it than needed.
    """
    most_objects = -(-limit // CHUNK) + EXTRA_OBJECTS
    return any(number > most_objects for number, _ in enumerate(_walk(tree), 1))


def _walk(tree: Any) -> Iterator[Any]:
    """Yield all objects of a tree, without recursion."""
    pending = [tree]
    while pending:
        node = pending.pop()
        pending += node.children
        yield node


# ---- arrays ----------------------------------------------------------------------------------------------------------

_REPLACEMENT = b"an array over the limit"  # not a valid message, so that its reader refuses it


def bound_arrays(limit: int) -> None:
    """From now on build no Flower array over `limit` bytes in this process: a larger one becomes an invalid message.

    One chunk may be repeated a million times in an array. Flower's class is changed in place.
    """
    from flwr.app.message.array import Array
    from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_children_ids_from_object_content

    def inflate(cls: Any, object_content: bytes, children: Any = None) -> Any:
        """Return the array of these chunks, or a replacement that no reader accepts if it is over the limit."""
        header = json.loads(get_object_body(object_content, cls))
        objects = children or {}
        ids = get_object_children_ids_from_object_content(object_content)
        chunks = [objects[ids[index]].data for index in header["arraychunk_ids"]]
        data = _REPLACEMENT
        if sum(map(len, chunks)) <= limit:
            data = b"".join(chunks)
        return cls(header["dtype"], tuple(header["shape"]), header["stype"], data)

    Array.inflate = classmethod(inflate)  # type: ignore[assignment, method-assign]


# ---- the server's port -----------------------------------------------------------------------------------------------


class RequestSizeLimit:
    """ASGI middleware: refuse a request longer than one object before it is read, or once it turns out to be."""

    def __init__(self, app: App, paths: tuple[str, ...], most: int = BODY) -> None:
        self.app = app
        self.paths = paths
        self.most = most

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Answer 413 if the declared length is too large; disconnect if the actual length is."""
        if scope["type"] != "http" or not str(scope["path"]).startswith(self.paths):
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self.most:
            await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"longer than one object"})
            return
        received = 0

        async def receive_limited() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.most:
                return {"type": "http.disconnect"}
            return message

        await self.app(scope, receive_limited, send)


def limit_responses(push: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's handler `push`, which accepts a response, with an error in place of one over the limit.

    The response is not received then.
    """
    from flwr.app import Error
    from flwr.app.message import make_message
    from flwr.common.serde import message_from_proto
    from flwr.proto.fleet_pb2 import PushMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import get_object_tree

    def push_messages(request: Any, state: Any) -> Any:
        """Accept a node's response, or store an error for the run if it announces more than the published limit."""
        limit = published_response_limit()
        if not request.messages_list or not too_large(request.message_object_trees[0], limit):
            return push(request=request, state=state)
        metadata = message_from_proto(request.messages_list[0]).metadata
        response = make_message(metadata, error=Error(0, response_too_large(limit)))
        metadata.__dict__["_message_id"] = response.object_id
        session = state.start_session(metadata.run_id)
        state.store_message_and_object_tree(response, get_object_tree(response), session)
        state.store_object(metadata.run_id, session, response.object_id, response.deflate())
        return PushMessagesResponse(results={response.object_id: 0}, session_id=session)

    return push_messages


# ---- a node's connection ---------------------------------------------------------------------------------------------


class RequestTooLarge(Exception):
    """A request is over the limit; `message` is the message that announced it."""

    def __init__(self, message: Any) -> None:
        self.message = message


def limit_requests(receive: Callable[[], Any], limit: int) -> Callable[[], Any]:
    """Return a node's function `receive`, which polls for a request, so that one over the limit is not fetched.

    It raises `RequestTooLarge` then.
    """

    def receive_limited() -> Any:
        """Poll for a request; raise `RequestTooLarge` if it announces more than the limit."""
        received = receive()
        if received is not None:
            message, tree = received[:2]
            if too_large(tree, limit):
                raise RequestTooLarge(message)
        return received

    return receive_limited


def limit_http_responses(client: Any, most: int = BODY) -> Any:
    """Return Flower's HTTP client, changed in place to disconnect from a response of more than `most` bytes."""
    import httpx

    class LimitedStream(httpx.SyncByteStream):
        """The body of a response, of which no more than `most` bytes are read."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __iter__(self) -> Iterator[bytes]:
            received = 0
            for part in self.stream:
                received += len(part)
                if received > most:
                    raise ValueError("the server's response is longer than one object")
                yield part

        def close(self) -> None:
            self.stream.close()

    transport = client._client._transport
    handle_request = transport.handle_request

    def handle_limited(request: Any) -> Any:
        """Return the response to a request, with the length of its body limited."""
        response = handle_request(request)
        response.stream = LimitedStream(response.stream)
        return response

    transport.handle_request = handle_limited
    return client
