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

from fedgraft.algorithm import Answers, Aggregator, count_mean, vary
from fedgraft.client import ClientMemory, ClientContext
from fedgraft.aggregate.server_rules import plain_tail
from fedgraft.protocols import Examples
from fedgraft.data.examples import FeatureExamples, ImageExamples, examples_of
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.images.store import cache_dir
from fedgraft.data.images.transforms import STATISTICS, Transform
from fedgraft.edit.lora import attach
from fedgraft.edit.lora_aggregate import LoraLayout, aggregate_lora, lora_layout
from fedgraft.edit.masks import Mask
from fedgraft.edit.space import EditSpace, select
from fedgraft.engines.batched import Batched, applies
from fedgraft.engines.choice import Choice, Wanted, choose_engine, cores
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.pool import Pool, prepare_features
from fedgraft.errors import FedgraftError
from fedgraft.config.load import Config
from fedgraft.runs.editing import Adaptive, Calibrator, Opened, masked_space, open_masked, own_active, scope_of
from fedgraft.runs.parts import (
    FederatedData,
    build_algorithm,
    build_federation,
    build_network,
    check_blocks,
    federate,
    device_named,
    install,
    norm_ratio,
    open_space,
    per_round,
)
from fedgraft.runs.trackers import require
from fedgraft.messages import Order, Reply, pack_bits
from fedgraft.models.identity import digest
from fedgraft.observe import hidden
from fedgraft.randomness import torch_stream
from fedgraft.round import ServerContext
from fedgraft.secure_round import Sums
from fedgraft.server import EVERYONE, ServerState
from fedgraft.aggregate.similarity import svcca_basis, svcca_of_bases

log = logging.getLogger("fedgraft")


class Remote(Protocol):
    """An engine whose clients are on other machines, which must be told the edit space."""

    memory: dict[int, ClientMemory]
    sent: int
    received: int
    """Bytes of all messages so far, whatever for."""

    def open(self, run: str, tensors: Mapping[str, Tensor]) -> None: ...
    def exchange(self, orders: Sequence[Order]) -> Iterable[Reply | tuple[int, Reply | bytes | str]]: ...


