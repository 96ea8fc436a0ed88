"""A hostile server in a table: every lie it can tell a client, the rule that must refuse it, and what it would gain.

`World` is a toy federation under one protection with an owner's policy. A lie is told to client 1 (`VICTIM`), alone or
inside an otherwise honest secure sum. It is refused if the victim answers with the rule's name, and nothing more comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.support.toy import CLASSES, WIDTH, Toy

from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import uniform
from fedgraft.algorithms.algorithm import Algorithm, secure_segments, vary
from fedgraft.client.actions import action_named
from fedgraft.client.handle import handle_or_refuse
from fedgraft.client.history import ModelHistory
from fedgraft.client.policy import Policy
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response, Scalar, wire_size
from fedgraft.privacy.dp import Mechanism, simulation_key
from fedgraft.privacy.protection import DifferentialPrivacy, private, secure
from fedgraft.privacy.secagg import server as secagg_server
from fedgraft.privacy.secagg.client import as_tensor
from fedgraft.privacy.secagg.plan import Plan
from fedgraft.privacy.secagg.ring import Segment, segments_of
from fedgraft.server.sample import instruct
from fedgraft.server.secure_sum import SecureSession

PROTECTIONS = ("clear", "secure", "private", "secure+private")
VICTIM, OTHER, CLIENTS, FOUR = 1, 3, (0, 1, 2, 3, 4), (0, 1, 2, 4)
Answer = Response | str
Tamper = Callable[[Request], Request]


def algorithm_of(protection: str, degree: int | None = None) -> Algorithm:
    """FedAvg under a protection."""
    made = vary(zoo.fedavg(), weighting=uniform())
    made = secure(made, limit=2.0, degree=degree) if "secure" in protection else made
    noise = DifferentialPrivacy(Mechanism(1.0, 1.0, len(CLIENTS)), 0.5, key=simulation_key(1))
    return private(made, noise) if "private" in protection else made


def policy_of(protection: str) -> Policy:
    """What the owner allows: training, sums before it, one count; nothing in the clear where sums are hidden."""
    actions = ("train", "statistics", "head_gradient", "gradient", "fisher_scores", "count")
    return Policy(
        config="toy",
        secure="secure" in protection,
        actions=actions,
        noise=1.0 if "private" in protection else None,
        cohort=3,
        threshold=0.7,
        degree=2,
        most_clients=50,
        rounds=10,
        sums=3,
        rounds_per_day=6,
        queries_per_day=6,
        least_images=5,
        heads=4,
        ranges={"lr": (0.0, 0.1), "clip": (0.0, 1.0)},
    )


class World:
    """Five clients with their memories under an owner's policy, and a server that says what it likes."""

    run = "toy"

    def __init__(self, protection: str, degree: int | None = None) -> None:
        self.toy = Toy(algorithm_of(protection, degree), clients=len(CLIENTS), per_round=len(CLIENTS))
        self.algorithm, self.context = self.toy.algorithm, self.toy.context
        self.context.policies, self.context.replays = (policy_of(protection),), True
        self.context.held = lambda client: torch.arange(8)
        self.memory: dict[int, Mapping[str, torch.Tensor]] = {}
        self.histories: dict[int, ModelHistory] = {}
        """What each client knows of the run's models; empty: nothing, as in a simulation."""
        self.said: list[tuple[str, int, Answer]] = []
        self.lied_at = ""
        """The stage whose message is the lie; it must be refused there."""
        self.elsewhere = ""
        """What the others were told of the run besides their orders, where that is not what the victim was told."""

    def request(self, client: int = VICTIM, action: str = "train", **changes: Any) -> Request:
        """An honest order, apart from the changes; settings are added to, None takes one out."""
        settings: dict[str, Scalar | None] = dict(changes.pop("settings", {}))
        toy = self.toy
        made = instruct(self.algorithm, toy.federation, toy.state, [client], toy.space.digest)[0]
        both = {**made.settings, **settings}
        made = replace(made, action=action, settings={k: v for k, v in both.items() if v is not None})
        return replace(made, **changes)

    def allow(self, **changes: Any) -> None:
        """Other rules than the owner's usual ones."""
        self.context.policies = tuple(replace(p, **changes) for p in self.context.policies)

    def tell(self, request: Request) -> Answer:
        """Give an order to its client."""
        context = self.context
        if request.client in self.histories:
            context = replace(context, history=self.histories[request.client])
        if self.elsewhere and request.client != VICTIM:
            context = replace(context, run_fingerprint=self.elsewhere)
        answer, self.memory[request.client] = handle_or_refuse(
            request, self.algorithm, context, self.memory.get(request.client, {})
        )
        self.said.append((request.action, request.client, answer))
        return answer

    @property
    def head_shape(self) -> tuple[int, int]:
        """Classes, and features with the bias."""
        classes, width = dict(self.context.network.named_parameters())["head.weight"].shape
        return classes, width + 1

    def backup(self) -> Any:
        """Return the victim's memory as it is now."""
        return dict(self.memory[VICTIM])

    def restore(self, backup: Any) -> None:
        """Let the victim go on with an earlier memory."""
        self.memory[VICTIM] = backup

    def sum(
        self,
        tamper: Tamper = lambda request: request,
        clients: Sequence[int] = CLIENTS,
        action: str = "train",
        number: int = 0,
        silent: Mapping[str, int] | None = None,
        space: str = "",
        vector: torch.Tensor | None = None,
        auxiliary: Mapping[str, torch.Tensor] | None = None,
        **more: Scalar,
    ) -> Mapping[str, torch.Tensor] | None:
        """A secure sum in which the victim is told something else; None where it was not opened."""
        told: dict[str, Scalar] = {"sums": action, **({"largest": 20} if action == "train" else {}), **more}
        if action == "train":
            requests = [self.request(k, round=number, settings=told) for k in clients]
            segments = secure_segments(self.algorithm, self.context.sent, self.context.space.trained, {})
        else:
            words = auxiliary or {}
            requests = [Request(self.run, number, k, action, space or action, vector, words, told) for k in clients]
            segments = segments_of(action_named(action).summands(self.context.network, told))

        def exchange(asked: Sequence[Request]) -> list[Any]:
            heard = [o for o in asked if (silent or {}).get(o.action) != o.client]
            answers = [(o.client, self.tell(tamper(o) if o.client == VICTIM else o)) for o in heard]
            return [answer if isinstance(answer, Response) else (client, answer) for client, answer in answers]

        with suppress(FedgraftError):
            return SecureSession(self.algorithm.privacy, requests, exchange).total(segments).sums
        return None

    def refused(self) -> str:
        """The victim's first refusal."""
        return next((a for _, client, a in self.said if client == VICTIM and isinstance(a, str)), "")

    def plan(self, request: Request, **changes: Any) -> Request:
        """A first stage whose plan is another one."""
        if request.action != "secure.keys":
            return request
        honest = Plan.from_bytes(request.auxiliary["plan"].numpy().tobytes())
        text = changes.pop("text", None)
        data = text if text is not None else replace(honest, **changes).to_bytes()
        return replace(request, auxiliary={"plan": as_tensor(data)})


