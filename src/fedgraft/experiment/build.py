"""`Setup`: everything a run needs, built from its config, with the parts that cost something made when first used."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fedgraft.algorithm import Answers, Combiner, Mixture, count_mean, vary
from fedgraft.client import Workplace
from fedgraft.combine.server_rules import plain_tail
from fedgraft.contracts import Examples
from fedgraft.data.examples import FeatureExamples, ImageExamples
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.store import cache_dir
from fedgraft.data.transforms import STATISTICS, Transform
from fedgraft.edit.lora import attach
from fedgraft.edit.lora_combine import LoraLayout, combine_lora, lora_layout
from fedgraft.edit.masks import Mask
from fedgraft.edit.space import EditSpace, select
from fedgraft.engines.batched import Batched
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.pool import Pool
from fedgraft.errors import FedgraftError
from fedgraft.experiment.config import Config
from fedgraft.experiment.editing import Adaptive, Calibrator, Opened, masked_space, open_masked, own_active
from fedgraft.experiment.parts import (
    build_algorithm,
    build_federation,
    build_network,
    check_blocks,
    deal,
    device_named,
    norm_ratio,
    open_space,
    per_round,
)
from fedgraft.experiment.trackers import require
from fedgraft.messages import pack_bits
from fedgraft.models.identity import digest
from fedgraft.observe import hidden
from fedgraft.randomness import torch_stream
from fedgraft.round import Judge
from fedgraft.server import EVERYONE, ServerState
from fedgraft.weigh.similarity import svcca_basis, svcca_of_bases

log = logging.getLogger("fedgraft")


class Setup:
    """Everything a run needs, built once. Parts that cost something are made when first used."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.algorithm = build_algorithm(config)
        self.deal = deal(config)
        self.network = build_network(config, self.deal.classes).to(device_named(config.device))
        check_blocks(config, self.network)
        require(config.track.trackers)
        self.federation = build_federation(config, int(self.deal.partition.sizes().max()))
        own = (self.network.mean, self.network.std)
        statistics: Any = STATISTICS.get(config.data.normalise, own)
        self.transform = Transform(self.network.image_size, config.data.augment, *statistics)
        self.pixels = ImageExamples(self.deal.dataset.train, self.transform)
        self.test_pixels = ImageExamples(self.deal.dataset.test, self.transform)
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
        c = self.config.moves.lora
        attach(self.network, c.rank, c.alpha, c.targets, self.config.seed, c.dropout)
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

    def _open_mask(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        place = Workplace(
            self.network, select(self.network, lambda n: True), self.plain_pixels, self.deal.rows, self.config.seed
        )
        engine = self.engine(place)
        run = self.federation.run
        calibrator = Calibrator(self.config, self.network, engine, run, len(self.deal.train_rows))
        place.choose_mask = lambda score: calibrator.calibrate(score).mask
        recipe = self.config.moves.mask
        names = (*calibrator.scope.maskable, *calibrator.scope.dense)
        shapes = {n: tuple(p.shape) for n, p in self.network.named_parameters() if n in names}
        if "mask" in saved:
            opened = Opened(Mask.from_bits(saved["mask"], shapes))
        else:
            identity = [digest(self.network), self.deal.dataset.train.digest, self.deal.partition.digest]
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
    def plain_pixels(self) -> ImageExamples:
        """Training images without augmentation."""
        return ImageExamples(self.deal.dataset.train, replace(self.transform, train=()))

    def at_entry(self, pixels: ImageExamples, entry: int) -> Examples:
        """These images where they enter: as pixels, or as kept outputs of the fixed part of the network."""
        return self.kept(pixels, entry) if entry else pixels

    def kept(self, pixels: ImageExamples, entry: int) -> CachedExamples:
        """Outputs of the network before `entry`, computed once for all runs on this machine."""
        return CachedExamples(pixels, self.network, entry, cache_dir() / "features", key=self.config.model.name)

    @cached_property
    def entry(self) -> int:
        """The last entry before anything that moves: what lies before it is the same for the whole run."""
        c, network = self.config, self.network
        body_finetuned = c.personal.finetune_epochs > 0 and c.personal.finetune_part != "head"
        if not c.data.cache_features or not self.transform.deterministic or body_finetuned or self.algorithm.wants:
            return 0
        return network.entry_for(self.space.first_block(network))

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
        cached = self.kept(self.plain_pixels, self.network.depth)
        return Workplace(self.network, select(self.network, lambda n: True), cached, self.deal.rows, self.config.seed)

    @cached_property
    def judge(self) -> Judge:
        """What the server knows of the space, and can compute for itself."""
        s, n = self.space, self.network
        partial = self.own or self.adaptive or (self.layout is not None and self.layout.mode == "alternate")
        return Judge(
            s.digest, self.place.sent, s.trained, n.width, n.classes, self.active if partial else None, self.align
        )

    def engine(self, place: Workplace | None = None) -> InProcess | Pool | Batched:
        """An engine for this run's clients: worker processes where the config asks for more than one."""
        if self.config.engine == "batched" and place is None:
            batched = Batched(self.algorithm, self.place)
            log.info("batched engine: %s", batched.reason or "all clients of a round in one product")
            return batched
        if self.config.workers == 1:
            return InProcess(self.algorithm, place or self.place)
        pool = Pool(self.algorithm, place or self.place, self.config.workers)
        self._pools.add(pool)
        return pool

    def close(self) -> None:
        """End the worker processes that are left."""
        for pool in list(self._pools):
            pool.close()


def warnings_for(config: Config, setup: Setup) -> list[str]:
    """Settings that work but do not mean what one may think."""
    found = []
    m, stats = per_round(config), setup.deal.partition.statistics()
    if m == 1 and config.partition.clients > 1:
        found.append("one client per round: every weighting rule is the same; raise rounds.fraction")
    missing = stats["uncovered"]
    if len(missing):
        found.append(f"{len(missing)} classes are held by nobody, so they cannot be learned: {list(missing)[:10]}")
    found += stats["notes"]
    if isinstance(setup.algorithm.combine, Mixture) and m < config.partition.clients:
        found.append("with partial participation only the cohort's models are mixed; the others wait")
    hides = config.protects.kind == "secure" or config.protects.privacy is not None
    if hides and config.model.head != "random":
        found.append("step 0 sums feature statistics in the clear, unprotected; model.head='random' avoids it")
    if hides and config.moves.kind == "masked" and config.moves.mask.strategy.endswith("sensitive"):
        found.append("the mask is calibrated from sensitivities summed in the clear, outside the protection")
    return found