class Setup:
    """Everything a run needs, built once. Parts that cost something are made when first used."""

    def __init__(self, config: Config, federated: FederatedData | None = None, remote: Remote | None = None) -> None:
        """`dealt` and `remote` are for a federation of machines: the data that is here, the engine to the others."""
        self.config, self.remote = config, remote
        self.algorithm = build_algorithm(config)
        self.federated = federate(config) if federated is None else federated
        self.network = build_network(config, self.federated.dataset).to(device_named(config.device))
        check_blocks(config, self.network)
        require(config.track.trackers)
        self.federation = build_federation(config, self.federated.largest)
        own = (self.network.mean, self.network.std)
        statistics: Any = STATISTICS.get(config.data.normalise, own)
        self.transform = Transform(self.network.image_size, config.data.augment, *statistics)
        self.train_images = examples_of(self.federated.dataset.train, self.transform)
        self.test_images = examples_of(self.federated.dataset.test, self.transform)
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
        kind = self.config.trainable.kind
        self.head_start = self.network.head.weight.detach().clone(), self.network.head.bias.detach().clone()
        stored: dict[str, Tensor] = {}
        if kind == "sparse":
            stored = self._open_mask(saved or {})
        elif kind == "lora":
            self._open_lora()
        else:
            self._space = open_space(self.config, self.network)
        if self.space.size > self.space.trained:  # the tail takes the plain mean, whatever the server rule
            self.algorithm = vary(self.algorithm, server=plain_tail(self.algorithm.server, self.space.trained))
        if self.config.trainable.match_norm is not None:
            self._match_norm(self.config.trainable.match_norm)
        self.close()  # workers of step 0 and of calibration hold the network as it was before
        return stored

    def _open_lora(self) -> None:
        c, first = self.config.trainable.lora, self.config.trainable.freeze_blocks
        attach(self.network, c.rank, c.alpha, c.targets, self.config.seed, c.dropout, first)
        head = [n for n, _ in self.network.named_parameters() if self.network.block_of(n) > self.network.depth]
        layout = lora_layout(self.network, c.aggregate, head if self.config.trainable.head_too else ())
        self.layout, self._space = layout, layout.space
        if not layout.needs_each_client:
            return

        def aggregate(answers: Answers, weights: Tensor) -> Tensor:
            assert answers.start is not None
            fresh = layout.fresh(self.config.seed, answers.round) if layout.mode == "stack" else None
            return aggregate_lora(layout, answers.start, answers.updates, weights.tolist(), fresh) - answers.start

        self.algorithm = vary(self.algorithm, aggregate=Aggregator(f"lora:{layout.mode}", aggregate, linear=False))

    def follow(self, head: Tensor, mask: Tensor | None) -> None:
        """Open the space that a server has opened, on a machine of its clients: from its head and its mask's bits."""
        install(self.network, head)
        if self.config.trainable.kind == "lora":
            self._open_lora()
        elif mask is None:
            self._space = open_space(self.config, self.network)
        else:
            scope = scope_of(self.config.trainable, self.network)
            names = (*scope.maskable, *scope.dense)
            shapes = {n: tuple(p.shape) for n, p in self.network.named_parameters() if n in names}
            self.mask = Mask.from_bits(mask, shapes)
            self._space = masked_space(self.network, self.mask)

    def opened(self) -> dict[str, Tensor]:
        """What another machine needs to `follow`, and the probe where it has no way to make it."""
        tensors = {"head": torch.cat([self.head_start[0], self.head_start[1][:, None]], 1)}
        if self.mask is not None:
            tensors["mask"] = self.mask.bits()
        if isinstance(self.probe, FeatureExamples) and not self.federated.rows_known:
            tensors |= {"probe/inputs": self.probe.features, "probe/labels": self.probe.labels}
        return tensors

    @cached_property
    def calibration(self) -> tuple[ClientContext, Calibrator]:
        """Where clients score weights for a mask, and what turns the scores into one."""
        context = ClientContext(
            self.network, select(self.network, lambda n: True), self.eval_images, self.federated.rows, self.config.seed
        )
        calibrator = Calibrator(self.config, self.network, self.sums(context), self.federated.total)
        context.choose_mask = lambda score: calibrator.calibrate(score).mask
        return context, calibrator

    def _open_mask(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        _, calibrator = self.calibration
        recipe = self.config.trainable.sparse
        names = (*calibrator.scope.maskable, *calibrator.scope.dense)
        shapes = {n: tuple(p.shape) for n, p in self.network.named_parameters() if n in names}
        if "mask" in saved:
            opened = Opened(Mask.from_bits(saved["mask"], shapes))
        else:
            identity = [digest(self.network), *self.federated.identity]
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
                self.algorithm = vary(self.algorithm, aggregate=count_mean())
        if recipe.adaptive_start is not None:
            scores = saved.get("scores", None)
            if scores is None:
                scores = calibrator.lasting(self.space)
            self.adaptive = Adaptive(recipe, scores, calibrator.scope)
            stored["scores"] = scores
        return stored

    def _match_norm(self, cap: float) -> None:
        """Raise the rate by the ratio of the dense gradient's norm to the active one's, on validation images."""
        rows = self.federated.validation_rows if len(self.federated.validation_rows) else self.federated.train_rows
        factor = min(cap, norm_ratio(self.network, self.space, self.eval_images, rows[:256]))
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
    def eval_images(self) -> ImageExamples | FeatureExamples:
        """Training images without augmentation."""
        return examples_of(self.federated.dataset.train, replace(self.transform, train=()))

    def at_entry(self, train_images: ImageExamples | FeatureExamples, entry: int) -> Examples:
        """These images where they enter: as pixels, or as outputs of the network before `entry`.

        Those are computed once for all runs on this machine. Given features are at their place already.
        """
        if not entry or isinstance(train_images, FeatureExamples) or not len(train_images):
            return train_images
        return CachedExamples(train_images, self.network, entry, cache_dir() / "features", key=self.config.model.name)

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
        return self.at_entry(self.train_images, self.entry)

    @cached_property
    def tests(self) -> Examples:
        """Test images, likewise."""
        return self.at_entry(self.test_images, self.entry)

    @cached_property
    def context(self) -> ClientContext:
        """The clients' workplace in this process."""
        private = start = None
        if self.algorithm.client_state.kind == "head":
            private = select(self.network, lambda name: self.network.block_of(name) > self.network.depth)
            start = private.gather(self.network)
        return ClientContext(
            self.network, self.space, self.examples, self.federated.rows, self.config.seed,
            self.tests, self.federated.test_rows, private, start, self.probe, sends_buffers=self.layout is None,
            held=lambda client: self.federated.validation_rows,
        )  # fmt: skip

    @cached_property
    def probe(self) -> Examples | None:
        """Validation images that every client has, row by row, where an algorithm compares representations."""
        if not any(wanted.name in {"alignment", "probe_representation"} for wanted in self.algorithm.wants):
            return None
        rows = self.federated.validation_rows
        if len(rows) < self.config.algorithm.probe:
            raise FedgraftError(
                f"the probe needs {self.config.algorithm.probe} validation images and there are {len(rows)}; raise "
                "data.validation or lower algorithm.probe"
            )
        picked = torch.randperm(len(rows), generator=torch_stream(self.config.seed, "probe"))[
            : self.config.algorithm.probe
        ]
        inputs = self.eval_images.batch(rows[picked])
        return FeatureExamples(inputs, self.eval_images.labels[rows[picked]], 0)

    def align(self, answers: Answers) -> Tensor:
        """Server-side alignment: SVCCA by layer of each submitted change, on a secret probe, another one each round."""
        a, rows = self.config.algorithm, self.federated.validation_rows
        stream = torch_stream(self.config.seed, "secret_probe", answers.round)
        picked = rows[torch.randperm(len(rows), generator=stream)[: a.probe]]
        probe = FeatureExamples(self.eval_images.batch(picked), self.eval_images.labels[picked], 0)
        assert answers.start is not None
        self.context.release()

        def bases(vector: Tensor) -> list[Tensor]:
            self.space.scatter(vector, self.network)
            return [svcca_basis(x, a.keep) for x in hidden(self.network, a.layers, probe)]

        before = bases(answers.start)
        scores = []
        for update in answers.updates:
            after = bases(answers.start + update)
            scores.append([svcca_of_bases(x, y, a.top).value for x, y in zip(after, before, strict=True)])
        return torch.tensor(scores, dtype=torch.float64)

    @cached_property
    def backbone_context(self) -> ClientContext:
        """The workplace of step 0: the untouched trunk's features, kept on disk and shared by all runs."""
        cached = self.at_entry(self.eval_images, self.network.depth)
        self.ready(cached, torch.cat([self.federated.train_rows, self.federated.validation_rows]))
        return ClientContext(
            self.network, select(self.network, lambda n: True), cached, self.federated.rows, self.config.seed,
            held=lambda client: self.federated.validation_rows,
        )  # fmt: skip

    @cached_property
    def server_context(self) -> ServerContext:
        """What the server knows of the space, and can compute for itself."""
        s, n = self.space, self.network
        partial = self.own or self.adaptive or (self.layout is not None and self.layout.mode == "alternate")
        return ServerContext(
            s.digest, self.context.sent, s.trained, n.width, n.classes, self.active if partial else None, self.align
        )

    def engine(self, context: ClientContext | None = None) -> InProcess | Pool | Batched | Remote:
        """An engine for this run's clients, or for preparations at another place; see `choose_engine`."""
        if self.remote is not None:
            if context is None:  # the space is open: tell the others
                self.remote.open(self.federation.run, self.opened())
            return self.remote
        where = context or self.context
        choice = self.choice(where, preparing=context is not None)
        if context is None:
            log.info("engine: %s, %s", "batched" if choice.mode == "batched" else "reference", choice.why)
        if choice.mode == "batched":
            return Batched(self.algorithm, where)
        if choice.mode == "in_process":
            return InProcess(self.algorithm, where)
        pool = Pool(self.algorithm, where, choice.workers, self.config.rounds.deadline)
        self._pools.add(pool)
        return pool

    def choice(self, context: ClientContext, preparing: bool = False) -> Choice:
        """How orders at this place are carried out. What prepares a run (step 0, a mask) is never batched."""
        c = self.config
        wanted: Wanted = "reference" if preparing or c.engine == "flower-sim" else c.engine
        obstacle = applies(self.algorithm, context) if wanted != "reference" else None
        on_cpu = self.network.head.weight.device.type == "cpu"
        return choose_engine(wanted, c.workers, obstacle, self._work(context, preparing), on_cpu, per_round(c))

    def _work(self, context: ClientContext, preparing: bool) -> float:
        """Multiply-adds of a round, at least: every image meets each weight behind its entry. 0: the head's alone."""
        entry, network, rule = context.examples.entry, self.network, self.algorithm.local
        if entry == network.depth:
            return 0.0
        if preparing:  # every client is asked, about as many images as it likes
            return math.inf
        met = sum(p.numel() for name, p in network.named_parameters() if network.block_of(name) >= entry)
        images = rule.batch_size * rule.steps(max(1, self.federated.total // self.federation.clients))
        return float(met * images * per_round(self.config))

    def sums(self, context: ClientContext) -> Sums:
        """What asks this run's clients for sums before the first round, hidden where the run hides them."""
        f = self.federation
        return Sums(self.engine(context).exchange, f.run, range(f.clients), self.network, self.algorithm.privacy)

    def close(self) -> None:
        """End the worker processes that are left."""
        for pool in list(self._pools):
            pool.close()
