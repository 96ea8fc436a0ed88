"""Aggregation that survives some lying clients, on the stack of updates.

Coordinate median and trimmed mean (Yin et al. 2018), Krum and multi-Krum (Blanchard et al. 2017), Bulyan (El Mhamdi
et al. 2018), geometric median (Pillutla et al. 2022, smoothed Weiszfeld), centered clipping (Karimireddy et al. 2021),
norm clipping, and nearest-neighbour mixing (Allouah et al. 2023) before any of them. All but the mean ignore the
clients' weights: a number of examples is a claim, and an attacker would claim much. A row with NaN or infinity counts
as a client that did not move.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedgraft.aggregate.mean import accumulate, chunks, norm, weighted_mean
from fedgraft.aggregate.slots import Aggregator, Answers
from fedgraft.core.errors import FedgraftError
from fedgraft.core.ranges import Count, Number, Positive, in_range
from fedgraft.core.registry import AGGREGATORS

Rule = Callable[[Tensor, Tensor], Tensor]
"""(updates (m, k), weights (m,)) -> one update (k,)."""
Prepare = Callable[[Tensor], Tensor]
"""A step before a combiner: updates (m, k) -> updates (m, k)."""


def finite_rows(stack: Tensor) -> Tensor:
    """The stack with every row that holds NaN or infinity replaced by zeros; no copy when all rows are finite."""
    if not len(stack):
        raise FedgraftError("there is no update to combine: every reply was missing or refused; ask more clients.")
    # Smallest and largest entry carry NaN and infinity along, at a tenth of the cost of asking each entry.
    finite = torch.stack([torch.stack(torch.aminmax(row)).isfinite().all() for row in stack])
    return stack if bool(finite.all()) else torch.where(finite[:, None], stack, 0.0)


def squared_distances(stack: Tensor) -> Tensor:
    """All squared distances between rows, (m, m) float64, from the Gram matrix and never below zero."""
    gram = torch.zeros(len(stack), len(stack), dtype=torch.float64)
    for piece in chunks(stack.shape[1]):
        part = stack[:, piece].to(torch.float64)
        gram += part @ part.T
    norms = gram.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * gram).clamp(min=0)
    return distances.fill_diagonal_(0)


class TooFew(FedgraftError):
    """Too few replies for a rule to withstand so many attackers; `least` would do."""

    def __init__(self, sentence: str, least: int) -> None:
        super().__init__(sentence)
        self.least = least


def need(clients: int, least: int, rule: str, attackers: int) -> None:
    """Refuse to combine fewer replies than the rule's promise needs."""
    if attackers < 0 or clients < least:
        raise TooFew(
            f"{rule} against {attackers} lying clients needs at least {least} replies and got {clients}; "
            "ask more clients per round or expect fewer attackers.",
            least,
        )


def _ordered(rows: Tensor) -> Tensor:
    """Sort each coordinate over clients, (m, piece): odd-even exchange of rows, 10x torch.sort at m = 10."""
    held = list(rows)
    for turn in range(len(held)):
        for i in range(turn % 2, len(held) - 1, 2):
            held[i], held[i + 1] = torch.minimum(held[i], held[i + 1]), torch.maximum(held[i], held[i + 1])
    return torch.stack(held)


def _by_coordinate(stack: Tensor, rule: Callable[[Tensor], Tensor], rows: Sequence[int] | None = None) -> Tensor:
    """Apply a rule that looks at each coordinate alone to ordered pieces (m, piece), of chosen rows when given."""
    out = torch.empty(stack.shape[1])
    for piece in chunks(stack.shape[1]):
        part = stack[:, piece] if rows is None else stack[:, piece][rows]
        out[piece] = rule(_ordered(part)).to(torch.float32)
    return out


