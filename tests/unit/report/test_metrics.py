"""Metrics from sums against scikit-learn on random cases, intervals against simulation, and the laws of the sums."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from sklearn import config_context as sklearn_quick
from sklearn import metrics as sklearn
from tests.support.errors import raises
from torch import Tensor

from fedgraft.metrics import intervals, metrics, raw, scores

Case = tuple[Tensor, Tensor, list[str]]


def case(seed: int) -> Case:
    """Logits, labels and class names: every fifth with ties, few classes present, one class, one image, or perfect."""
    stream = np.random.default_rng(seed)
    classes, n = int(stream.integers(2, 9)), int(stream.integers(2, 150))
    kind = seed % 5
    present = stream.permutation(classes)[: 1 if kind == 2 else int(stream.integers(1, classes + 1))]
    n = 1 if kind == 3 else n
    labels = stream.choice(present if kind in (1, 2) else classes, n)
    logits = stream.normal(size=(n, classes)) * stream.choice([0.01, 1.0, 4.0])
    logits[np.arange(n), labels] += 100 if kind == 4 else stream.choice([0.0, 1.0, 3.0])
    if kind == 0:
        logits = logits.round()
        logits[n // 2 :] = logits[: n - n // 2]  # images with the very same scores and other labels
    return torch.from_numpy(logits), torch.from_numpy(labels), [f"c{i}" for i in range(classes)]


def reference(logits: Tensor, labels: Tensor, names: list[str]) -> dict[str, float | None]:
    """The same metrics by scikit-learn, from raw predictions."""
    y, probability, n = labels.numpy(), logits.softmax(1).numpy(), len(labels)
    guess, present, every = logits.numpy().argmax(1), np.unique(labels.numpy()), np.arange(len(names))
    others = np.stack([np.delete(probability, c, 1).sum(1) for c in range(len(names))], 1)
    ranks = (np.log(probability) - np.log(others)).round(9)  # equal but for the last bits is equal
    with warnings.catch_warnings(), sklearn_quick(assume_finite=True, skip_parameter_validation=True):
        warnings.simplefilter("ignore")  # scikit-learn warns of classes that are predicted and absent
        found: dict[str, float | None] = {
            "accuracy": float((guess == y).mean()),
            "top5": sum(y[i] in np.argsort(-logits[i].numpy(), kind="stable")[:5] for i in range(n)) / n,
            "balanced_accuracy": sklearn.balanced_accuracy_score(y, guess),
            "log_loss": sklearn.log_loss(y, probability, labels=every),
        }
        (tn, fp), (fn, tp) = sklearn.multilabel_confusion_matrix(y, guess, labels=every).transpose(1, 2, 0)
        f1 = sklearn.f1_score(y, guess, labels=every, average=None)
        found["f1"] = sklearn.f1_score(y, guess, labels=present, average="macro") if n < 40 else f1[present].mean()
    mine = y[:, None] == every  # (n, C)
    both = mine.any(0) & ~mine.all(0)
    areas = np.full(len(names), np.nan)
    if both.any():
        areas[both] = sklearn.roc_auc_score(mine[:, both], ranks[:, both], average=None)
    for c, name in enumerate(names):
        found[f"sensitivity:{name}"] = tp[c] / (tp[c] + fn[c]) if c in present else None
        found[f"specificity:{name}"] = tn[c] / (tn[c] + fp[c]) if list(present) != [c] else None
        found[f"f1:{name}"] = f1[c] if c in present else None
        found[f"auroc:{name}"] = areas[c] if both[c] else None
    found["auroc"] = float(areas[both].mean()) if both.any() else None
    sure, right = probability.max(1), guess == y
    edges = np.linspace(0, 1, 16) + 1e-9  # what is on an edge belongs to the bin below, whatever its last bit
    inside = [(sure > a) & (sure <= b) for a, b in itertools.pairwise(edges)]
    found["calibration_error"] = sum(abs(sure[k].sum() - right[k].sum()) for k in inside) / n
    return found


def close(found: metrics.Metric | None, wanted: float | None, room: float = 1e-7) -> bool:
    if found is None or wanted is None:
        return found is None and wanted is None
    return abs(found.value - wanted) <= room


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_equal_to_scikit_learn_on_200_cases(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        logits, labels, names = case(seed)
        wanted = reference(logits, labels, names)
        summed, exact = (
            metrics.compute(scores.count_scores(logits, labels, len(names)), names),
            raw.exact(logits, labels, names),
        )
        assert summed.keys() == exact.keys() == wanted.keys()
        for name, value in wanted.items():
            assert close(exact[name], value), (seed, name, exact[name], value)
            m = summed[name]
            assert close(m, value, 1e-7 + (m.binned if m else 0.0)), (seed, name, m, value)
            if m and not name.startswith("auroc"):
                assert m.binned == 0
        alone = metrics.metric_arrays(
            {k: v.numpy() for k, v in scores.count_scores(logits, labels, len(names)).items()}
        )
        for name in ("accuracy", "top5", "balanced_accuracy", "f1", "auroc", "calibration_error", "log_loss"):
            number, m = float(alone[name]), summed[name]
            assert math.isnan(number) if m is None else m.value == pytest.approx(number, abs=1e-12), (seed, name)
        for m in [m for found in (summed, exact) for m in found.values() if m]:
            assert m.low is None or m.high is None or (0 <= m.low <= m.value + 1e-12 and m.value <= m.high + 1e-12), m
            assert m.n >= 1 and (m.unit == "nats" or m.high is not None)


def test_scores_that_are_binned_already_give_the_exact_auroc() -> None:
    for seed in range(40):
        logits, labels, names = case(seed)
        sums = scores.count_scores(logits, labels, len(names))
        bins = scores.bin_numbers(scores.log_odds(logits)).numpy()
        by_name = metrics.compute(sums, names)
        for c, name in enumerate(names):
            if found := by_name[f"auroc:{name}"]:
                assert found.value == pytest.approx(sklearn.roc_auc_score(labels.numpy() == c, bins[:, c]), abs=1e-12)


@pytest.mark.parametrize("spread", [0.003, 0.1, 1.0, 5.0])
def test_bins_are_fine_enough_from_the_first_round_to_the_last(spread: float) -> None:
    stream = torch.Generator().manual_seed(1)
    labels = torch.randint(7, (2000,), generator=stream)
    logits = torch.randn(2000, 7, generator=stream, dtype=torch.float64)
    logits[torch.arange(2000), labels] += 1
    names = [str(i) for i in range(7)]
    found = metrics.compute(scores.count_scores(logits * spread, labels, 7), names)
    for name, wanted in raw.exact(logits * spread, labels, names).items():
        m = found[name]
        if m and name.startswith("auroc"):
            assert wanted and abs(m.value - wanted.value) < 1e-3 and m.binned < 1e-2, (name, m, m.binned)


def test_equal_bins_of_the_probability_would_not_do() -> None:
    labels = torch.tensor([0, 1] * 50)
    logits = torch.zeros(100, 2, dtype=torch.float64)
    logits[:, 1] = labels * 0.002 + torch.linspace(0, 0.001, 100)  # a young model: right, and hardly sure
    found = metrics.compute(scores.count_scores(logits, labels, 2), ["a", "b"])["auroc:b"]
    assert found and found.value > 0.99
    probability = logits.softmax(1)[:, 1].numpy()
    assert sklearn.roc_auc_score(labels.numpy(), (probability * 511).astype(int)) == 0.5


def test_sums_of_parts_are_the_sums_of_the_whole_bit_for_bit() -> None:
    for seed in range(30):
        logits, labels, names = case(seed)
        cut = np.sort(np.random.default_rng(seed).integers(0, len(labels) + 1, 3)).tolist()
        pieces = zip(logits.tensor_split(cut), labels.tensor_split(cut), strict=True)
        merged = scores.merge_scores([scores.count_scores(x, y, len(names)) for x, y in pieces], len(names))
        for name, value in scores.count_scores(logits, labels, len(names)).items():
            assert torch.equal(merged[name], value), name


def test_sums_fit_what_they_are_announced_to_be() -> None:
    for seed in range(10):
        logits, labels, names = case(seed)
        sums, wanted = scores.count_scores(logits, labels, len(names)), scores.sum_layouts(len(names))
        assert list(sums) == list(wanted)
        for name, value in sums.items():
            shape, limit, step = wanted[name]
            assert value.shape == shape and value.dtype == torch.float64
            assert float(value.abs().max()) <= limit
            assert torch.equal((value / step).round() * step, value)  # a secure sum loses nothing
            assert math.frexp(step)[0] == 0.5


def test_no_images_give_no_metrics() -> None:
    empty = scores.count_scores(torch.empty(0, 3), torch.empty(0, dtype=torch.int64), 3)
    assert all(torch.equal(v, w) for v, w in zip(empty.values(), scores.merge_scores([], 3).values(), strict=True))
    assert set(metrics.compute(empty, ["a", "b", "c"]).values()) == {None}
    assert metrics.reliability(empty) == []
    with raises("E-METRICS-UNDEFINED", metric="balanced_accuracy"):
        metrics.select_value(empty, "balanced_accuracy")


def test_a_model_that_diverged_is_counted_and_breaks_nothing() -> None:
    logits = torch.tensor([[1.0, 0.0], [math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf], [0.0, -math.inf]])
    sums = scores.count_scores(logits, torch.tensor([0, 1, 1, 1, 1]), 2)
    assert all(bool(value.isfinite().all()) for value in sums.values())
    found = metrics.compute(sums, ["a", "b"])
    loss, accuracy = found["log_loss"], found["accuracy"]
    assert loss and loss.value == pytest.approx((4 * scores.LOSS_LIMIT + math.log1p(math.exp(-1))) / 5)
    assert accuracy and (accuracy.hits, accuracy.n) == (1, 5)


def test_ties_stay_ties_whatever_the_order_of_classes_or_a_shift() -> None:
    logits = torch.tensor([0.1, 0.7, 0.2, 0.3]).double()
    odds = scores.log_odds(torch.stack([logits, logits.roll(2), logits.flip(0), logits + 0.3]))
    assert torch.equal(odds[0], odds[1].roll(2)) and torch.equal(odds[0], odds[2].flip(0))
    assert torch.equal(odds[0], odds[3])


def test_what_does_not_fit_is_refused() -> None:
    with raises("E-METRICS-LOGITS-SHAPE", shape=(2, 3), labels=2, classes=4):
        scores.count_scores(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 4)
    with raises("E-METRICS-LABEL-RANGE", lowest=0, highest=3, classes=3):
        scores.count_scores(torch.zeros(2, 3), torch.tensor([0, 3]), 3)
    with raises("E-METRICS-SUM-SHAPE", sum="confusion", classes=3):
        scores.merge_scores([scores.merge_scores([], 2)], 3)
    with raises("E-METRICS-CLASS-NAMES", classes=3, names=2):
        metrics.compute(scores.merge_scores([], 3), ["a", "b"])
    with raises("E-METRICS-UNKNOWN", metric="acuracy"):
        metrics.select_value(scores.merge_scores([], 2), "acuracy")


def test_text_says_how_many_images_are_behind_a_number() -> None:
    confusion = torch.zeros(2, 2, dtype=torch.float64)
    confusion[0, 0], confusion[0, 1], confusion[1, 1] = 13, 6, 1
    sums = scores.merge_scores([], 2) | {"confusion": confusion}
    found = metrics.compute(sums, ["mel", "nv"])
    assert str(found["sensitivity:mel"]) == "68 % (13 of 19; 46-85)"
    assert str(found["sensitivity:nv"]) == "100 % (1 of 1; 21-100)"
    assert str(metrics.Metric(0.8712, 0.80, 0.92, 152)) == "0.87 (152 images; 0.80-0.92)"
    assert str(metrics.Metric(0.012, -0.02, 0.03, 1, "points")) == "1.2 points (1 image; -2.0 to 3.0)"
    assert str(metrics.Metric(1.5, None, None, 1, "nats")) == "1.50 nats (1 image; no interval)"


def test_every_metric_can_choose_a_round_and_higher_is_better() -> None:
    names = list("abcd")
    logits, labels = sample(np.random.default_rng(4), 200, 4, 0.5)
    better = logits.clone()
    better[torch.arange(len(labels)), labels] += 2
    before, after = (scores.count_scores(x, labels, len(names)) for x in (logits, better))
    for name in ("accuracy", "balanced_accuracy", "f1", "auroc", "log_loss"):
        assert metrics.select_value(after, name) > metrics.select_value(before, name), name
    one = metrics.compute(before, names)["sensitivity:d"]
    assert one and metrics.select_value(before, "sensitivity:d", names) == one.value
    found = metrics.compute(before, names)
    assert set(metrics.NAMES) == {name.partition(":")[0] for name in found}
    assert all(name in found for name in metrics.ERRORS)


def test_reliability_curve_by_hand() -> None:
    logits = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.52, 0.48], [1.0, 0.0]]).log()
    curve = metrics.reliability(scores.count_scores(logits, torch.tensor([0, 1, 1, 0]), 2))
    assert [(round(b.confidence, 6), b.accuracy.hits, b.accuracy.n) for b in curve] == [
        (0.52, 0, 1),
        (0.9, 1, 2),
        (1.0, 1, 1),
    ]


def test_a_confidence_on_an_edge_belongs_below_it() -> None:
    for classes in (3, 5, 15):  # 1/3, 1/5 and 1/15 are edges, and none of them is a float
        counts = scores.count_scores(torch.zeros(2, classes), torch.zeros(2, dtype=torch.int64), classes)[
            "calibration"
        ][0]
        assert counts.tolist() == [2.0 * (i == 15 // classes - 1) for i in range(15)]


def test_what_bins_cannot_tell_is_in_the_interval() -> None:
    found = metrics.compute(scores.count_scores(torch.zeros(400, 2), torch.arange(400) % 2, 2), ["a", "b"])
    for name in ("auroc", "auroc:a"):
        m = found[name]
        assert m and (m.value, m.binned, m.low, m.high) == (0.5, 0.5, 0.0, 1.0)
    exact = raw.exact(torch.zeros(400, 2), torch.arange(400) % 2, ["a", "b"])["auroc"]
    assert exact and exact.low is not None and exact.low > 0.4  # ties that are known to be ties leave no doubt


def test_wilson_is_scipys() -> None:
    from scipy.stats import binomtest

    for hits, n in [(0, 1), (1, 1), (13, 19), (0, 40), (40, 40), (500, 1000)]:
        low, high = intervals.wilson(np.asarray(hits), np.asarray(n))
        theirs = binomtest(hits, n).proportion_ci(method="wilson")
        assert (float(low), float(high)) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_intervals_stay_open_where_all_is_right() -> None:
    labels = torch.arange(4).repeat(3)
    found = metrics.compute(scores.count_scores(torch.eye(4)[labels] * 50, labels, 4), list("abcd"))
    for name in ("accuracy", "balanced_accuracy", "f1", "auroc", "sensitivity:a", "f1:a", "auroc:a"):
        m = found[name]
        assert m and m.value == 1 and m.high == 1 and m.low is not None and m.low < 0.95, (name, m)


def sample(stream: np.random.Generator, n: int, classes: int, gain: float) -> tuple[Tensor, Tensor]:
    labels = stream.choice(classes, n, p=np.arange(1, classes + 1) / (classes * (classes + 1) / 2))
    logits = stream.normal(size=(n, classes))
    logits[np.arange(n), labels] += gain
    return torch.from_numpy(logits), torch.from_numpy(labels)


@pytest.mark.slow
def test_intervals_hold_the_truth_about_95_times_in_100() -> None:
    stream, names = np.random.default_rng(5), list("abcd")
    truth = metrics.compute(scores.count_scores(*sample(stream, 60_000, 4, 2.0), 4), names)
    held = dict.fromkeys(truth, 0)

    def wanted(name: str, found: dict[str, metrics.Metric | None]) -> float:
        """The truth; of a mean over classes that of the classes that were there."""
        part = {"balanced_accuracy": "sensitivity", "f1": "f1", "auroc": "auroc"}.get(name)
        of = [f"{part}:{c}" for c in names if found[f"{part}:{c}"]] if part else [name]
        return float(np.mean([m.value for one in of if (m := truth[one])]))

    for _ in range(200):
        found = metrics.compute(scores.count_scores(*sample(stream, 60, 4, 2.0), 4), names)
        for name, m in found.items():
            held[name] += m is None or (m.low or 0.0) <= wanted(name, found) <= (m.high or 0.0)
    for name, count in held.items():
        if name != "calibration_error":  # the estimate's own bins move with n; see below
            assert count / 200 >= 0.9, (name, count / 200)


def test_a_class_of_one_image_does_not_spoil_the_mean_of_all() -> None:
    """Test images by class of a real site, one class with a single one; standard errors alone would not do."""
    n, stream = np.array([59, 60, 99, 7, 69, 161, 1]), np.random.default_rng(11)
    for chance in (np.array([0.1, 0.15, 0.3, 0.05, 0.2, 0.95, 0.1]), np.array([0.9, 0.95, 0.85, 0.97, 0.8, 0.99, 0.9])):
        held, plain = 0, 0
        for hits in stream.binomial(n, chance, (400, 7)):
            share, covariance = hits / n, intervals.share_covariance(hits, n)
            low, high = intervals.mean_of(share, *intervals.wilson(hits, n), covariance)
            assert low < share.mean() < high
            held += low <= chance.mean() <= high
            plain += abs(share.mean() - chance.mean()) <= intervals.Z * np.sqrt(covariance.sum()) / 7
        assert held / 400 > 0.9 > plain / 400


def test_interval_of_the_calibration_error_holds_that_of_the_same_bins() -> None:
    stream = np.random.default_rng(6)
    for shift in (0.0, 0.1):
        held = 0
        for _ in range(300):
            sure = 0.15 + 0.85 * stream.beta(4, 1.2, 100)
            chance = sure - shift
            slot, right = np.ceil(sure * 15).astype(int) - 1, stream.random(100) < chance
            count, total, hits, wanted = (np.bincount(slot, w, 15) for w in (np.ones(100), sure, right, chance))
            low, high = intervals.calibration_error(count, total, hits)
            held += low <= np.abs(total - wanted).sum() / 100 + 1e-12 <= high
        assert held / 300 > 0.93


def test_mean_intervals_agree_with_a_bootstrap_where_images_are_many() -> None:
    stream, names = np.random.default_rng(8), list("abcd")
    logits, labels = sample(stream, 1500, 4, 1.5)
    found, rows = raw.exact(logits, labels, names), scores.score_images(logits, labels, 4)
    draws = [torch.from_numpy(stream.integers(0, 1500, 1500)) for _ in range(400)]
    values = [
        metrics.metric_arrays(
            {k: v.numpy() for k, v in scores.sum_scores(scores.ImageScores(*(x[d] for x in rows)), 4).items()}
        )
        for d in draws
    ]
    for name in ("accuracy", "balanced_accuracy", "f1", "auroc", "log_loss"):
        m, error = found[name], np.std([float(v[name]) for v in values])
        assert m and m.low is not None and m.high is not None
        assert (m.high - m.low) / (2 * intervals.Z) == pytest.approx(error, rel=0.15), name


def test_exact_interval_of_the_mean_auroc_is_inside_the_one_from_sums() -> None:
    logits, labels = sample(np.random.default_rng(9), 300, 4, 1.0)
    one, other = (
        raw.exact(logits, labels, list("abcd"))["auroc"],
        metrics.compute(scores.count_scores(logits, labels, 4), list("abcd"))["auroc"],
    )
    assert one and other and one.low and one.high and other.low and other.high
    assert other.low < one.low and one.high < other.high


def test_pairing_sees_what_two_separate_intervals_miss() -> None:
    logits, labels = sample(np.random.default_rng(10), 300, 4, 1.0)
    better = logits.clone()
    better[torch.arange(300), labels] += 0.1
    found = raw.paired_bootstrap(better, logits, labels, list("abcd"), seed=0, draws=100)
    gap, one = found["accuracy"], raw.exact(logits, labels, list("abcd"))["accuracy"]
    assert gap and one and gap.low is not None and one.high is not None
    assert gap.low > 0 and one.value + gap.value < one.high
    assert gap.unit == "points" and gap.value == pytest.approx(
        float((better.argmax(1) == labels).double().mean() - (logits.argmax(1) == labels).double().mean())
    )
    assert found == raw.paired_bootstrap(better, logits, labels, list("abcd"), seed=0, draws=100)
    assert found != raw.paired_bootstrap(better, logits, labels, list("abcd"), seed=1, draws=100)
    same = raw.paired_bootstrap(logits, logits, labels, list("abcd"), seed=0, draws=20)["f1"]
    assert same and (same.value, same.low, same.high) == (0, 0, 0)
    nothing = raw.paired_bootstrap(logits[:0], logits[:0], labels[:0], list("abcd"), seed=0)
    assert set(nothing.values()) == {None}
