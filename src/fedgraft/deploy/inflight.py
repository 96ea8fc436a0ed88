"""Orders in nodes' hands: one that nobody will answer any more is known as lost at once, at the server and at the node.

Flower gives an order once. If the answer to a node's question for it is lost on the way, if the process that works on
it ends without an answer, or if that cannot be sent, nobody ever hears of the order again, and a run would wait for as
long as for a node that is slow. But a node does one thing at a time: it asks for an order when it is done with the one
before, or when it was started anew. So the server's link (`InHand`) knows by that question that an order without an
answer will never have one, and says so to the run; and a node whose process ended without an answer does not wait for
it (`answering`), but goes on and asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LOST = "the node went on without answering this order"


class InFlightTracker:
    """The link's view: which order each node was given, and which of them it is done with."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        """Orders without an answer so far, by their number: what they are."""
        self.latest: dict[int, str] = {}
        self.over: set[str] = set()
        """Those that their node is done with: if there is no answer, there will be none."""

    def asks(self, node: int) -> None:
        """A node asks for its next order, or was started anew."""
        if (before := self.latest.pop(node, None)) in self.given:
            self.over.add(str(before))

    def gets(self, node: int, request: Any) -> None:
        """A node is given an order; this is its metadata."""
        self.given[request.message_id], self.latest[node] = request, request.message_id

    def answered(self, request: str) -> None:
        """The run has its answer."""
        self.given.pop(request, None)
        self.over.discard(request)

    def connecting(self, activate: Callable[..., Any]) -> Callable[..., Any]:
        """Flower's letting a node in, with the note that what it had before died with its process."""

        def answer(request: Any, state: Any) -> Any:
            found = activate(request=request, state=state)
            self.asks(found.node_id)
            return found

        return answer

    def giving(self, pull: Callable[..., Any]) -> Callable[..., Any]:
        """Flower's giving a node its next order, noted."""
        from flwr.common.serde import message_from_proto

        def answer(request: Any, state: Any, store: Any) -> Any:
            self.asks(request.node.node_id)
            found = pull(request=request, state=state, store=store)
            for one in found.messages_list:
                self.gets(request.node.node_id, message_from_proto(one).metadata)
            return found

        return answer

    def responses(self, look: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Flower's look for the answers to a run's orders, in which a lost order has an error as its answer."""

        def answer(state: Any, message_ids: set[str], run_id: int) -> list[Any]:
            over = message_ids & self.over  # before the look: the answer of a node that is done is there by now
            found = look(state, message_ids=message_ids, run_id=run_id)
            for one in found:
                self.answered(one.metadata.reply_to_message_id)
            for one in over & self.over:
                found.append(lost(self.given[one]))
                state._store_generated_message(found[-1])
                self.answered(one)
            return found

        return answer


def lost(request: Any) -> Any:
    """The answer to an order that nobody will answer."""
    from flwr.app import Error
    from flwr.app.message import make_message
    from flwr.common.constant import ErrorCode
    from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message

    like = create_message_error_unavailable_res_message(request, "node_unavail").metadata
    response = make_message(like, error=Error(ErrorCode.NODE_UNAVAILABLE, LOST))
    response.metadata.__dict__["_message_id"] = response.object_id
    return response


def answering(push: Callable[..., None], rest: Callable[[float], None] = time.sleep) -> Callable[..., None]:
    """A node's waiting for its answer and sending it, which ends when no process works on one any more."""

    def send(*, state: Any, object_store: Any, **parts: Any) -> None:
        while not (ready := _whole(state, object_store)):
            working = state.get_tasks(statuses=["pending", "starting", "running"])
            if not working and not (ready := _whole(state, object_store)):  # it may have ended well since the look
                break
            rest(0.5)
        if ready:
            push(state=state, object_store=object_store, **parts)
            return
        why = [one.status.details for one in state.get_tasks()][-1:]
        print(f"WARNING: an order's process ended without an answer {why}", flush=True)
        for entry in list(state.msg_store.values()):  # half an answer would be waited for as well
            object_store.delete(entry.message.metadata.message_id)
        state.delete_messages()

    return send


def _whole(state: Any, object_store: Any) -> bool:
    """Whether there is an answer, with all its pieces."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    with state.lock_msg_store:
        waiting = [one.message.metadata for one in state.msg_store.values() if not one.is_retrieved]
    answers = [one.message_id for one in waiting if one.reply_to_message_id]
    trees = [object_store.get_object_tree(one) for one in answers]
    return bool(trees) and all(object_store.get(one.object_id) for tree in trees for one in iterate_object_tree(tree))
