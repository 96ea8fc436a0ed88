"""Requests in flight: lost ones are reported at once, and a response that arrived is never taken for lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedgraft.deploy.inflight import REQUEST_LOST, InFlightTracker, push_or_give_up

NODE = 7
RUN = 1


def request(name: str) -> Message:
    return make_message(Metadata(RUN, name, 1, NODE, "", "", 0.0, 6e10, "train"), RecordDict())


class Link:
    """Flower's link for one node: requests wait, are delivered once, and have responses or not."""

    def __init__(self, guarded: bool) -> None:
        tracker: InFlightTracker = BlindTracker()
        if guarded:
            tracker = InFlightTracker()
        self.waiting: list[Message] = []
        self.stored: dict[str, Any] = {}
        self.tracker = tracker
        self._store_generated_message = lambda message: None
        self.pull = tracker.wrap_pull(lambda request, state, store: SimpleNamespace(messages_list=self._next()))
        self.activate = tracker.wrap_activate(lambda request, state: SimpleNamespace(node_id=NODE))
        self._get = tracker.wrap_get_responses(lambda state, message_ids, run_id: self._take(message_ids))

    def _next(self) -> list[Any]:
        return [message_to_proto(self.waiting.pop(0))] if self.waiting else []

    def _take(self, message_ids: set[str]) -> list[Any]:
        return [self.stored.pop(name) for name in sorted(message_ids) if name in self.stored]

    def poll(self) -> None:
        self.pull(request=SimpleNamespace(node=SimpleNamespace(node_id=NODE)), state=None, store=None)

    def push(self, name: str) -> None:
        self.stored[name] = SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=name), has_error=lambda: False)

    def collect(self, *names: str) -> dict[str, str]:
        """Return what the run gets by request: an empty text for a response, the reason of an error in its place."""
        reasons = {}
        for response in self._get(self, message_ids=set(names), run_id=RUN):
            reason = ""
            if response.has_error():
                reason = response.error.reason
            reasons[response.metadata.reply_to_message_id] = reason
        return reasons


class BlindTracker(InFlightTracker):
    """The broken variant: polls of nodes are not noted."""

    def node_polled(self, node: int) -> None:
        pass


def move_on(link: Link, how: str) -> None:
    """Let the node continue: it polls for the next request, or was restarted."""
    if how == "polls":
        link.poll()
    else:
        link.activate(request=None, state=None)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("again", ["polls", "restarts"])
def test_a_request_whose_node_moved_on_is_lost_at_once(again: str, guarded: bool) -> None:
    link = Link(guarded)
    link.waiting += [request("one"), request("two")]
    link.poll()
    assert link.collect("one", "two") == {}  # it works on it
    move_on(link, again)
    assert link.collect("one", "two") == ({"one": REQUEST_LOST} if guarded else {})
    assert link.collect("two") == {}


@pytest.mark.parametrize("again", ["polls", "restarts"])
def test_an_answer_that_came_counts_whatever_its_node_did_since(again: str) -> None:
    link = Link(True)
    link.waiting.append(request("one"))
    link.poll()
    link.push("one")
    move_on(link, again)
    assert link.collect("one") == {"one": ""} and link.collect("one") == {}


def test_nothing_is_stored_of_requests_that_are_answered() -> None:
    link = Link(True)
    for number in range(50):
        link.waiting.append(request(f"{number}"))
        link.poll()
        link.push(f"{number}")
        if number % 2:  # the run collects before the node polls again, or after it
            link.poll()
        link.collect(f"{number}")
    link.poll()
    assert not link.tracker.unanswered and not link.tracker.abandoned and len(link.tracker.latest) <= 1


class Worker:
    """A node's state with one request and the process that works on it."""

    def __init__(self) -> None:
        self.store = InMemoryObjectStore()
        self.state = InMemoryNodeState(self.store)
        self.sent = list[str]()
        message = request("one")
        self.store.preregister(RUN, get_object_tree(message))
        self.state.store_message(message)
        task = self.state.create_task(task_type="flwr-clientapp", run_id=RUN, fab_hash="")
        assert task is not None
        self.task = task
        self.message = message
        token = self.state.claim_task(task)
        assert token and self.state.activate_task(task)
        self.state.get_messages_legacy(run_ids=[RUN], is_reply=False, limit=1)

    def answer(self, pieces: bool) -> None:
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        response = Message(RecordDict(), reply_to=self.message)
        response.metadata.__dict__["_message_id"] = response.object_id
        session = self.state.start_session(RUN)
        self.state.store_message_and_object_tree(response, get_object_tree(response), session)
        for name, part in get_all_nested_objects(response).items() if pieces else ():
            self.state.store_object(RUN, session, name, part.deflate())

    def end(self, how: str) -> None:
        self.state.finish_task(self.task, how, "why it ended")

    def push(self, state: Any, object_store: Any, send: Any) -> None:
        messages = state.get_messages_legacy(is_reply=True)
        self.sent += [message.metadata.reply_to_message_id for message in messages]


@pytest.mark.parametrize("story", ["answers", "answers late", "ends", "fails", "half"])
def test_a_node_waits_for_its_answer_and_not_for_one_that_nobody_makes(story: str) -> None:
    worker = Worker()
    rests = list[float]()

    def rest(seconds: float) -> None:
        rests.append(seconds)
        assert len(rests) < 10, "it waits for ever"
        if story == "answers late" and len(rests) < 5:
            return
        if story not in ("ends", "fails"):
            worker.answer(story != "half")
        worker.end("failed" if story == "fails" else "completed")

    push_or_give_up(worker.push, rest)(state=worker.state, object_store=worker.store, send=None)
    assert worker.sent == (["one"] if story.startswith("answers") else [])
    assert not worker.state.msg_store or worker.sent


def test_flower_alone_waits_for_ever() -> None:
    """Without the guard: if this fails, Flower has mended it and the guard can go."""
    from flwr.supernode import start_client_internal as loop

    worker = Worker()
    rests = list[float]()

    def rest(seconds: float) -> None:
        rests.append(seconds)
        worker.end("failed")
        if len(rests) == 10:
            raise TimeoutError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError):
        patch.setattr(loop, "time", SimpleNamespace(sleep=rest))
        loop._push_messages(worker.state, worker.store, None, None)  # type: ignore[arg-type]