@dataclass(frozen=True)
class Lie:
    """What is told, and the name of the rule that must stop it."""

    rule: str
    tell: Callable[[World], Any]
    where: tuple[str, ...] = PROTECTIONS
    family: str = "request"
    degree: int | None = None


HIDDEN, CLEAR, NOISED = ("secure", "secure+private"), ("clear", "private"), ("private", "secure+private")


def _only(**changes: Any) -> Callable[[World], Any]:
    return lambda world: world.tell(world.request(**changes))


def _in(stage: str, change: Callable[[World, Request], Request], **more: Any) -> Callable[[World], Any]:
    """A lie at one stage of a secure sum."""

    def tell(world: World) -> None:
        world.lied_at = f"secure.{stage}"
        world.sum(lambda o: change(world, o) if o.action == world.lied_at else o, **more)

    return tell


def _planned(**changes: Any) -> Callable[[World], Any]:
    return _in("keys", lambda world, request: world.plan(request, **changes))


def _told(**settings: Any) -> Callable[[World], Any]:
    """One client's settings differ, all along."""
    return lambda world: world.sum(lambda o: replace(o, settings={**o.settings, **settings}))


def _aux(stage: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[World], Any]:
    def spoil(world: World, request: Request) -> Request:
        return replace(request, auxiliary={**request.auxiliary, name: change(request.auxiliary[name])})

    return _in(stage, spoil)


