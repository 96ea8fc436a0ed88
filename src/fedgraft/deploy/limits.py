"""Sizes at the port: what is too large is refused before it is received, at the server and at the node.

Flower sends a message as a tree of objects, an array as pieces of at most `PIECE` bytes, and takes what comes whole.
Here no request to the server and no answer to a node may be longer than one object (`BODY`), and no message may name
more objects than its limit in bytes needs; and no process builds an array over it, however often one piece stands in
that. The server's limit for replies is stated by the run (`state`: it knows its network), the node's for orders by
the owner's policy (`order_megabytes`). Whoever sends too much is answered for: the other side gets an error in its
place and the run goes on.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

PIECE = 5 << 20
BODY = PIECE + (1 << 17)
"""Most bytes of one request or answer: an object of one piece and what Flower writes around it."""
SPARE = 8
"""Objects of a message besides the pieces of its arrays."""
LEAST = 64 << 20
"""The limit for replies where no run has stated another."""
ORDER_MEGABYTES = 1024
_FILE = "reply-limit"
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


def reply_limit(parameters: int, width: int, classes: int) -> int:
    """Most bytes that an honest reply of any kind has with this network: three vectors, and sums for a head."""
    return max(LEAST, 12 * parameters + 16 * (width + 1) * (width + 1 + classes) + (16 << 20))


def state(limit: int) -> None:
    """Tell the server's port how large replies may be, and let this process build no larger ones."""
    bound_arrays(limit)
    if home := os.environ.get("FLWR_HOME"):
        (Path(home) / _FILE).write_text(str(limit))


def stated() -> int:
    """What the latest run told this port."""
    path = Path(os.environ.get("FLWR_HOME", ".")) / _FILE
    return int(path.read_text() or LEAST) if path.is_file() else LEAST


def order_limit(policy: Path) -> int:
    """Most bytes of an order, from the owner's policy; read without what a policy's other rules need."""
    table = tomllib.loads(policy.read_text()) if policy.is_file() else {}
    return int(table.get("order_megabytes", ORDER_MEGABYTES)) << 20


def too_large(tree: Any, limit: int) -> bool:
    """Whether a message of these objects may be larger than the limit; no more of it is walked than decides."""
    most = -(-limit // PIECE) + SPARE
    return any(number > most for number, _ in enumerate(_walk(tree), 1))


def _walk(tree: Any) -> Iterator[Any]:
    waiting = [tree]
    while waiting:
        waiting += (one := waiting.pop()).children
        yield one


def bound_arrays(limit: int) -> None:
    """From now on this process builds no array over the limit: one piece may stand in it a million times."""
    from flwr.app.message.array import Array
    from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_children_ids_from_object_content

    def inflate(cls: Any, object_content: bytes, children: Any = None) -> Any:
        said, known = json.loads(get_object_body(object_content, cls)), children or {}
        ids = get_object_children_ids_from_object_content(object_content)
        pieces = [known[ids[i]].data for i in said["arraychunk_ids"]]
        whole = sum(map(len, pieces)) <= limit
        return cls(said["dtype"], tuple(said["shape"]), said["stype"], b"".join(pieces) if whole else _NONE)

    Array.inflate = classmethod(inflate)  # type: ignore[assignment, method-assign]


_NONE = b"an array over the limit"  # no message: whoever reads it refuses it by name


class Bounded:
    """ASGI middleware: a request longer than one object is refused before it is read, or where it becomes so."""

    def __init__(self, app: App, paths: tuple[str, ...], most: int = BODY) -> None:
        self.app, self.paths, self.most = app, paths, most

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """Answer 413 to what says that it is too long; hang up on what turns out to be."""
        if scope["type"] != "http" or not str(scope["path"]).startswith(self.paths):
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self.most:
            await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"longer than one object"})
            return
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            return message if seen <= self.most else {"type": "http.disconnect"}

        await self.app(scope, counted, send)


def bounded_replies(push: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's taking of a reply, which puts an error in the place of one over the limit, before any of it is sent."""
    from flwr.app import Error
    from flwr.app.message import make_message
    from flwr.common.serde import message_from_proto
    from flwr.proto.fleet_pb2 import PushMessagesResponse
    from flwr.supercore.inflatable.inflatable_object import get_object_tree

    def answer(request: Any, state: Any) -> Any:
        if not request.messages_list or not too_large(request.message_object_trees[0], limit := stated()):
            return push(request=request, state=state)
        metadata = message_from_proto(request.messages_list[0]).metadata
        response = make_message(metadata, error=Error(0, f"its reply is larger than the limit of {limit >> 20} MB"))
        metadata.__dict__["_message_id"] = response.object_id
        session = state.start_session(metadata.run_id)
        state.store_message_and_object_tree(response, get_object_tree(response), session)
        state.store_object(metadata.run_id, session, response.object_id, response.deflate())
        return PushMessagesResponse(results={response.object_id: 0}, session_id=session)

    return answer


class TooLarge(Exception):
    """An order over the limit; the message that it came in."""

    def __init__(self, message: Any) -> None:
        self.message = message


def bounded_orders(receive: Callable[[], Any], limit: int) -> Callable[[], Any]:
    """A node's looking for an order, which refuses one over the limit before any of it is fetched."""

    def look() -> Any:
        found = receive()
        if found is not None and too_large(found[1], limit):
            raise TooLarge(found[0])
        return found

    return look


def bounded_answers(client: Any, most: int = BODY) -> Any:
    """Flower's line to the server, which hangs up on an answer that is longer than one object."""
    import httpx

    class Counted(httpx.SyncByteStream):
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __iter__(self) -> Iterator[bytes]:
            seen = 0
            for part in self.stream:
                if (seen := seen + len(part)) > most:
                    raise ValueError("the server's answer is longer than one object")
                yield part

        def close(self) -> None:
            self.stream.close()

    send = client._client._transport.handle_request

    def handle(request: Any) -> Any:
        response = send(request)
        response.stream = Counted(response.stream)
        return response

    client._client._transport.handle_request = handle
    return client
