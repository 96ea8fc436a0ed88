"""Clients with something of their own: FedBABU, FedPer, FedRep, FedBN, Ditto, FedALA, IFCA."""

from __future__ import annotations

import torch
from tests.references.loops.averaging import fedavg, pull_to
from tests.references.loops.local import Local, train
from tests.references.loops.problem import (
    Outcome,
    Problem,
    Selection,
    State,
    is_body,
    is_head,
    load,
    mean,
    minus,
    plus,
    restricted,
    zeros,
)


def fedbabu(problem: Problem, local: Local, selected: Selection = is_body) -> Outcome:
    """Oh et al. 2022: FedAvg of the body; the head stays as it began."""
    return fedavg(problem, local, selected=selected)


def _with_private_part(problem: Problem, local: Local, private: Selection, order: str) -> Outcome:
    """Each client keeps the private part; the rest is averaged. The common model has the private part it began with."""
    common = problem.start()
    own: dict[int, State] = {}
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            model = {**common, **own.get(k, {})}
            if order == "head first":
                model = train(problem, model, k, t, local, selected=private, purpose="private")
                model = train(problem, model, k, t, local, selected=lambda name: not private(name))
            else:
                model = train(problem, model, k, t, local)
            own[k] = restricted(model, private)
            models.append(model)
        average = mean(models, problem.examples(cohort))
        for name in common:
            if not private(name):
                common[name] = average[name]
    outcome = {"common": common}
    for k, part in own.items():
        outcome[f"memory {k}/private"] = part
    return outcome


def fedper(problem: Problem, local: Local, private: Selection = is_head) -> Outcome:
    """Arivazhagan et al. 2019: body and head are trained together, the head stays with the client."""
    return _with_private_part(problem, local, private, "together")


def fedrep(problem: Problem, local: Local, order: str = "head first") -> Outcome:
    """Collins et al. 2021: the client's head first, then the body under that head."""
    return _with_private_part(problem, local, is_head, order)


def is_norm(name: str) -> bool:
    """Return whether a parameter or statistic belongs to a normalisation layer of the toy."""
    return name.startswith(("backbone.norm.", "backbone.layers.0.0.", "backbone.layers.1.0."))


def fedbn(problem: Problem, local: Local, private: Selection = is_norm) -> Outcome:
    """Li et al. 2021: normalisation layers stay with the client, weights and statistics."""
    return _with_private_part(problem, local, private, "together")


def ditto(problem: Problem, local: Local, pull: float) -> Outcome:
    """Li et al. 2021: FedAvg, and beside it v_k by F_k(v) + λ/2 |v - x|², x the common model of the round's start."""
    common = problem.start()
    personal: dict[int, State] = {}
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            models.append(train(problem, common, k, t, local))
            own = personal.get(k, common)
            personal[k] = train(problem, own, k, t, local, correct=pull_to(common, pull), purpose="personal")
        common = mean(models, problem.examples(cohort))
    outcome = {"common": common}
    for k, model in personal.items():
        outcome[f"memory {k}/personal"] = model
    return outcome


def fedala(problem: Problem, local: Local, rate: float, share: float, blocks: int, passes: int = 5) -> Outcome:
    """Zhang et al. 2023: start from x + W (last - x), W in [0, 1] learned on the last blocks and the head.

    W - η ∂F/∂W, clipped; ∂F/∂W is the gradient at the start times (last - x). Five passes the first time, then one.
    """
    common = problem.start()
    last: dict[int, State] = {}
    kept: dict[int, State] = {}
    for t, cohort in enumerate(problem.cohorts):
        models = []
        for k in cohort:
            start = common
            if k in last:
                rounds = 1
                if k not in kept:
                    rounds = passes
                gap = _blendable(minus(last[k], common), blocks, problem.network.depth)
                kept[k] = _learn_blend(problem, common, gap, kept.get(k, zeros(common)), k, t, rate, share, rounds)
                start = dict(common)
                for name, weight in kept[k].items():
                    # a weight learned earlier applies to all of the difference; outside the last blocks it is 0
                    start[name] = common[name] + weight * (last[k][name] - common[name])
            model = train(problem, start, k, t, local)
            models.append(minus(model, common))
            last[k] = model
        common = plus(common, mean(models, problem.examples(cohort)))
    outcome = {"common": common}
    for k, model in last.items():
        outcome[f"memory {k}/previous_model"] = model
    for k, weights in kept.items():
        outcome[f"memory {k}/keep"] = weights
    return outcome


def _blendable(gap: State, blocks: int, depth: int) -> State:
    """Return the difference in the last blocks, what comes after them and the head; zero elsewhere."""
    result = {}
    for name, tensor in gap.items():
        late = is_head(name) or name.startswith("backbone.norm.")
        for block in range(depth - blocks, depth):
            late = late or name.startswith(f"backbone.layers.{block}.")
        result[name] = tensor
        if not late:
            result[name] = torch.zeros_like(tensor)
    return result


def _learn_blend(
    problem: Problem,
    common: State,
    gap: State,
    keep: State,
    client: int,
    round: int,
    rate: float,
    share: float,
    passes: int,
) -> State:
    """Return the weights of the client's last model, by coordinate."""
    rows = problem.rows[client]
    order = problem.draws.permutation(len(rows), "adaptive_start", round, client)
    sample = rows[order[: max(1, round_half_even(share * len(rows)))]]
    network = problem.view(common)
    for _ in range(passes):
        for batch in sample.split(64):
            blend = {}
            for name, weight in keep.items():
                blend[name] = common[name] + weight * gap[name]
            load(network, blend)
            network.zero_grad()
            logits = network(problem.inputs[batch])
            torch.nn.functional.cross_entropy(logits, problem.labels[batch]).backward()
            moved = {}
            for name, parameter in network.named_parameters():
                moved[name] = (keep[name] - rate * parameter.grad * gap[name]).clamp(0, 1)
            keep = moved
    return keep


def round_half_even(number: float) -> int:
    """Return the nearest whole number, as Python rounds."""
    return round(number)


def ifca(problem: Problem, local: Local, clusters: int) -> Outcome:
    """Ghosh et al. 2020: every client trains the model of least loss on its data; averages within clusters.

    All models begin equal, so a client's first choice is drawn. The common model is the mean of the round's models.
    """
    models = [problem.start() for _ in range(clusters)]
    common = problem.start()
    for t, cohort in enumerate(problem.cohorts):
        trained: dict[int, State] = {}
        choices: dict[int, int] = {}
        for k in cohort:
            if t == 0:
                choices[k] = int(problem.draws.uniform("cluster", k) * clusters)
            else:
                losses = [problem.loss(model, problem.rows[k]) for model in models]
                choices[k] = losses.index(min(losses))
            trained[k] = train(problem, models[choices[k]], k, t, local)
        for cluster in range(clusters):
            members = [k for k in cohort if choices[k] == cluster]
            if members:
                models[cluster] = mean([trained[k] for k in members], problem.examples(members))
        common = mean([trained[k] for k in cohort], problem.examples(cohort))
    outcome = {"common": common}
    for cluster, model in enumerate(models):
        outcome[f"cluster {cluster}"] = model
    return outcome