def _after(first: Callable[[World], Any], then: Callable[[World], Any]) -> Callable[[World], Any]:
    """An honest beginning, which is forgotten, and then the lie."""

    def tell(world: World) -> Any:
        first(world)
        world.said.clear()
        return then(world)

    return tell


def _often(count: int, **changes: Any) -> Callable[[World], Any]:
    return _after(lambda w: [w.tell(w.request(**changes)) for _ in range(count)], _only(**changes))


def _rounds(world: World) -> None:
    for number in range(6):
        world.sum(number=number)


def _scores(**settings: Any) -> dict[str, Any]:
    known = {
        "names": "head.weight",
        "draw": 0,
        "share": 1.0,
        "estimator": "batched_gradient",
        "labels": "true",
        "batch": 8,
    }
    return {"action": "fisher_scores", "settings": {**known, **settings}}


def _heads(*shape: int) -> dict[str, Any]:
    return {"action": "count", "vector": None, "auxiliary": {"heads": torch.zeros(shape, dtype=torch.float64)}}


def _forged_draws(world: World, request: Request) -> Request:
    """As if everybody had drawn other holders, the victim among them: what a server would choose for itself."""
    ids, drawn = request.auxiliary["data:ids"].tolist(), request.auxiliary["data:drawn"].tolist()
    forged = []
    for client, row in zip(ids, drawn, strict=True):
        others = [v for v in CLIENTS if v not in (client, VICTIM)]
        forged.append(next(sorted((VICTIM, v)) for v in others if sorted((VICTIM, v)) != row))
    return replace(request, auxiliary={**request.auxiliary, "data:drawn": torch.tensor(forged)})


def _other_model(world: World, request: Request) -> Request:
    assert request.vector is not None
    return replace(request, vector=request.vector + 1e-6)


def _tuned(world: World, **settings: Any) -> None:
    world.allow(actions=("train", "evaluate"))
    world.tell(world.request(action="evaluate", settings={"finetune_epochs": 1, "finetune_lr": 0.01, **settings}))


def _narrow(world: World) -> None:
    world.allow(in_the_clear=("count",), least_images=10_000)
    world.tell(world.request(action="count"))


def _noise(world: World) -> None:
    world.allow(noise=2.0)
    world.tell(world.request())


def _unprotected(rule: str) -> Callable[[World], Any]:
    """A run without the protection that the owner wants."""

    def tell(world: World) -> None:
        world.algorithm = zoo.fedavg()  # on a node: a policy that the run's config breaks, before any order
        world.tell(world.request(action="train" if rule == "epsilon" else "secure.keys", settings={"sums": "train"}))

    return tell


