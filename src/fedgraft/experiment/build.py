"""`Setup`: everything a run needs, built from its config, with the parts that cost something made when first used."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from fedgraft.algorithm import Answers, Combiner, count_mean, vary
from fedgraft.client import Memory, Workplace
from fedgraft.combine.server_rules import plain_tail
from fedgraft.contracts import Examples
from fedgraft.data.examples import FeatureExamples, ImageExamples, examples_of
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.store import cache_dir
from fedgraft.data.transforms import STATISTICS, Transform
from fedgraft.edit.lora import attach
from fedgraft.edit.lora_combine import LoraLayout, combine_lora, lora_layout
from fedgraft.edit.masks import Mask
from fedgraft.edit.space import EditSpace, select
from fedgraft.engines.batched import Batched, applies
from fedgraft.engines.choice import Choice, Wanted, choose_engine, cores
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.pool import Pool, prepare_features
from fedgraft.errors import FedgraftError
from fedgraft.experiment.config import Config
from fedgraft.experiment.editing import Adaptive, Calibrator, Opened, masked_space, open_masked, own_active, scope_of
from fedgraft.experiment.parts import (
    Deal,
    build_algorithm,
    build_federation,
    build_network,
    check_blocks,
    deal,
    device_named,
    install,
    norm_ratio,
    open_space,
    per_round,
)
from fedgraft.experiment.trackers import require
from fedgraft.messages import Order, Reply, pack_bits
from fedgraft.models.identity import digest
from fedgraft.observe import hidden
from fedgraft.randomness import torch_stream
from fedgraft.round import Judge
from fedgraft.secure_round import Sums
from fedgraft.server import EVERYONE, ServerState
from fedgraft.weigh.similarity import svcca_basis, svcca_of_bases

log = logging.getLogger("fedgraft")


class Remote(Protocol):
    """An engine whose clients are on other machines, which must be told the edit space."""

    memory: dict[int, Memory]
    sent: int
    received: int
    """Bytes of all messages so far, whatever for."""

    def open(self, run: str, tensors: Mapping[str, Tensor]) -> None: ...
    def exchange(self, orders: Sequence[Order]) -> Iterable[Reply | tuple[int, Reply | bytes | str]]: ...


class Setup:
    """Everything a run needs, built once. Parts that cost something are made when first used."""

    def __init__(self, config: Config, dealt: Deal | None = None, remote: Remote | None = None) -> None:
        """`dealt` and `remote` are for a federation of machines: the data that is here, the engine to the others."""
        self.config, self.remote = config, remote
        self.algorithm = build_algorithm(config)
        self.deal = deal(config) if dealt is None else dealt
        self.network = build_network(config, self.deal.dataset).to(device_named(config.device))
        check_blocks(config, self.network)
        require(config.track.trackers)
        self.federation = build_federation(config, self.deal.largest)
        own = (self.network.mean, self.network.std)
        statistics: Any = STATISTICS.get(config.data.normalise, own)
        self.transform = Transform(self.network.image_size, config.data.augment, *statistics)
        self.pixels = examples_of(self.deal.dataset.train, self.transform)
        self.test_pixels = examples_of(self.deal.dataset.test, self.transform)
        self._pools: WeakSet[Pool] = WeakSet()
        self._space: EditSpace | None = None
        self.mask: Mask | None = None
        self.layout: LoraLayout | None = None
        self.own: dict[int, Tensor] = {}
        self.adaptive: Adaptive | None = None
        self.rate_factor = 1.0

    @property
    def space(self) -> EditSpace:
        """The coordinates that may move; there are none before `open`."""
        if self._space is None:
            raise FedgraftError("the edit space is not open yet")
        return self._space

    def open(self, saved: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Open the edit space (after step 0, which a mask depends on); returns what a checkpoint must hold of it.

        `saved` is what an earlier call returned, so that a resumed run has the same coordinates without calibrating.
        """
        kind = self.config.moves.kind
        self.head_start = self.network.head.weight.detach().clone(), self.network.head.bias.detach().clone()
        stored: dict[str, Tensor] = {}
        if kind == "masked":
            stored = self._open_mask(saved or {})
        elif kind == "lora":
            self._open_lora()
        else:
            self._space = open_space(self.config, self.network)
        if self.space.size > self.space.trained:  # the tail takes the plain mean, whatever the server rule
            self.algorithm = vary(self.algorithm, server=plain_tail(self.algorithm.server, self.space.trained))
        if self.config.moves.match_norm is not None:
            self._match_norm(self.config.moves.match_norm)
        self.close()  # workers of step 0 and of calibration hold the network as it was before
        return stored

    def _open_lora(self) -> None:
        c, first = self.config.moves.lora, self.config.moves.freeze_blocks
        attach(self.network, c.rank, c.alpha, c.targets, self.config.seed, c.dropout, first)
        head = [n for n, _ in self.network.named_parameters() if self.network.block_of(n) > self.network.depth]
        layout = lora_layout(self.network, c.aggregate, head if self.config.moves.head_too else ())
        self.layout, self._space = layout, layout.space
        if not layout.needs_each_client:
            return

        def combine(answers: Answers, weights: Tensor) -> Tensor:
            assert answers.start is not None
            fresh = layout.fresh(self.config.seed, answers.round) if layout.mode == "stack" else None
            return combine_lora(layout, answers.start, answers.changes, weights.tolist(), fresh) - answers.start

        self.algorithm = vary(self.algorithm, combine=Combiner(f"lora:{layout.mode}", combine, linear=False))

    def follow(self, head: Tensor, mask: Tensor | None) -> None:
        """Open the space that a server has opened, on a machine of its clients: from its head and its mask's bits."""
        install(self.network, head)
        if self.config.moves.kind == "lora":
            self._open_lora()
        elif mask is None:
            self._space = open_space(self.config, self.network)
        else:
            scope = scope_of(self.config.moves, self.network)
            names = (*scope.maskable, *scope.dense)
            shapes = {n: tuple(p.shape) for n, p in self.network.named_parameters() if n in names}
            self.mask = Mask.from_bits(mask, shapes)
            self._space = masked_space(self.network, self.mask)

    def opened(self) -> dict[str, Tensor]:
        """What another machine needs to `follow`, and the probe where it has no way to make it."""
        tensors = {"head": torch.cat([self.head_start[0], self.head_start[1][:, None]], 1)}
        if self.mask is not None:
            tensors["mask"] = self.mask.bits()
        if isinstance(self.probe, FeatureExamples) and not self.deal.rows_known:
            tensors |= {"probe/inputs": self.probe.features, "probe/labels": self.probe.labels}
        return tensors

    @cached_property
    def calibration(self) -> tuple[Workplace, Calibrator]:
        """Where clients score weights for a mask, and what turns the scores into one."""
        place = Workplace(
            self.network, select(self.network, lambda n: True), self.plain_pixels, self.deal.rows, self.config.seed
        )
        calibrator = Calibrator(self.config, self.network, self.sums(place), self.deal.total)
        place.choose_mask = lambda score: calibrator.calibrate(score).mask
        return place, calibrator

    def _open_mask(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        _, calibrator = self.calibration
        recipe = self.config.moves.mask
        names = (*calibrator.scope.maskable, *calibrator.scope.dense)
        shapes = {n: tuple(p.shape) for n, p in self.network.named_parameters() if n in names}
        if "mask" in saved:
            opened = Opened(Mask.from_bits(saved["mask"], shapes))
        else:
            identity = [digest(self.network), *self.deal.identity]
            opened = open_masked(calibrator, cache_dir(), [*identity, self.transform.digest])
            log.info(
                "mask %s: %d of %d coordinates move (%.2f %% of the network), energy share %.3g, %d without effect",
                recipe.strategy, opened.mask.count, opened.mask.total, 100 * calibrator.scope.density(opened.mask),
                opened.energy, opened.negligible,
            )  # fmt: skip
        self.mask, self._space = opened.mask, masked_space(self.network, opened.mask)
        stored = {"mask": opened.mask.bits()}
        if recipe.per_client:
            fresh = own_active(self.space, opened.own or {})
            self.own = {
                k: saved[f"own/{k}"] if f"own/{k}" in saved else pack_bits(fresh[k])
                for k in range(self.federation.clients)
            }
            stored |= {f"own/{k}": bits for k, bits in self.own.items()}
            if recipe.fill == "count":
                self.algorithm = vary(self.algorithm, combine=count_mean())
        if recipe.adaptive_start is not None:
            scores = saved.get("scores", None)
            if scores is None:
                scores = calibrator.lasting(self.space)
            self.adaptive = Adaptive(recipe, scores, calibrator.scope)
            stored["scores"] = scores
        return stored

    def _match_norm(self, cap: float) -> None:
        """Raise the rate by the ratio of the dense gradient's norm to the active one's, on validation images."""
        rows = self.deal.validation_rows if len(self.deal.validation_rows) else self.deal.train_rows
        factor = min(cap, norm_ratio(self.network, self.space, self.plain_pixels, rows[:256]))
        log.info("update-norm matching: the learning rate is raised %.2f times", factor)
        old, self.rate_factor = self.federation.schedule, factor
        self.federation = replace(self.federation, schedule=lambda t, total, history: factor * old(t, total, history))

    def active(self, state: ServerState) -> Mapping[int, Tensor]:
        """What may move in the coming round, as packed bits."""
        if self.own:
            return self.own
        if self.adaptive is not None:
            return {EVERYONE: pack_bits(self.adaptive.active(state.drifts))}
        assert self.layout is not None
        chosen = torch.zeros(self.space.trained, dtype=torch.bool)
        chosen[self.layout.active(state.round)] = True
        return {EVERYONE: pack_bits(chosen)}

    @cached_property
    def plain_pixels(self) -> ImageExamples | FeatureExamples:
        """Training images without augmentation."""
        return examples_of(self.deal.dataset.train, replace(self.transform, train=()))

    def at_entry(self, pixels: ImageExamples | FeatureExamples, entry: int) -> Examples:
        """These images where they enter: as pixels, or as outputs of the network before `entry`.

        Those are computed once for all runs on this machine. Given features are at their place already.
        """
        if not entry or isinstance(pixels, FeatureExamples) or not len(pixels):
            return pixels
        return CachedExamples(pixels, self.network, entry, cache_dir() / "features", key=self.config.model.name)

    def ready(self, examples: Examples, rows: Tensor) -> None:
        """Compute what is not kept of these rows yet, side by side on all cores; without a feature cache do nothing."""
        if isinstance(examples, CachedExamples) and self.threads > 1:
            prepare_features(examples, rows, self.threads)

    @property
    def threads(self) -> int:
        """How many things this process may do side by side between rounds, each on one thread."""
        alone = self.config.workers == 1 or torch.get_num_threads() > 1 or self.network.head.weight.device.type != "cpu"
        return 1 if alone else self.config.workers or cores()

    @cached_property
    def entry(self) -> int:
        """The last entry before anything that moves: what lies before it is the same for the whole run."""
        c, network = self.config, self.network
        body_finetuned = c.personal.finetune_epochs > 0 and c.personal.finetune_part != "head"
        if not c.data.cache_features or body_finetuned or self.algorithm.wants:
            return 0
        entry = network.entry_for(self.space.first_block(network))
        if entry and not self.transform.deterministic:
            changing = ", ".join(name for name in self.transform.train if name != "flip")
            log.info("features are not kept: data.augment has %s, which changes an image anew each time", changing)
            return 0
        return entry

    @cached_property
    def examples(self) -> Examples:
        """Training (and validation) images as the network meets them in this run."""
        return self.at_entry(self.pixels, self.entry)

    @cached_property
    def tests(self) -> Examples:
        """Test images, likewise."""
        return self.at_entry(self.test_pixels, self.entry)

    @cached_property
    def place(self) -> Workplace:
        """The clients' workplace in this process."""
        private = start = None
        if self.algorithm.keeps.kind == "head":
            private = select(self.network, lambda name: self.network.block_of(name) > self.network.depth)
            start = private.gather(self.network)
        return Workplace(
            self.network, self.space, self.examples, self.deal.rows, self.config.seed,
            self.tests, self.deal.test_rows, private, start, self.probe, sends_buffers=self.layout is None,
            held=lambda client: self.deal.validation_rows,
        )  # fmt: skip

    @cached_property
    def probe(self) -> Examples | None:
        """Validation images that every client has, row by row, where an algorithm compares representations."""
        if not any(wanted.name in {"alignment", "probe_representation"} for wanted in self.algorithm.wants):
            return None
        rows = self.deal.validation_rows
        if len(rows) < self.config.algorithm.probe:
            raise FedgraftError(
                f"the probe needs {self.config.algorithm.probe} validation images and there are {len(rows)}; raise "
                "data.validation or lower algorithm.probe"
            )
        picked = torch.randperm(len(rows), generator=torch_stream(self.config.seed, "probe"))[
            : self.config.algorithm.probe
        ]
        inputs = self.plain_pixels.batch(rows[picked])
        return FeatureExamples(inputs, self.plain_pixels.labels[rows[picked]], 0)

    def align(self, answers: Answers) -> Tensor:
        """Server-side alignment: SVCCA by layer of each submitted change, on a secret probe, another one each round."""
        a, rows = self.config.algorithm, self.deal.validation_rows
        stream = torch_stream(self.config.seed, "secret_probe", answers.round)
        picked = rows[torch.randperm(len(rows), generator=stream)[: a.probe]]
        probe = FeatureExamples(self.plain_pixels.batch(picked), self.plain_pixels.labels[picked], 0)
        assert answers.start is not None
        self.place.release()

        def bases(vector: Tensor) -> list[Tensor]:
            self.space.scatter(vector, self.network)
            return [svcca_basis(x, a.keep) for x in hidden(self.network, a.layers, probe)]

        before = bases(answers.start)
        scores = []
        for change in answers.changes:
            after = bases(answers.start + change)
            scores.append([svcca_of_bases(x, y, a.top).value for x, y in zip(after, before, strict=True)])
        return torch.tensor(scores, dtype=torch.float64)

    @cached_property
    def trunk_place(self) -> Workplace:
        """The workplace of step 0: the untouched trunk's features, kept on disk and shared by all runs."""
        cached = self.at_entry(self.plain_pixels, self.network.depth)
        self.ready(cached, torch.cat([self.deal.train_rows, self.deal.validation_rows]))
        return Workplace(
            self.network, select(self.network, lambda n: True), cached, self.deal.rows, self.config.seed,
            held=lambda client: self.deal.validation_rows,
        )  # fmt: skip

    @cached_property
    def judge(self) -> Judge:
        """What the server knows of the space, and can compute for itself."""
        s, n = self.space, self.network
        partial = self.own or self.adaptive or (self.layout is not None and self.layout.mode == "alternate")
        return Judge(
            s.digest, self.place.sent, s.trained, n.width, n.classes, self.active if partial else None, self.align
        )

    def engine(self, place: Workplace | None = None) -> InProcess | Pool | Batched | Remote:
        """An engine for this run's clients, or for preparations at another place; see `choose_engine`."""
        if self.remote is not None:
            if place is None:  # the space is open: tell the others
                self.remote.open(self.federation.run, self.opened())
            return self.remote
        where = place or self.place
        choice = self.choice(where, preparing=place is not None)
        if place is None:
            log.info("engine: %s, %s", "batched" if choice.mode == "batched" else "reference", choice.why)
        if choice.mode == "batched":
            return Batched(self.algorithm, where)
        if choice.mode == "in_process":
            return InProcess(self.algorithm, where)
        pool = Pool(self.algorithm, where, choice.workers, self.config.rounds.deadline)
        self._pools.add(pool)
        return pool

    def choice(self, place: Workplace, preparing: bool = False) -> Choice:
        """How orders at this place are carried out. What prepares a run (step 0, a mask) is never batched."""
        c = self.config
        wanted: Wanted = "reference" if preparing or c.engine == "flower-sim" else c.engine
        obstacle = applies(self.algorithm, place) if wanted != "reference" else None
        on_cpu = self.network.head.weight.device.type == "cpu"
        return choose_engine(wanted, c.workers, obstacle, self._work(place, preparing), on_cpu, per_round(c))

    def _work(self, place: Workplace, preparing: bool) -> float:
        """Multiply-adds of a round, at least: every image meets each weight behind its entry. 0: the head's alone."""
        entry, network, rule = place.examples.entry, self.network, self.algorithm.local
        if entry == network.depth:
            return 0.0
        if preparing:  # every client is asked, about as many images as it likes
            return math.inf
        met = sum(p.numel() for name, p in network.named_parameters() if network.block_of(name) >= entry)
        images = rule.batch_size * rule.steps(max(1, self.deal.total // self.federation.clients))
        return float(met * images * per_round(self.config))

    def sums(self, place: Workplace) -> Sums:
        """What asks this run's clients for sums before the first round, hidden where the run hides them."""
        f = self.federation
        return Sums(self.engine(place).exchange, f.run, range(f.clients), self.network, self.algorithm.protects)

    def close(self) -> None:
        """End the worker processes that are left."""
        for pool in list(self._pools):
            pool.close()
