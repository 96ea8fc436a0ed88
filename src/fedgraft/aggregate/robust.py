"""Robust aggregation: combine client updates so that a few malicious clients cannot steer the model.

Coordinate-wise median and trimmed mean (Yin et al. 2018), Krum and multi-Krum (Blanchard et al. 2017), Bulyan
(El Mhamdi et al. 2018), geometric median (Pillutla et al. 2022, smoothed Weiszfeld), centered clipping (Karimireddy
et al. 2021), norm clipping, and nearest-neighbour mixing (Allouah et al. 2023) as a step before any of them.
All rules except the mean ignore the clients' weights: a number of examples is a claim, and an attacker would claim
a large one. A row that contains NaN or infinity is treated as an update of zero.
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
"""Aggregation rule: (updates (m, k), weights (m,)) -> one update (k,)."""
Prepare = Callable[[Tensor], Tensor]
"""Transformation of the stack before a rule: updates (m, k) -> updates (m, k)."""


def finite_rows(stack: Tensor) -> Tensor:
    """Return the stack with every row that contains NaN or infinity replaced by zeros.

    The stack itself is returned, without a copy, if all rows are finite.
    """
    if not len(stack):
        raise FedgraftError(
            "E-AGGREGATE-NO-UPDATES",
            "there is no update to combine because every response was missing or refused",
            "sample more clients per round",
        )
    # Smallest and largest entry carry NaN and infinity along, at a tenth of the cost of testing each entry.
    finite = torch.stack([torch.stack(torch.aminmax(row)).isfinite().all() for row in stack])  # (m,)
    if bool(finite.all()):
        return stack
    return torch.where(finite[:, None], stack, 0.0)


def squared_distances(stack: Tensor) -> Tensor:
    """Return all squared distances between rows, (m, m) float64: symmetric to the last bit and never negative.

    They are computed from the Gram matrix.
    """
    gram = torch.zeros(len(stack), len(stack), dtype=torch.float64)
    for piece in chunks(stack.shape[1]):
        part = stack[:, piece].to(torch.float64)
        gram += part @ part.T
    gram = (gram + gram.T) / 2  # a product of matrices is symmetric up to rounding; ties would be broken by that
    norms = gram.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * gram).clamp(min=0)
    return distances.fill_diagonal_(0)


class TooFew(FedgraftError):
    """Too few responses for a rule to withstand the expected attackers; `least` is the number it needs."""

    def __init__(self, rule: str, attackers: int, least: int, clients: int) -> None:
        super().__init__(
            "E-AGGREGATE-TOO-FEW-RESPONSES",
            f"{rule} against {attackers} malicious clients needs at least {least} responses and got {clients}",
            "sample more clients per round or expect fewer attackers",
            rule=rule,
            attackers=attackers,
            least=least,
            clients=clients,
        )
        self.least = least


def require_responses(clients: int, least: int, rule: str, attackers: int) -> None:
    """Raise `TooFew` if there are fewer responses (`clients`) than the `least` that the rule's guarantee needs."""
    if attackers < 0 or clients < least:
        raise TooFew(rule, attackers, least, clients)


def _sort_columns(rows: Tensor) -> Tensor:
    """Return the rows (m, piece) with each coordinate sorted over clients.

    Odd-even exchange of whole rows; ten times as fast as torch.sort at m = 10.
    """
    exchanged = list(rows)
    for turn in range(len(exchanged)):
        for i in range(turn % 2, len(exchanged) - 1, 2):
            smaller = torch.minimum(exchanged[i], exchanged[i + 1])
            larger = torch.maximum(exchanged[i], exchanged[i + 1])
            exchanged[i] = smaller
            exchanged[i + 1] = larger
    return torch.stack(exchanged)


def _by_coordinate(stack: Tensor, rule: Callable[[Tensor], Tensor], rows: Sequence[int] | None = None) -> Tensor:
    """Apply a coordinate-wise rule to the columns of the stack (m, k), each sorted over clients; return (k,).

    `rule` maps sorted columns (m, piece) to (piece,). `rows` are the clients that take part; None: all.
    """
    out = torch.empty(stack.shape[1])
    for piece in chunks(stack.shape[1]):
        part = stack[:, piece]
        if rows is not None:
            part = part[rows]
        out[piece] = rule(_sort_columns(part)).to(torch.float32)
    return out