def _middle(ordered: Tensor) -> Tensor:
    """Median of each ordered column; an even number of clients gives the midpoint of the two in the middle."""
    m = len(ordered)
    return (ordered[(m - 1) // 2].to(torch.float64) + ordered[m // 2]) / 2


def _row_mean(rows: Tensor) -> Tensor:
    return accumulate(rows, torch.full((len(rows),), 1 / len(rows), dtype=torch.float64))


def mean() -> Rule:
    """The weighted mean, for comparison: one attacker moves it anywhere."""
    return lambda stack, weights: weighted_mean(stack, weights)


def median() -> Rule:
    """Coordinate-wise median."""
    return lambda stack, weights: _by_coordinate(finite_rows(stack), _middle)


def trimmed_mean(beta: float = 0.2) -> Rule:
    """Coordinate-wise mean after dropping the floor(beta m) smallest and as many largest values."""
    if not 0 <= beta < 0.5:
        raise FedgraftError(f"the trimmed share beta is {beta}; it must be at least 0 and below 0.5.")

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        cut = int(beta * len(stack) + 1e-9)  # 0.29 * 100 is 28.999... in floating point
        return _by_coordinate(finite_rows(stack), lambda s: _row_mean(s[cut : len(s) - cut]))

    return aggregate


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """Sum of squared distances to the m - f - 2 nearest others, (m,)."""
    m = len(distances)
    others = distances.clone().fill_diagonal_(torch.inf).sort(1).values[:, : max(m - 1, 0)]
    return others[:, : max(1, m - attackers - 2)].sum(1)


def krum(attackers: int) -> Rule:
    """The one update whose m - f - 2 nearest neighbours are closest."""

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        need(len(stack), 2 * attackers + 3, "Krum", attackers)
        stack = finite_rows(stack)
        return stack[int(krum_scores(squared_distances(stack), attackers).argmin())].clone()

    return aggregate


def multi_krum(attackers: int, keep: int | None = None) -> Rule:
    """The plain mean of the `keep` updates (default m - f) with the best Krum scores."""

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        need(len(stack), 2 * attackers + 3, "multi-Krum", attackers)
        count = len(stack) - attackers if keep is None else keep
        if not 1 <= count <= len(stack):
            raise FedgraftError(f"multi-Krum cannot keep {count} of {len(stack)} updates; choose between 1 and all.")
        stack = finite_rows(stack)
        best = krum_scores(squared_distances(stack), attackers).argsort(stable=True)[:count]
        # Summed in client order, so that keeping everyone is the plain mean bit for bit.
        return weighted_mean((stack[i] for i in sorted(best.tolist())), torch.ones(count))

    return aggregate


def bulyan(attackers: int) -> Rule:
    """Select m - 2f updates by repeated Krum, then average per coordinate the m - 4f values nearest their median."""

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        m = len(stack)
        need(m, 4 * attackers + 3, "Bulyan", attackers)
        stack = finite_rows(stack)
        distances, left, chosen = squared_distances(stack), list(range(m)), []
        for _ in range(m - 2 * attackers):
            scores = krum_scores(distances[left][:, left], attackers)
            chosen.append(left.pop(int(scores.argmin())))

        return _by_coordinate(stack, lambda ordered: _around_median(ordered, m - 4 * attackers), sorted(chosen))

    return aggregate


def _around_median(ordered: Tensor, count: int) -> Tensor:
    """Per coordinate the mean of the `count` values nearest the median: in order, they are `count` in a row."""
    middle = _middle(ordered)
    best, effective_steps = _row_mean(ordered[:count]), torch.full_like(middle, torch.inf)
    for begin in range(len(ordered) - count + 1):
        window = ordered[begin : begin + count]
        far = torch.maximum(middle - window[0], window[-1] - middle)
        best, effective_steps = (
            torch.where(far < effective_steps, _row_mean(window), best),
            torch.minimum(far, effective_steps),
        )
    return best


def geometric_median(iterations: int = 100, smoothing: float = 1e-6, tolerance: float = 1e-10) -> Rule:
    """The point with the smallest sum of distances to all updates, by smoothed Weiszfeld steps.

    The point is always a mean of the updates, so every step works on the m x m distances alone and the long vectors
    are read twice in all. It starts from weights 1 / median distance, so that a far one counts for nothing at once.

    Unlike RFA (Pillutla et al.), it does not weigh the distances by examples: a number of examples is a claim, and one
    liar who claims more than half of all would be the median.
    """

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        stack = finite_rows(stack)
        distances = squared_distances(stack)
        shares = _weiszfeld(distances, iterations, smoothing, tolerance)
        return accumulate(stack, shares).to(torch.float32)

    return aggregate


def _weiszfeld(squared: Tensor, iterations: int, smoothing: float, tolerance: float) -> Tensor:
    """Shares of the updates in their geometric median, (m,) summing to one."""
    typical = squared.sqrt().median(1).values  # (m,)
    floor = max(smoothing * float(typical.median()), 1e-150)
    shares = 1 / typical.clamp(min=floor)
    shares = shares / shares.sum()
    for _ in range(iterations):
        # |z - x_k|^2 for z = sum_j a_j x_j with sum a = 1
        gaps = squared @ shares - 0.5 * (shares @ squared @ shares)
        new = 1 / gaps.clamp(min=0).sqrt().clamp(min=floor)
        new = new / new.sum()
        moved = float((new - shares).abs().max())
        shares = new
        if moved < tolerance:
            break
    return shares


@in_range
def centered_clipping(tau: Positive | None = None, iterations: Count = 3) -> Rule:
    """Move a centre v by the mean of the clipped differences to it: v + mean_i (x_i - v) min(1, tau / |x_i - v|).

    Karimireddy, He and Jaggi, Learning from History (2021). One update moves v by at most tau / m per iteration,
    wherever it is. The paper starts from the last round's aggregate; a rule here has no memory, so v starts from the
    coordinate-wise median of this round. `tau` is by default the median distance of the updates to that start, so
    that half of them are not clipped at first. The clients' weights are ignored, as by the other rules.
    """

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        stack = finite_rows(stack)
        centre = _by_coordinate(stack, _middle).to(torch.float64)
        radius = tau
        for _ in range(iterations):
            distances = _distances_to(stack, centre)
            if radius is None:
                radius = statistics.median(distances)
            _move_clipped(stack, centre, distances, radius)
        return centre.to(torch.float32)

    return aggregate


def _distances_to(stack: Tensor, centre: Tensor) -> list[float]:
    """The distance of each row (k,) to the centre."""
    squares = torch.zeros(len(stack), dtype=torch.float64)
    for piece in chunks(stack.shape[1]):
        squares += (stack[:, piece].to(torch.float64) - centre[piece]).square().sum(1)
    return [float(square) for square in squares.sqrt()]


def _move_clipped(stack: Tensor, centre: Tensor, distances: Sequence[float], radius: float) -> None:
    """Add to the centre, in place, the mean of the differences of all rows to it, none longer than the radius."""
    scales = torch.ones(len(stack), dtype=torch.float64)
    for i, distance in enumerate(distances):
        if distance > radius:
            scales[i] = radius / distance
    for piece in chunks(stack.shape[1]):
        differences = stack[:, piece].to(torch.float64) - centre[piece]
        centre[piece] += (scales[:, None] * differences).mean(0)


def clip_norms(limit: float | None = None) -> Prepare:
    """Shorten every update to at most `limit` (default: the median length of this round's updates)."""
    if limit is not None and not limit > 0:
        raise FedgraftError(f"updates cannot be clipped to the length {limit}; give a positive number.")

    def prepare(stack: Tensor) -> Tensor:
        stack = finite_rows(stack)
        norms = [norm(row) for row in stack]
        bound = statistics.median(norms) if limit is None else limit
        out = stack.clone()
        for row, length in zip(out, norms, strict=True):
            if length > bound:
                row *= bound / length
        return out

    return prepare


def nearest_mixing(attackers: int) -> Prepare:
    """Replace every update by the mean of the m - f updates nearest to it, itself included."""

    def prepare(stack: Tensor) -> Tensor:
        m = len(stack)
        need(m, 2 * attackers + 1, "nearest-neighbour mixing", attackers)
        stack = finite_rows(stack)
        nearest = squared_distances(stack).argsort(dim=1, stable=True)[:, : m - attackers]
        mixing = torch.zeros(m, m, dtype=torch.float64).scatter_(1, nearest, 1 / (m - attackers))
        out = torch.empty_like(stack)
        for piece in chunks(stack.shape[1]):
            out[:, piece] = (mixing @ stack[:, piece].to(torch.float64)).to(torch.float32)
        return out

    return prepare


def prepared(rule: Rule, *steps: Prepare) -> Rule:
    """A combiner that runs `steps` in order on the stack and then `rule`."""

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        for step in steps:
            stack = step(stack)
        return rule(stack, weights)

    return aggregate


AGGREGATORS |= {
    "mean": lambda attackers, responses: mean(),
    "median": lambda attackers, responses: median(),
    "trimmed_mean": lambda attackers, responses: trimmed_against(attackers, responses),
    "krum": lambda attackers, responses: krum(attackers),
    "multi_krum": lambda attackers, responses: multi_krum(attackers),
    "bulyan": lambda attackers, responses: bulyan(attackers),
    "geometric_median": lambda attackers, responses: geometric_median(),
    "centered_clipping": lambda attackers, responses: centered_clipping(),
    "norm_clip": lambda attackers, responses: prepared(mean(), clip_norms()),
}
"""By name: `make(attackers, replies)` gives a rule against so many attackers among so many replies."""


def trimmed_against(attackers: int, responses: int) -> Rule:
    """The trimmed mean that cuts as many on each side as there may be attackers."""
    need(responses, 2 * attackers + 1, "the trimmed mean", attackers)
    return trimmed_mean(attackers / responses)


@in_range
def robust_aggregator(
    name: str, attackers: Number = 0, neighbours: bool = False, clip: Positive | None = None
) -> Aggregator:
    """A rule that withstands attackers, with optional clipping and nearest-neighbour mixing before it."""
    AGGREGATORS.find(name)  # a name that does not exist is refused now, not in the first round

    def update(answers: Answers, weights: Tensor) -> Tensor:
        stack = torch.stack(list(answers.updates))
        # Validation has caught some already: that many fewer are left among the replies.
        left = max(0, attackers - answers.dropped)
        steps = [*([] if clip is None else [clip_norms(clip)]), *([nearest_mixing(left)] if neighbours else [])]
        rule: Rule = AGGREGATORS.build(name, {}, attackers=left, responses=len(stack))
        return prepared(rule, *steps)(stack, weights)

    label = "+".join([*([] if clip is None else ["clip"]), *(["nnm"] if neighbours else []), name])
    on = {"robust='mean'": name != "mean", "neighbours=false": neighbours, "clip_norm=none": clip is not None}
    off = " and ".join(f"algorithm.{option}" for option, used in on.items() if used)
    return Aggregator(label, update, linear=False, instead=off)
