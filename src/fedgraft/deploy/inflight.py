"""Requests in flight: one that will never be answered is reported as lost at once, by the server and by the node.

Flower delivers a request once. If the response to a node's poll is lost on the way, if the process that works on the
request ends without an answer, or if the answer cannot be sent, nobody hears of the request again, and a run would wait
for it as long as for a slow node. But a node does one thing at a time: it polls for the next request when it has
finished the one before, or when it was restarted. So the SuperLink (`InFlightTracker`) knows from that poll that an
unanswered request will never be answered, and reports it to the run. A node whose process ended without an answer does
not wait for it (`push_or_give_up`), but continues and polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

REQUEST_LOST = "the node continued without answering this request"
"""The reason that a run gets in place of the response to a lost request."""
_UNFINISHED = ("pending", "starting", "running")  # statuses of a task that may still answer


class InFlightTracker:
    """The SuperLink's record of the requests that nodes work on, and of those that they gave up."""

    def __init__(self) -> None:
        self.unanswered: dict[str, Any] = {}
        """Metadata of the requests without a response so far, by message id."""
        self.latest: dict[int, str] = {}
        """The request that each node received last."""
        self.abandoned: set[str] = set()
        """Requests whose node has moved on: if there is no response by now, there will be none."""

    def node_polled(self, node: int) -> None:
        """Note that a node polls for its next request, or was restarted."""
        previous = self.latest.pop(node, None)
        if previous is not None and previous in self.unanswered:
            self.abandoned.add(previous)

    def node_received(self, node: int, request: Any) -> None:
        """Note that a node received a request with this metadata."""
        self.unanswered[request.message_id] = request
        self.latest[node] = request.message_id

    def run_received(self, request_id: str) -> None:
        """Note that the run has the response to a request."""
        self.unanswered.pop(request_id, None)
        self.abandoned.discard(request_id)

    def wrap_activate(self, activate: Callable[..., Any]) -> Callable[..., Any]:
        """Return Flower's handler that admits a node, noting that its earlier request died with its process."""

        def activate_node(request: Any, state: Any) -> Any:
            """Admit a node; its earlier request, if any, counts as abandoned."""
            response = activate(request=request, state=state)
            self.node_polled(response.node_id)
            return response

        return activate_node

    def wrap_pull(self, pull: Callable[..., Any]) -> Callable[..., Any]:
        """Return Flower's handler that gives a node its next request, with the request noted."""
        from flwr.common.serde import message_from_proto

        def pull_messages(request: Any, state: Any, store: Any) -> Any:
            """Give a node its next request; its earlier one without a response counts as abandoned."""
            node = request.node.node_id
            self.node_polled(node)
            response = pull(request=request, state=state, store=store)
            for message in response.messages_list:
                self.node_received(node, message_from_proto(message).metadata)
            return response

        return pull_messages

    def wrap_get_responses(self, get_responses: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Return Flower's method that collects the responses to a run's requests, with errors for lost requests."""

        def get_message_res(state: Any, message_ids: set[str], run_id: int) -> list[Any]:
            """Return the responses that have come, with an error in place of each abandoned request's."""
            abandoned = message_ids & self.abandoned  # before collecting: a response sent before the poll is there now
            responses = get_responses(state, message_ids=message_ids, run_id=run_id)
            for response in responses:
                self.run_received(response.metadata.reply_to_message_id)
            for request_id in abandoned & self.abandoned:
                response = lost_response(self.unanswered[request_id])
                responses.append(response)
                state._store_generated_message(response)
                self.run_received(request_id)
            return responses

        return get_message_res


def lost_response(request: Any) -> Any:
    """Return the error message in place of the response to a lost request."""
    from flwr.app import Error
    from flwr.app.message import make_message
    from flwr.common.constant import ErrorCode
    from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message

    metadata = create_message_error_unavailable_res_message(request, "node_unavail").metadata
    response = make_message(metadata, error=Error(ErrorCode.NODE_UNAVAILABLE, REQUEST_LOST))
    response.metadata.__dict__["_message_id"] = response.object_id
    return response


def push_or_give_up(push: Callable[..., None], sleep: Callable[[float], None] = time.sleep) -> Callable[..., None]:
    """Return Flower's function `push`, which sends a node's answer, changed to give up if no process works on one."""

    def push_messages(*, state: Any, object_store: Any, **arguments: Any) -> None:
        """Wait for a complete answer and send it; discard it if the process that works on it has ended."""
        while not _answer_complete(state, object_store):
            unfinished = state.get_tasks(statuses=list(_UNFINISHED))
            if not unfinished and not _answer_complete(state, object_store):  # it may have completed in between
                _discard_answer(state, object_store)
                return
            sleep(0.5)
        push(state=state, object_store=object_store, **arguments)

    return push_messages


def _discard_answer(state: Any, object_store: Any) -> None:
    """Forget the request and a partial answer, for which the node would wait as well."""
    details = [task.status.details for task in state.get_tasks()]
    print(f"WARNING: the process of a request ended without an answer {details[-1:]}", flush=True)
    for entry in list(state.msg_store.values()):
        object_store.delete(entry.message.metadata.message_id)
    state.delete_messages()


def _answer_complete(state: Any, object_store: Any) -> bool:
    """Return whether there is an answer with all its objects."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    with state.lock_msg_store:
        pending = [entry.message.metadata for entry in state.msg_store.values() if not entry.is_retrieved]
    answers = [metadata.message_id for metadata in pending if metadata.reply_to_message_id]
    for message_id in answers:
        for node in iterate_object_tree(object_store.get_object_tree(message_id)):
            if not object_store.get(node.object_id):
                return False
    return bool(answers)