def _median_of_sorted(ordered: Tensor) -> Tensor:
    """Return the median of each sorted column; for an even number of rows the midpoint of the two middle ones."""
    m = len(ordered)
    return (ordered[(m - 1) // 2].to(torch.float64) + ordered[m // 2]) / 2


def _row_mean(rows: Tensor) -> Tensor:
    """Return the unweighted mean of the rows as float64."""
    return accumulate(rows, torch.full((len(rows),), 1 / len(rows), dtype=torch.float64))


def mean_rule() -> Rule:
    """Return the weighted mean as a rule, for comparison: one attacker can move it anywhere."""
    return lambda stack, weights: weighted_mean(stack, weights)


def median() -> Rule:
    """Return the coordinate-wise median as a rule."""
    return lambda stack, weights: _by_coordinate(finite_rows(stack), _median_of_sorted)


def trimmed_mean(beta: float = 0.2) -> Rule:
    """Return the rule that drops the floor(beta m) smallest and largest values per coordinate and averages the rest."""
    if not 0 <= beta < 0.5:
        raise FedgraftError(
            "E-AGGREGATE-TRIM-SHARE",
            f"the trimmed share beta is {beta}",
            "choose at least 0 and below 0.5",
            beta=beta,
        )

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        """Return the trimmed mean (k,) of the updates (m, k); the weights are ignored."""
        cut = int(beta * len(stack) + 1e-9)  # 0.29 * 100 is 28.999... in floating point
        return _by_coordinate(finite_rows(stack), lambda s: _row_mean(s[cut : len(s) - cut]))

    return aggregate


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """Return for each update the sum of squared distances to its m - f - 2 nearest neighbours, (m,)."""
    m = len(distances)
    others = distances.clone().fill_diagonal_(torch.inf).sort(1).values[:, : max(m - 1, 0)]
    return others[:, : max(1, m - attackers - 2)].sum(1)


def krum(attackers: int) -> Rule:
    """Return the rule that takes the one update whose m - f - 2 nearest neighbours are closest."""

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        """Return the update with the smallest Krum score; raise `TooFew` with too few responses."""
        require_responses(len(stack), 2 * attackers + 3, "Krum", attackers)
        stack = finite_rows(stack)
        scores = krum_scores(squared_distances(stack), attackers)
        return stack[int(scores.argmin())].clone()

    return aggregate


def multi_krum(attackers: int, keep: int | None = None) -> Rule:
    """Return the rule that averages the `keep` updates (default m - f) with the best Krum scores, unweighted."""

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        """Return the mean of the updates with the smallest Krum scores; raise `TooFew` with too few responses."""
        require_responses(len(stack), 2 * attackers + 3, "multi-Krum", attackers)
        count = keep
        if count is None:
            count = len(stack) - attackers
        if not 1 <= count <= len(stack):
            raise FedgraftError(
                "E-AGGREGATE-KRUM-KEEP",
                f"multi-Krum cannot keep {count} of {len(stack)} updates",
                "choose between 1 and all of them",
                keep=count,
                updates=len(stack),
            )
        stack = finite_rows(stack)
        best = krum_scores(squared_distances(stack), attackers).argsort(stable=True)[:count]
        # Summed in client order, so that keeping everyone is the plain mean bit for bit.
        return weighted_mean((stack[i] for i in sorted(best.tolist())), torch.ones(count))

    return aggregate


def bulyan(attackers: int) -> Rule:
    """Return Bulyan: select m - 2f updates by repeated Krum, then average the m - 4f values nearest their median."""

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        """Return Bulyan's update (k,) of the stack (m, k); raise `TooFew` with too few responses."""
        m = len(stack)
        require_responses(m, 4 * attackers + 3, "Bulyan", attackers)
        stack = finite_rows(stack)
        distances = squared_distances(stack)
        candidates = list(range(m))
        selected = []
        for _ in range(m - 2 * attackers):
            scores = krum_scores(distances[candidates][:, candidates], attackers)
            selected.append(candidates.pop(int(scores.argmin())))
        return _by_coordinate(stack, lambda ordered: _mean_around_median(ordered, m - 4 * attackers), sorted(selected))

    return aggregate


def _mean_around_median(ordered: Tensor, count: int) -> Tensor:
    """Return per coordinate the mean of the `count` values nearest the median.

    In sorted columns these values are consecutive, so it is enough to compare all windows of `count` rows.
    """
    middle = _median_of_sorted(ordered)
    best_mean = _row_mean(ordered[:count])
    best_distance = torch.full_like(middle, torch.inf)
    for begin in range(len(ordered) - count + 1):
        window = ordered[begin : begin + count]
        distance = torch.maximum(middle - window[0], window[-1] - middle)
        best_mean = torch.where(distance < best_distance, _row_mean(window), best_mean)
        best_distance = torch.minimum(distance, best_distance)
    return best_mean


def geometric_median(iterations: int = 100, smoothing: float = 1e-6, tolerance: float = 1e-10) -> Rule:
    """Return the rule that finds the point with the smallest sum of distances to all updates (smoothed Weiszfeld).

    The point is always a mean of the updates, so every iteration works on the m x m distances alone and the long
    vectors are read twice in all. It starts from weights 1 / median distance, so that an outlier has little weight
    from the first iteration on.

    Unlike RFA (Pillutla et al.), it does not weight the distances by examples: a number of examples is a claim, and
    one attacker who claims more than half of all examples would be the median.
    """

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        """Return the geometric median (k,) of the stack (m, k)."""
        stack = finite_rows(stack)
        distances = squared_distances(stack)
        shares = _weiszfeld(distances, iterations, smoothing, tolerance)
        return accumulate(stack, shares).to(torch.float32)

    return aggregate


def _weiszfeld(squared: Tensor, iterations: int, smoothing: float, tolerance: float) -> Tensor:
    """Return the shares of the updates in their geometric median, (m,) summing to one.

    `squared` are the squared distances between the updates, (m, m). Iteration ends when no share changes by
    `tolerance`; distances are at least `smoothing` times the typical one.
    """
    typical = squared.sqrt().median(1).values  # (m,)
    floor = max(smoothing * float(typical.median()), 1e-150)
    shares = 1 / typical.clamp(min=floor)
    shares = shares / shares.sum()
    for _ in range(iterations):
        # |z - x_k|^2 for z = sum_j a_j x_j with sum a = 1
        gaps = squared @ shares - 0.5 * (shares @ squared @ shares)
        new_shares = 1 / gaps.clamp(min=0).sqrt().clamp(min=floor)
        new_shares = new_shares / new_shares.sum()
        change = float((new_shares - shares).abs().max())
        shares = new_shares
        if change < tolerance:
            break
    return shares


@in_range
def centered_clipping(tau: Positive | None = None, iterations: Count = 3) -> Rule:
    """Return centered clipping: move a centre v by the mean clipped difference, mean_i (x_i - v) min(1, tau/|x_i - v|).

    Karimireddy, He and Jaggi, Learning from History (2021). One update moves v by at most tau / m per iteration,
    wherever it is. The paper starts from the last round's aggregate; a rule here has no memory, so v starts from the
    coordinate-wise median of this round. `tau` is by default the median distance of the updates to that start, so
    that half of them are not clipped at first. The clients' weights are ignored, as by the other rules.
    """

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        """Return the centre (k,) after the iterations, from the coordinate-wise median of the stack (m, k)."""
        stack = finite_rows(stack)
        centre = _by_coordinate(stack, _median_of_sorted).to(torch.float64)
        radius = tau
        for _ in range(iterations):
            distances = _distances_to(stack, centre)
            if radius is None:
                radius = statistics.median(distances)
            _move_clipped(stack, centre, distances, radius)
        return centre.to(torch.float32)

    return aggregate


def _distances_to(stack: Tensor, centre: Tensor) -> list[float]:
    """Return the m Euclidean distances of the rows of `stack` (m, k) to `centre` (k,)."""
    squares = torch.zeros(len(stack), dtype=torch.float64)
    for piece in chunks(stack.shape[1]):
        squares += (stack[:, piece].to(torch.float64) - centre[piece]).square().sum(1)
    return [float(square) for square in squares.sqrt()]


def _move_clipped(stack: Tensor, centre: Tensor, distances: Sequence[float], radius: float) -> None:
    """Add to the centre, in place, the mean difference of all rows to it, each clipped to the radius."""
    scales = torch.ones(len(stack), dtype=torch.float64)
    for i, distance in enumerate(distances):
        if distance > radius:
            scales[i] = radius / distance
    for piece in chunks(stack.shape[1]):
        differences = stack[:, piece].to(torch.float64) - centre[piece]
        centre[piece] += (scales[:, None] * differences).mean(0)


def clip_norms(limit: float | None = None) -> Prepare:
    """Return the step that clips every update to the norm `limit` (default: the median norm of the round)."""
    if limit is not None and not limit > 0:
        raise FedgraftError(
            "E-AGGREGATE-CLIP-NORM",
            f"updates cannot be clipped to the norm {limit}",
            "choose a positive number",
            limit=limit,
        )

    def prepare(stack: Tensor) -> Tensor:
        """Return a copy of the stack (m, k) in which no row is longer than the limit."""
        stack = finite_rows(stack)
        norms = [norm(row) for row in stack]
        bound = limit
        if bound is None:
            bound = statistics.median(norms)
        out = stack.clone()
        for row, length in zip(out, norms, strict=True):
            if length > bound:
                row *= bound / length
        return out

    return prepare


def nearest_mixing(attackers: int) -> Prepare:
    """Return the step that replaces every update by the mean of the m - f updates nearest to it, itself included."""

    def prepare(stack: Tensor) -> Tensor:
        """Return the stack (m, k) with each row replaced by the mean of the m - f rows nearest to it."""
        m = len(stack)
        require_responses(m, 2 * attackers + 1, "nearest-neighbour mixing", attackers)
        stack = finite_rows(stack)
        nearest = squared_distances(stack).argsort(dim=1, stable=True)[:, : m - attackers]
        mixing = torch.zeros(m, m, dtype=torch.float64).scatter_(1, nearest, 1 / (m - attackers))
        out = torch.empty_like(stack)
        for piece in chunks(stack.shape[1]):
            out[:, piece] = (mixing @ stack[:, piece].to(torch.float64)).to(torch.float32)
        return out

    return prepare


def prepared(rule: Rule, *steps: Prepare) -> Rule:
    """Return a rule that runs `steps` in order on the stack and then `rule`."""

    def aggregate(stack: Tensor, weights: Tensor) -> Tensor:
        """Return the rule's update of the stack after all steps."""
        for step in steps:
            stack = step(stack)
        return rule(stack, weights)

    return aggregate


AGGREGATORS |= {
    "mean": lambda attackers, responses: mean_rule(),
    "median": lambda attackers, responses: median(),
    "trimmed_mean": lambda attackers, responses: trimmed_against(attackers, responses),
    "krum": lambda attackers, responses: krum(attackers),
    "multi_krum": lambda attackers, responses: multi_krum(attackers),
    "bulyan": lambda attackers, responses: bulyan(attackers),
    "geometric_median": lambda attackers, responses: geometric_median(),
    "centered_clipping": lambda attackers, responses: centered_clipping(),
    "norm_clip": lambda attackers, responses: prepared(mean_rule(), clip_norms()),
}
"""Rules by name: `make(attackers, responses)` returns the rule for that many attackers among that many responses."""


def trimmed_against(attackers: int, responses: int) -> Rule:
    """Return the trimmed mean that cuts on each side as many values as there may be attackers."""
    require_responses(responses, 2 * attackers + 1, "the trimmed mean", attackers)
    return trimmed_mean(attackers / responses)


@in_range
def robust_aggregator(
    name: str, attackers: Number = 0, neighbours: bool = False, clip: Positive | None = None
) -> Aggregator:
    """Return the aggregator of a robust rule, with optional clipping and nearest-neighbour mixing before it.

    `name` is a key of `AGGREGATORS`, `attackers` the number of malicious clients expected in a cohort, `neighbours`
    turns on nearest-neighbour mixing, `clip` is the norm to which updates are clipped first (None: not).
    """
    AGGREGATORS.find(name)  # an unknown name is refused now, not in the first round

    def update(answers: Answers, weights: Tensor) -> Tensor:
        """Return the rule's update of all answers; attackers that validation dropped are no longer expected."""
        stack = torch.stack(list(answers.updates))
        # Validation has already dropped some attackers: that many fewer are left among the responses.
        left = max(0, attackers - answers.dropped)
        steps = []
        if clip is not None:
            steps.append(clip_norms(clip))
        if neighbours:
            steps.append(nearest_mixing(left))
        rule: Rule = AGGREGATORS.build(name, {}, attackers=left, responses=len(stack))
        return prepared(rule, *steps)(stack, weights)

    label = []
    if clip is not None:
        label.append("clip")
    if neighbours:
        label.append("nnm")
    label.append(name)
    switches = []  # the settings that turn this aggregator into the plain mean
    if name != "mean":
        switches.append("algorithm.robust='mean'")
    if neighbours:
        switches.append("algorithm.neighbours=false")
    if clip is not None:
        switches.append("algorithm.clip_norm=none")
    return Aggregator("+".join(label), update, instead=" and ".join(switches))
