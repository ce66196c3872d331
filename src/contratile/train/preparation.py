"""A prepared training run: processes joined, data opened, encoders built, newest checkpoint restored.

`PreparedRun.__init__` is the list of steps. What it leaves are attributes that the training loop uses (`loop.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from contratile.data.catalog import open_source
from contratile.data.chunk_maker import negatives_side
from contratile.data.loader import Loader
from contratile.data.sample import Indexed, Stream, traits_of
from contratile.engine.backends.registry import check as check_backend
from contratile.grad_cache import GradCache
from contratile.grad_cache.lengths import ByLength
from contratile.models.towers import RECIPE_FILES, Towers, check_recipe
from contratile.report.metric_text import side_names
from contratile.report.trackers import check_trackers
from contratile.train import checkpoint
from contratile.train.chunk import choose_chunk
from contratile.train.claim import Claim, remove_unused
from contratile.train.config import TrainConfig
from contratile.train.config_file import CONFIG, load_config, save_config
from contratile.train.effects import check_effects, check_ids_compared
from contratile.train.encoders import locked_outputs, shared_towers, step_encoders
from contratile.train.launch import join
from contratile.train.memory_check import check_memory
from contratile.train.objective import step_loss
from contratile.train.optim import load_optimizer, make_optimizer, resolved
from contratile.train.paths import absolute_paths
from contratile.train.random_state import set_random_state
from contratile.train.resume import changed_loss, check_resumable, claim_and_find_checkpoint, run_of
from contratile.train.schedule import in_steps
from contratile.train.second_model import SecondModel, check_there, load_second
from contratile.train.setup import (
    check_augmentation,
    check_kept_outputs,
    check_kinds,
    check_prefixes,
    check_sharding,
    check_texts,
    fit_batch,
    gallery_has_training,
    negatives_of,
    steps_of,
)
from contratile.train.sharding import load_model, requested_by_accelerate, sharded_like, without_foreach
from contratile.train.zero_shot_data import ZeroShot, open_zero_shot

SORTED_CHUNKS = 256
"""Chunks of a batch whose texts are sorted together. More would save no more padding, and all their tokens are held in
memory twice for a moment."""


class PreparedRun:
    """Everything that a training run needs before its next step.

    Creating it joins the processes, opens the data, builds the encoders and restores the newest checkpoint in
    `config.run.out`, if there is one.

    Args:
        config: The options of the run.
        notify: Called with a status text while the run is prepared.
        say: Called with messages that should stay on the screen.

    Raises:
        ValueError: The options do not fit the data, the machine or the checkpoint; the message names the option.
    """

    config: TrainConfig
    """The options, with absolute paths and with everything filled in that was left open."""

    notices: list[str]
    """What the user should know before the first step."""

    accelerator: Any
    main: bool
    """Whether this is the main process, which evaluates and writes."""

    sharded: bool
    """Whether weights are sharded over the processes (FSDP)."""

    source: Indexed | Stream
    held_out: Indexed | Stream
    zero_shot: ZeroShot | None
    """What to classify during training, if anything."""

    sides: tuple[str, str]
    """Names of the left and the right side of a pair."""

    negatives: int
    """Hard negatives of each pair."""

    chunk: int
    """Pairs that go through the encoders at a time."""

    loader: Loader
    claim: Claim | None
    """Keeps other runs out of the folder as long as it lives."""

    created: list[Path]
    """The folders that were created for the run, by the main process."""

    resumed: Path | None
    """The checkpoint that the run resumes from."""

    towers: Towers
    second: SecondModel | None
    """The guide or the teacher, if there is one."""

    kept: dict[str, Tensor]
    """Outputs of locked backbones for all training samples, by side."""

    cache: GradCache
    optimizer: Any
    rates: list[float]
    """Factor on the learning rate for each parameter group."""

    steps: int
    """Steps of the whole run."""

    searches_training: bool
    """Whether the gallery will hold the training pairs too."""

    step: int
    """Steps done."""

    best: float
    best_step: int
    """The best metric so far, and its step."""

    evaluated: int
    """The step of the last evaluation."""

    def __init__(
        self,
        config: TrainConfig,
        notify: Callable[[str], object] = lambda text: None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        check_trackers(config.run.track)
        self.config = absolute_paths(config)
        check_there(self.config)
        if not (self.config.run.out / CONFIG).exists():  # runs of earlier versions may have had any options
            check_effects(self.config)
        self.notices = []
        self.step, self.best, self.best_step, self.evaluated = 0, -math.inf, 0, -1
        self._join_processes()
        self._open_data()
        self._claim_folder()
        try:
            self._build_towers()
            self._load_second(notify)
            self._choose_chunk(notify)
            self._make_loader()
            self._check_memory(notify)
            self._compute_locked_outputs(notify, say)
            self._make_cache()
            self._make_optimizer()
            if self.resumed is not None:
                self._restore(self.resumed)
            if self.main:
                save_config(self.config, self.config.run.out)
        except BaseException:  # refused, or interrupted: as if the command had not been given
            remove_unused(self.claim, self.created, RECIPE_FILES)
            raise

    def _join_processes(self) -> None:
        from accelerate.utils import set_seed

        run = self.config.run
        sharding = run.fsdp or requested_by_accelerate()
        self.accelerator = join(run)
        check_backend(self.config.loss.backend, self.accelerator.device, self.accelerator.num_processes)
        self.sharded = sharding and self.accelerator.num_processes > 1
        if self.sharded:
            check_sharding(self.config, self.accelerator.num_processes)
            if run.queries:
                self.notices.append("queries are not searched with --fsdp: use `contratile search` afterwards")
        self.main = bool(self.accelerator.is_main_process)
        set_seed(run.seed)

    def _open_data(self) -> None:
        asked, data = self.config.run.batch, self.config.data
        self.source, self.held_out = open_source(data, "train"), open_source(data, "test")
        self.zero_shot = open_zero_shot(self.config)
        self.sides = side_names(self.held_out, views=self.config.augment.views == 2)
        check_texts(self.source, self.config)
        check_augmentation(self.source, self.config)
        check_kept_outputs(self.config, self.source)
        self.negatives = negatives_of(self.config, self.source)
        loss = self.config.loss
        if loss.loss not in ("siglip", "ntxent"):
            ids: Literal["left", "right"] = "left" if traits_of(self.source).several_texts else "right"
            check_ids_compared(loss, ids)
            if loss.ids == "auto":
                self.config = replace(self.config, loss=replace(loss, ids=ids))
        self.config = fit_batch(self.config, self.source, self.accelerator.num_processes)
        batch = self.config.run.batch
        if batch != asked:
            pairs = data.samples_per_epoch or len(self.source)  # type: ignore[arg-type]  # nothing else limits it
            self.notices.append(f"batch {asked:,} is larger than the {pairs:,} pairs of an epoch: using {batch:,}")

    def _claim_folder(self) -> None:
        self.resumed, self.claim, self.created = claim_and_find_checkpoint(self.config.run, self.main)

    def _build_towers(self) -> None:
        wait, resumed = self.accelerator.wait_for_everyone, run_of(self.resumed) if self.resumed else None
        self.towers = shared_towers(self.config, self.source, main=self.main, wait=wait, resumed=resumed)
        check_prefixes(self.config, self.towers.left.width)
        if self.zero_shot is not None:
            check_kinds(self.zero_shot.source, self.towers.kinds)
        self.towers.to(self.accelerator.device).train()

    def _load_second(self, notify: Callable[[str], object]) -> None:
        named = self.config.loss.second
        self.second = None
        if named is None:
            return
        notify(f"loading the {named.role}")
        for main_first in (True, False):  # a model of the hub is downloaded once
            if self.main == main_first:
                self.second = load_second(self.config)
            self.accelerator.wait_for_everyone()
        assert self.second is not None
        self.second.check_kinds(self.source)
        self.second.towers.to(self.accelerator.device)

    def _choose_chunk(self, notify: Callable[[str], object]) -> None:
        self.chunk, notice = choose_chunk(
            self.config,
            self.towers,
            self.source,
            self.accelerator,
            second=self.second and self.second.towers,
            resumed=self.resumed,
            notify=notify,
        )
        self.notices += [notice] if notice else []
        self.config = replace(self.config, run=replace(self.config.run, chunk=self.chunk))

    def _make_loader(self) -> None:
        run, data = self.config.run, self.config.data
        self.loader = Loader(
            self.source,
            (self.towers.left.prepare, self.towers.right.prepare),
            batch=run.batch,
            chunk=self.chunk,
            seed=run.seed,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            workers=data.workers,
            broken_limit=data.broken_limit,
            augment=self.config.augment,
            negatives=self.negatives,
            samples_per_epoch=data.samples_per_epoch,
            second=self.second and self.second.prepare,
        )
        self.steps = run.steps or steps_of(run.epochs, self.loader.steps_per_epoch)
        optim = in_steps(self.config.optim, self.loader.steps_per_epoch, self.steps)
        self.config = replace(self.config, optim=optim)
        self.searches_training = gallery_has_training(self.config, self.source, self.held_out, self.steps)

    def _check_memory(self, notify: Callable[[str], object]) -> None:
        notice = check_memory(
            self.config,
            self.towers,
            self.source,
            self.accelerator,
            second=self.second and self.second.towers,
            negatives=self.negatives,
            notify=notify,
        )
        self.notices += [notice] if notice else []

    def _compute_locked_outputs(self, notify: Callable[[str], object], say: Callable[[str], object]) -> None:
        wait = self.accelerator.wait_for_everyone
        self.kept = locked_outputs(
            self.config,
            self.towers,
            self.source,
            chunk=self.chunk,
            main=self.main,
            wait=wait,
            notify=notify,
            say=say,
        )
        locked = any(tower.locked for tower in (self.towers.left, self.towers.right))
        if locked and not self.kept and self.config.towers.keep_outputs and isinstance(self.source, Indexed):
            self.notices.append(
                "texts or hard negatives change with the epoch: locked towers are encoded in every step"
            )

    def _make_cache(self) -> None:
        run, compiled = self.config.run, self.config.towers.compile
        encoders = step_encoders(self.towers, self.kept, self.accelerator, sharded=self.sharded, compiled=compiled)
        side, hard = negatives_side(self.source), bool(self.negatives)
        # Ids and masks are a third input that passes through, so that they reach the loss with the features. Nothing of
        # a second model is trained, so that it encodes each chunk once, without gradients.
        frozen = () if self.second is None else (self.second.towers.left, self.second.towers.right)
        extra = [encoders[side]] if hard else []
        self.cache = GradCache(
            (*encoders, nn.Identity(), *extra, *frozen, *([frozen[side]] if hard and frozen else [])),
            partial(
                step_loss,
                self.config.loss,
                hard=hard,
                second_scale=1.0 if self.second is None else self.second.scale,
                swapped=hard and side == 0,
            ),
            chunk_size=self.chunk,
            lengths="off" if run.lengths == "off" else ByLength(window=SORTED_CHUNKS),
            offload=run.offload,
        )

    def _make_optimizer(self) -> None:
        before = run_of(self.resumed) / CONFIG if self.resumed else None
        saved = load_config(before).optim if before is not None and before.exists() else None
        self.config = replace(self.config, optim=resolved(self.config.optim, self.towers, saved))
        optimizer = make_optimizer(self.towers, self.config.optim)
        self.rates = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        self.optimizer = self.accelerator.prepare_optimizer(without_foreach(optimizer) if self.sharded else optimizer)

    def _restore(self, folder: Path) -> None:
        state, facts = checkpoint.load(folder)
        check_recipe(facts, run_of(folder))
        changed = "" if self.second is None else self.second.changed(facts)
        self.notices += [changed] if changed else []
        check_resumable(facts["config"], self.config)
        other = changed_loss(facts["config"], self.config)
        self.notices += [other] if other else []
        load_model(self.towers, state["model"])
        load_optimizer(self.optimizer, sharded_like(state["optimizer"], self.optimizer))
        self.loader.load_state_dict(facts["loader"])
        self.step = facts["step"]
        out = self.config.run.out
        # A run that starts from a checkpoint of another one tracks its own best checkpoint.
        best = checkpoint.best(out) if run_of(folder).resolve() == out.resolve() else None
        if best is not None and facts["best"] is not None and math.isfinite(facts["best"]):
            self.best, self.best_step = facts["best"], checkpoint.step_of(best) or 0
        if self.main:
            checkpoint.keep(out, last=self.config.run.keep)  # the run may have been killed before it got here
        rank = self.accelerator.process_index
        if rank < len(state["random"]):
            set_random_state(state["random"][rank])