LIES: dict[str, Lie] = {
    # plain orders to a client whose sums are hidden
    "train in the clear": Lie("secure", _only(), HIDDEN, "clear"),
    "statistics in the clear": Lie("secure", _only(action="statistics"), HIDDEN, "clear"),
    "head gradient in the clear": Lie("secure", _only(action="head_gradient"), HIDDEN, "clear"),
    "scores in the clear": Lie("secure", _only(**_scores()), HIDDEN, "clear"),
    "a count as a leak": Lie("secure", _only(action="count"), HIDDEN, "clear"),
    "an action the owner left out": Lie("actions", _only(action="evaluate"), family="actions"),
    "masks the owner left out": Lie("actions", _only(action="own_mask"), family="actions"),
    "an unknown action": Lie("actions", _only(action="dump_data"), family="unknown"),
    "an unknown stage": Lie("actions", _only(action="secure.reveal", settings={"sums": "train"}), family="unknown"),
    "a sum that is none": Lie("actions", _only(action="secure.keys", settings={"sums": "evaluate"}), family="actions"),
    "a sum without a purpose": Lie("actions", _only(action="secure.keys"), family="actions"),
    "a run without hiding": Lie("secure", _unprotected("secure"), HIDDEN, "protection"),
    "a run without noise": Lie("epsilon", _unprotected("epsilon"), ("private",), "protection"),
    "less noise than required": Lie("noise", _noise, ("private",), "protection"),
    # absurd orders
    "another run": Lie("config", _only(run="other"), CLEAR, "config"),
    "a rate that is no number": Lie("ranges.lr", _only(settings={"lr": float("nan")}), CLEAR, "numbers"),
    "a rate beyond the range": Lie("ranges.lr", _only(settings={"lr": 0.5}), CLEAR, "numbers"),
    "a negative rate": Lie("ranges.lr", _only(settings={"lr": -0.01}), CLEAR, "numbers"),
    "no rate": Lie("request", _only(settings={"lr": None}), CLEAR, "fits"),
    "a rate in words": Lie("request", _only(settings={"lr": "fast"}), CLEAR, "fits"),
    "a wide clip": Lie("ranges.clip", _only(settings={"clip": 1e6}), ("private",), "numbers"),
    "a negative clip": Lie("ranges.clip", _only(settings={"clip": -1.0}), ("private",), "numbers"),
    "no clip": Lie("request", _only(settings={"clip": None}), ("private",), "fits"),
    "a round too many": Lie("rounds", _only(round=10), CLEAR, "rounds"),
    "a round before the first": Lie("rounds", _only(round=-7), CLEAR, "rounds"),
    "no model": Lie("request", _only(vector=None), CLEAR, "fits"),
    "a model that is not finite": Lie(
        "request", lambda w: w.tell(w.request(vector=w.toy.state.vector / 0)), CLEAR, "fits"
    ),
    "a head's rate in words": Lie("request", _only(settings={"head_lr": "1e300"}), CLEAR, "fits"),
    "a head's rate beyond reason": Lie("ranges.head_lr", _only(settings={"head_lr": 1e12}), CLEAR, "numbers"),
    "epochs of fine-tuning in words": Lie("request", lambda w: _tuned(w, finetune_epochs="2"), ("clear",), "fits"),
    "a rate of fine-tuning beyond the range": Lie(
        "ranges.finetune_lr", lambda w: _tuned(w, finetune_lr=0.5), ("clear",), "numbers"
    ),
    "a part to fine-tune that is none": Lie("request", lambda w: _tuned(w, finetune_part="data"), ("clear",), "fits"),
    "clusters that are a number": Lie("request", _only(auxiliary={"clusters": torch.tensor(1.0)}), CLEAR, "fits"),
    "movable coordinates of another network": Lie(
        "request", _only(auxiliary={"active": torch.ones(1, dtype=torch.uint8)}), CLEAR, "fits"
    ),
    "a short model": Lie("request", lambda w: w.tell(w.request(vector=w.toy.state.vector[1:])), CLEAR, "fits"),
    "a model of integers": Lie("request", lambda w: w.tell(w.request(vector=w.toy.state.vector.long())), CLEAR, "fits"),
    "another edit space": Lie("request", _only(space="0123"), CLEAR, "fits"),
    "too many heads": Lie("heads", _only(**_heads(5, CLASSES, WIDTH + 1)), CLEAR, "heads"),
    "heads of another size": Lie("request", _only(**_heads(2, CLASSES, WIDTH)), CLEAR, "fits"),
    "scores of unknown weights": Lie("request", _only(**_scores(names="secret")), CLEAR, "fits"),
    "an unknown estimator": Lie("request", _only(**_scores(estimator="eval")), CLEAR, "fits"),
    "a count of two images": Lie("least_images", _narrow, family="images"),
    "too many rounds today": Lie("rounds_per_day", _often(6), CLEAR, "days"),
    "too many hidden rounds today": Lie("rounds_per_day", _after(_rounds, lambda w: w.sum(number=6)), HIDDEN, "days"),
    "too many queries today": Lie("queries_per_day", _often(6, action="count"), CLEAR, "days"),
    # one client's order differs inside an honest sum
    "a rate for one client": Lie("binding", _told(lr=0.06), HIDDEN, "binding"),
    "a rate of zero for one client": Lie("binding", _told(lr=0.0), HIDDEN, "binding"),
    "a weight for one client": Lie("binding", _told(largest=1e12), HIDDEN, "binding"),
    "a clip for one client": Lie("binding", _told(clip=0.4), ("secure+private",), "binding"),
    "a new setting for one client": Lie("binding", _told(extra=1), HIDDEN, "binding"),
    "another model for one client": Lie("binding", _in("masked", _other_model), HIDDEN, "binding"),
    "another rate at the last moment": Lie(
        "binding", _in("masked", lambda w, o: replace(o, settings={**o.settings, "lr": 0.07})), HIDDEN, "binding"
    ),
    "a wide clip in a sum": Lie("ranges.clip", _told(clip=1e6), ("secure+private",), "numbers"),
    "an absurd rate in a sum": Lie("ranges.lr", _told(lr=1e9), HIDDEN, "numbers"),
    "a model that is not finite in a sum": Lie(
        "request", _in("masked", lambda w, o: replace(o, vector=w.toy.state.vector * float("inf"))), HIDDEN, "fits"
    ),
    # plans
    "the plan of another round": Lie("plan", _planned(round=4), HIDDEN, "plan"),
    "the plan of another run": Lie("plan", _planned(run="other"), HIDDEN, "plan"),
    "coarser segments": Lie("plan", _planned(segments=(Segment("update", 1, 9.0),)), HIDDEN, "plan"),
    "room for a million": Lie("plan", _planned(room=1 << 20), HIDDEN, "plan"),
    "a sum of two": Lie("cohort", lambda w: w.sum(clients=(0, VICTIM)), HIDDEN, "plan"),
    "strangers that the server plays": Lie("most_clients", _planned(clients=(1, 60, 61, 62, 63)), HIDDEN, "threshold"),
    "a low threshold": Lie("threshold", _planned(threshold=3, clients=(0, 1, 2, 3, 4)), HIDDEN, "threshold"),
    "a threshold under half": Lie(
        "plan", _in("keys", lambda w, o: _text(w, o, '"threshold":null', '"threshold":2')), HIDDEN, "sane"
    ),
    "a plan without the victim": Lie("secure sum", _planned(clients=(0, 2, 3, 4)), HIDDEN, "sane"),
    "a plan of 20,000 clients": Lie(
        "plan",
        _in("keys", lambda w, o: _text(w, o, "[0,1,2,3,4]", str(list(range(20000))).replace(" ", ""))),
        HIDDEN,
        "size",
    ),
    "a plan of a megabyte": Lie("plan", _planned(text=b"[" * (1 << 20)), HIDDEN, "size"),
    "a plan of noise": Lie("plan", _planned(text=bytes(range(256))), HIDDEN, "sane"),
    "no plan": Lie("plan", _planned(text=b""), HIDDEN, "sane"),
    # sums a second time
    "the same round over others": Lie(
        "repeat", _after(lambda w: w.sum(), lambda w: w.sum(clients=(0, 1, 2, 4))), HIDDEN, "repeat"
    ),
    "an earlier round": Lie(
        "repeat", _after(lambda w: [w.sum(number=n) for n in (0, 1)], lambda w: w.sum(number=0)), HIDDEN, "repeat"
    ),
    "the same round, one client lost": Lie(
        "repeat",
        _after(lambda w: w.sum(), lambda w: w.sum(silent={"secure.masked": OTHER})),
        HIDDEN,
        "again",
    ),
    "head initialisation twice": Lie(
        "other_sets",
        _after(lambda w: w.sum(action="statistics"), lambda w: _again(w)),
        HIDDEN,
        "sets",
    ),
    "head initialisation twice under another number": Lie(
        "repeat",
        _after(lambda w: w.sum(action="statistics"), lambda w: w.sum(action="statistics", number=1)),
        HIDDEN,
        "question",
    ),
    "statistics of five, gradients of four": Lie(
        "other_sets",
        _after(lambda w: w.sum(action="statistics"), lambda w: w.sum(action="head_gradient", clients=FOUR, **_head(w))),
        HIDDEN,
        "sets",
    ),
    "a client lost in one of two sums": Lie(
        "other_sets",
        _after(
            lambda w: w.sum(action="statistics"),
            lambda w: w.sum(action="head_gradient", silent={"secure.masked": OTHER}, **_head(w)),
        ),
        HIDDEN,
        "sets",
    ),
    "the same gradient as another draw": Lie("repeat", lambda w: _gradients(w, draw=1), HIDDEN, "question"),
    "the same gradient as a share of nearly one": Lie(
        "repeat", lambda w: _gradients(w, share=0.9999), HIDDEN, "question"
    ),
    "a weight named twice": Lie("request", lambda w: _gradients(w, names="head.weight\nhead.weight"), HIDDEN, "names"),
    "the same weights in another order": Lie(
        "repeat", lambda w: _gradients(w, names="head.bias\nhead.weight"), HIDDEN, "question"
    ),
    "a question too many": Lie("queries", lambda w: _questions(w), CLEAR, "queries"),
    "a hidden question too many": Lie("queries", lambda w: _hidden_questions(w), HIDDEN, "queries"),
    "a run over the budget for life": Lie("lifetime_epsilon", lambda w: _spent(w), NOISED, "life"),
    "a run without an epsilon": Lie("lifetime_epsilon", lambda w: _spent(w, None), CLEAR, "life"),
    "a ledger from a backup": Lie("ledger", lambda w: _restored(w), HIDDEN, "ledger"),
    "a sum over more than before": Lie(
        "other_sets", _after(lambda w: w.sum(action="statistics", clients=FOUR), lambda w: _more(w)), HIDDEN, "sets"
    ),
    "the same sum with a word more": Lie("request", lambda w: _worded(w, extra=1), HIDDEN, "words"),
    "the same sum under another name": Lie("request", lambda w: _worded(w, space="other"), HIDDEN, "words"),
    "another head for the others": Lie("binding", lambda w: _elsewhere(w), HIDDEN, "ground"),
    "sums without end": Lie("sums", lambda w: w.sum(action="statistics", number=3), HIDDEN, "sums"),
    "a stage out of turn": Lie(
        "secure sum",
        _after(lambda w: w.sum(silent={"secure.shares": VICTIM}), lambda w: w.tell(_late(w, "unmask"))),
        HIDDEN,
        "turn",
    ),
    "another list afterwards": Lie(
        "repeat", _after(lambda w: w.sum(), lambda w: w.tell(_late(w, "consistency"))), HIDDEN, "again"
    ),
    # the graph
    "holders that a peer did not draw": Lie("secure sum", _in("shares", _forged_draws), HIDDEN, "graph", degree=2),
    "a tie that nobody drew": Lie("secure sum", lambda w: _strange_tie(w), HIDDEN, "graph", degree=2),
    "keys exchanged on the way": Lie("secure sum", _aux("shares", "data:adverts", lambda t: t.flip(0)), HIDDEN, "keys"),
    "a box exchanged on the way": Lie("secure sum", _aux("masked", "data:boxes", lambda t: t.flip(0)), HIDDEN, "keys"),
    "survivors that nobody signed": Lie(
        "secure sum", _aux("unmask", "data:signatures", lambda t: t.flip(0)), HIDDEN, "keys"
    ),
    "a degree under the policy's": Lie("degree", lambda w: _low_degree(w), HIDDEN, "threshold", degree=2),
}


def _text(world: World, request: Request, old: str, new: str) -> Request:
    text = request.auxiliary["plan"].numpy().tobytes().decode()
    assert old in text
    return world.plan(request, text=text.replace(old, new).encode())


def _again(world: World) -> Any:
    return world.sum(action="statistics", number=1, clients=FOUR)


def _worded(world: World, **more: Any) -> Any:
    """Once honestly, and again over one client less, with a word that changes nothing."""
    world.sum(action="statistics")
    world.said.clear()
    return world.sum(action="statistics", number=1, clients=FOUR, **more)


def _elsewhere(world: World) -> Any:
    """The others were told a head, classes or a config of their own; the server keeps quiet about it."""
    world.elsewhere, honest = "another head", secagg_server.part_of
    secagg_server.part_of = lambda advert, kind: b"" if kind == "ground" else honest(advert, kind)
    try:
        return world.sum()
    finally:
        secagg_server.part_of = honest


def _head(world: World, value: float = 0.0) -> dict[str, Any]:
    return {"auxiliary": {"head": torch.full(world.head_shape, value, dtype=torch.float64)}}


def _gradients(world: World, **changes: Any) -> Any:
    """The gradient of the head over all images, and again in other words."""
    weights = torch.cat([p.detach().view(-1) for p in world.context.network.parameters()])
    asked: dict[str, Any] = {"names": "head.weight\nhead.bias", "draw": 0, "share": 1.0}
    world.sum(action="gradient", vector=weights, **asked)
    world.said.clear()
    return world.sum(action="gradient", vector=weights, number=1, **{**asked, **changes})


def _questions(world: World) -> Any:
    """Counts of three heads one by one, of which two are allowed."""
    world.allow(queries=2)
    for number in range(3):
        head = torch.full((1, *world.head_shape), float(number), dtype=torch.float64)
        world.tell(world.request(action="count", vector=None, auxiliary={"heads": head}))


def _hidden_questions(world: World) -> Any:
    world.allow(queries=1)
    world.sum(action="statistics")
    world.said.clear()
    return world.sum(action="head_gradient", **_head(world))


def _spent(world: World, account: tuple[float, float] | None = (0.7, 1e-5)) -> Any:
    """Two runs of epsilon 0.7 where one may be spent in all; the clock is of no use."""
    world.allow(lifetime_epsilon=1.0, rounds_per_day=None, config="")
    world.context.account = account
    if account is None:
        return world.tell(world.request())
    for run in ("toy", "another"):
        world.said.clear()
        hidden = world.algorithm.privacy.collects_sum
        if hidden:
            world.run = run
            world.sum(lambda o, run=run: replace(o, run=run))  # type: ignore[misc]
        else:
            world.tell(world.request(run=run))
    return None


def _restored(world: World) -> Any:
    """Two sums, and then the victim's memory of before the second comes back from a backup."""
    world.sum(action="statistics")
    backup = world.backup()
    world.sum(action="head_gradient", **_head(world))
    world.restore(backup)
    world.said.clear()
    return world.sum(action="head_gradient", number=1, **_head(world, 1.0))


def _more(world: World) -> Any:
    """Another question, over one client more."""
    return world.sum(action="head_gradient", **_head(world))


def _late(world: World, stage: str) -> Request:
    lists = {"data:shared": torch.tensor([0, 1, 2, 4]), "data:alive": torch.tensor([0, 1, 2, 4])}
    settings = {"sums": "train", "largest": 20}
    return world.request(action=f"secure.{stage}", vector=None, auxiliary=lists, settings=settings)


def _strange_tie(world: World) -> Any:
    """The victim is shown the keys of somebody who drew others and whom it did not draw."""

    def add(w: World, request: Request) -> Request:
        ids = request.auxiliary["data:ids"].tolist()
        strangers = [c for c in CLIENTS if c != VICTIM and c not in ids]
        if not strangers:  # all are tied to it this time
            return _forged_draws(w, request)
        rows = sorted([*ids, strangers[0]])
        adverts = torch.stack([_row(request, "adverts", ids, v) for v in rows])
        drawn = torch.stack([_row(request, "drawn", ids, v) for v in rows])
        told = {"data:ids": torch.tensor(rows), "data:adverts": adverts, "data:drawn": drawn}
        return replace(request, auxiliary={**request.auxiliary, **told})

    return _in("shares", add)(world)


def _row(request: Request, name: str, ids: list[int], client: int) -> torch.Tensor:
    table = request.auxiliary[f"data:{name}"]
    return table[ids.index(client)] if client in ids else table[0]


def _low_degree(world: World) -> Any:
    world.allow(degree=4)
    return world.sum()


def outcome(name: str, protection: str, world: World | None = None) -> tuple[bool, str]:
    """(whether the victim refused by the lie's rule and gave nothing after it, what it said last)."""
    lie = LIES[name]
    world = World(protection, lie.degree) if world is None else world
    lie.tell(world)
    actions = [action for action, client, _ in world.said if client == VICTIM]
    mine = [answer for _, client, answer in world.said if client == VICTIM]
    first = next((i for i, answer in enumerate(mine) if isinstance(answer, str)), None)
    if first is None or (world.lied_at and actions[first] != world.lied_at):
        return False, f"did not refuse: {mine}"
    after = [wire_size(answer) for answer in mine[first:] if isinstance(answer, Response)]
    named = str(mine[first]).startswith(f"refused by the rule '{lie.rule}'")
    return named and not after, f"{mine[first]}; {sum(after)} bytes after it"


def as_plan(nodes: Any, run: str) -> dict[str, torch.Tensor]:
    """The plan of round 0 over two of three clients, as a server would make it for a node's open run."""
    (node,) = nodes.runs.values()
    context, algorithm = node.opened.context, node.setup.algorithm
    segments = secure_segments(algorithm, context.sent, context.space.trained, {})
    return {"plan": as_tensor(Plan(run, 0, (0, 1), segments).to_bytes())}
