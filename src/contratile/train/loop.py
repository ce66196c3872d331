"""The training loop.

    outcome = Trainer(TrainConfig()).run()

A step takes a global batch, runs it through the encoders chunk by chunk (`GradCache`), computes the loss over all
processes (the loss's ring), clips the gradient, updates the weights and clamps the scale. One process or many run the
same code. A checkpoint holds everything that the next step depends on, so a killed run resumes as if it had not been
interrupted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from contratile.data.catalog import open_source
from contratile.data.chunk_maker import negatives_side
from contratile.data.loader import Batch, Loader
from contratile.data.sample import Indexed, Stream, traits_of
from contratile.errors import bad_value
from contratile.grad_cache import GradCache
from contratile.losses.normalized import warn_not_normalized
from contratile.models.encoding import SourceFeatures, encode, to_device
from contratile.models.locked import rows_of
from contratile.models.towers import Towers, check_recipe, recipe_checksums
from contratile.report.loss_memory import dense_loss_bytes, tiled_loss_bytes
from contratile.report.metric_text import side_names
from contratile.report.trackers import check_trackers
from contratile.report.tracking import Tracker
from contratile.train import checkpoint
from contratile.train.chunk import choose_chunk
from contratile.train.claim import Claim
from contratile.train.config import CONFIG, TrainConfig, load_config, save_config, to_dict
from contratile.train.divergence import diverged, finite, set_aside_diverged
from contratile.train.encoders import SIDES, locked_outputs, shared_towers, step_encoders
from contratile.train.evaluate import neighbors, not_finite, retrieval
from contratile.train.launch import gather_objects, join
from contratile.train.objective import batch_loss, pair_facts
from contratile.train.optim import clamp_scale, load_optimizer, make_optimizer, resolved
from contratile.train.paths import absolute_paths
from contratile.train.random_state import random_state, set_random_state
from contratile.train.results import is_finished
from contratile.train.resume import check_options, claim_and_find_checkpoint, run_of
from contratile.train.schedule import in_steps, learning_rate
from contratile.train.setup import (
    check_augmentation,
    check_kept_outputs,
    check_kinds,
    check_sharding,
    check_texts,
    fit_batch,
    gallery_has_training,
    negatives_of,
    steps_of,
)
from contratile.train.sharding import load_model, requested_by_accelerate, sharded_like, whole, without_foreach
from contratile.train.stopping import signals
from contratile.train.zero_shot_data import ZeroShot, open_zero_shot

BEST = "text_to_image_R@10"
"""The metric whose best checkpoint is kept."""


class Outcome(NamedTuple):
    """How a run ended."""

    step: int
    """Steps done."""

    finished: bool
    """False if a signal stopped the run; it has saved a checkpoint."""

    metrics: dict[str, float]
    """Held-out metrics at the end; empty if the run had been finished before."""

    held_out: SourceFeatures | None
    """Features of the held-out data at the end, on the main process of a run that was finished now."""

    training: SourceFeatures | None = None
    """Features of the training data, if the gallery holds them too."""


class Trainer:
    """A training run: data, encoders, loss, optimiser, and how far it has come.

    Creating it joins the processes, opens the data, builds the encoders and restores the newest checkpoint in
    `config.run.out`, if there is one. `run` trains.

    Args:
        config: The options of the run.
        notify: Called with a status text while the run is prepared.
        say: Called with messages that should stay on the screen.

    Raises:
        ValueError: The options do not fit the data, the machine or the checkpoint; the message names the option.

    Examples:
        >>> trainer = Trainer(TrainConfig(run=RunConfig(out=Path("runs/icons"), steps=100)))    # doctest: +SKIP
        >>> outcome = trainer.run()                                                            # doctest: +SKIP
        >>> if outcome.held_out is not None: write_results(trainer, outcome)                   # doctest: +SKIP
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

    resumed: Path | None
    """The checkpoint that the run resumes from."""

    towers: Towers
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
        self.notices = []
        self.step, self.best, self.best_step, self.evaluated = 0, -math.inf, 0, -1
        self._join_processes()
        self._open_data()
        self._claim_folder()
        self._build_towers()
        self._choose_chunk(notify)
        self._make_loader()
        self._compute_locked_outputs(notify, say)
        self._make_cache()
        self._make_optimizer()
        if self.resumed is not None:
            self._restore(self.resumed)
        if self.main:
            save_config(self.config, self.config.run.out)

    # --- the steps of preparing a run -----------------------------------------------------------------------------

    def _join_processes(self) -> None:
        from accelerate.utils import set_seed

        run = self.config.run
        sharding = run.fsdp or requested_by_accelerate()
        self.accelerator = join(run)
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
        if self.config.loss.ids == "auto" and self.config.loss.loss not in ("siglip", "ntxent"):
            ids: Literal["left", "right"] = "left" if traits_of(self.source).several_texts else "right"
            self.config = replace(self.config, loss=replace(self.config.loss, ids=ids))
        self.config = fit_batch(self.config, self.source, self.accelerator.num_processes)
        batch = self.config.run.batch
        if batch != asked:
            pairs = data.samples_per_epoch or len(self.source)  # type: ignore[arg-type]  # nothing else limits it
            self.notices.append(f"batch {asked:,} is larger than the {pairs:,} pairs of an epoch: using {batch:,}")

    def _claim_folder(self) -> None:
        self.resumed, self.claim = claim_and_find_checkpoint(self.config.run, self.main)

    def _build_towers(self) -> None:
        wait, resumed = self.accelerator.wait_for_everyone, run_of(self.resumed) if self.resumed else None
        self.towers = shared_towers(self.config, self.source, main=self.main, wait=wait, resumed=resumed)
        if self.zero_shot is not None:
            check_kinds(self.zero_shot.source, self.towers.kinds)
        self.towers.to(self.accelerator.device).train()

    def _choose_chunk(self, notify: Callable[[str], object]) -> None:
        self.chunk, notice = choose_chunk(
            self.config, self.towers, self.source, self.accelerator, resumed=self.resumed, notify=notify
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
        )
        self.steps = run.steps or steps_of(run.epochs, self.loader.steps_per_epoch)
        optim = in_steps(self.config.optim, self.loader.steps_per_epoch, self.steps)
        self.config = replace(self.config, optim=optim)
        self.searches_training = gallery_has_training(self.config, self.source, self.held_out, self.steps)

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
        side = negatives_side(self.source)
        # Ids and masks are a third input that passes through, so that they reach the loss with the features.
        self.cache = GradCache(
            (*encoders, nn.Identity(), *([encoders[side]] if self.negatives else [])),
            partial(batch_loss, self.config.loss, swapped=bool(self.negatives) and side == 0),
            chunk_size=self.chunk,
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
        check_options(facts["config"], self.config)
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

    # --- training -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train to the last step, or until SIGTERM or Ctrl-C, after which a checkpoint is saved.

        A run that has all its steps is only evaluated, and not even that if its results are already written.

        Returns:
            How the run ended, with metrics and features for `write_results`.

        Raises:
            FloatingPointError: Loss, gradient or weights became NaN or infinite.
        """
        if self.step >= self.steps:
            done = self._any_process(self.main and is_finished(self.config.run.out, self.step))
            if done:
                return Outcome(self.step, True, {}, None)
            metrics, held_out = self.evaluate()
            return self._outcome(metrics | self.evaluate_zero_shot(), held_out)
        run, saved = self.config.run, self.step
        evaluate_at, save_at = (every or max(1, self.steps // 10) for every in (run.eval_every, run.save_every))
        zero_shot_at = self.config.eval.zero_shot_every or evaluate_at
        metrics = {}
        held_out = None
        # The loader closes last: a stuck worker must not prevent the final checkpoint.
        with (
            signals() as received,
            closing(iter(self.loader)) as batches,
            self._tracker() as tracker,
        ):
            if self.step == 0:
                # The starting point.
                tracker.evaluation(0, self.evaluate()[0] | self.evaluate_zero_shot(), self.sides)
            while self.step < self.steps and not self._any_process(bool(received)):
                batch = next(batches)
                began = time.perf_counter()
                facts = self.train_step(batch)
                self.step += 1
                facts["seconds"] = time.perf_counter() - began
                tracker.step(self.step, facts, broken=self.loader.broken)
                last, better = self.step == self.steps, False
                found: dict[str, float] = {}
                if self.step % evaluate_at == 0 or last:
                    found, held_out = self.evaluate()
                if self.step % zero_shot_at == 0 or last:
                    found |= self.evaluate_zero_shot()
                if found:
                    tracker.evaluation(self.step, found, self.sides)
                if BEST in found:
                    metrics = found
                    better = metrics[BEST] >= self.best  # the latest of equal ones; NaN is never better
                    if better:
                        self.best, self.best_step = metrics[BEST], self.step
                if self.step % save_at == 0 or last or better:
                    tracker.flush()
                    self.save()
                    saved = self.step
            if saved < self.step:
                tracker.flush()
                self.save()
        if self.step < self.steps:
            return Outcome(self.step, False, metrics, held_out)
        return self._outcome(metrics, held_out)

    def _tracker(self) -> Tracker:
        run, loss, processes = self.config.run, self.config.loss, self.accelerator.num_processes
        negatives = self.negatives if loss.hard_negatives == "all" else 0
        dense = dense_loss_bytes(run.batch, views=loss.rows_per_pair, negatives=negatives)
        tiled = tiled_loss_bytes(
            run.batch,
            self.towers.left.width,
            processes=processes,
            views=loss.rows_per_pair,
            negatives=negatives,
            cache_bytes=loss.cache_mib << 20,
        )
        return Tracker(
            run.out,
            steps=self.steps,
            step=self.step,
            log_every=run.log_every,
            tensorboard=run.tensorboard,
            track=run.track,
            config=to_dict(self.config),
            main=self.main,
            on_gpu=torch.cuda.is_available() and not run.cpu,
            loss_memory=dense if loss.backend == "dense" else tiled,
            dense_memory=dense,
        )

    def _outcome(self, metrics: dict[str, float], held_out: SourceFeatures | None) -> Outcome:
        """The end of a finished run. Sharded towers need all processes to encode."""
        training = None
        if self.searches_training and (self.main or self.sharded):
            found = self._encode(self.source, self.kept)
            training = found if self.main else None
        return Outcome(self.step, True, metrics, held_out, training)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Train on one global batch.

        Args:
            batch: This process's share of it, from the loader.

        Returns:
            Loss, learning rate, scale, gradient norm, batch statistics, epoch and number of pairs.

        Raises:
            FloatingPointError: The loss or the gradient is NaN or infinite.
        """
        optim, towers = self.config.optim, self.towers
        rate = learning_rate(optim, self.step, self.steps)
        for group, factor in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad()
        learned = {"scale": towers.log_scale.exp()}
        if towers.bias is not None:
            learned["bias"] = towers.bias * 1
        with self.accelerator.autocast():
            loss, stats, norms = self.cache(self._inputs(batch), **learned)
        self.accelerator.backward(loss)
        loss = self.accelerator.reduce(loss.detach(), "mean")
        if not torch.isfinite(loss):
            # Weights that an evaluation found sound are good: then it is this batch alone.
            if self.main and self.evaluated != self.step:
                set_aside_diverged(self.config.run.out, self.step)
            self.accelerator.wait_for_everyone()
            raise self._diverged(f"the loss of step {self.step + 1} is {float(loss)}")
        if self.step == 0 and norms is not None:  # the loss was just read from the device: no further wait
            warn_not_normalized(self.config.loss.loss, norms.tolist(), scale_of(towers))
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = self.accelerator.clip_grad_norm_(trained, optim.clip_grad or math.inf)
        # With fp16, accelerate skips such a step and lowers its gradient scale.
        if self.config.run.precision != "fp16" and not math.isfinite(float(norm)):
            raise self._diverged(f"the norm of the gradient of step {self.step + 1} is {float(norm)}")
        self.optimizer.step()
        clamp_scale(towers.log_scale, self.config.loss.max_scale)
        facts = {"loss": float(loss), "lr": rate, "scale": scale_of(towers), "grad_norm": float(norm)}
        if stats is not None:
            facts |= {"top1": float(stats.row_top1), "mean_rank": float(stats.row_rank)}
        per_epoch = self.loader.steps_per_epoch
        epoch = self.step // per_epoch if per_epoch else batch.epoch
        return {"epoch": epoch, **facts, "pairs": self.config.run.batch}

    def _inputs(self, batch: Batch) -> Iterator[tuple[Any, ...]]:
        """The encoder inputs and facts of each chunk. A locked side has the kept outputs of its backbone."""
        device, ids = self.accelerator.device, self.config.loss.ids
        count = 0
        for count, chunk in enumerate(batch.chunks, 1):  # noqa: B007  # it is read after the loop
            left, right = (
                rows_of(self.kept[side], chunk.index, side, self.config.run.out)
                if side in self.kept
                else getattr(chunk, side)
                for side in SIDES
            )
            hard = () if chunk.negatives is None else (one_argument(to_device(chunk.negatives.inputs, device)),)
            yield *(one_argument(to_device(x, device)) for x in (left, right)), pair_facts(chunk, ids), *hard
        share = self.config.run.batch // self.accelerator.num_processes
        if count == 0 or (self.sharded and count < -(-share // self.chunk)):
            what = "chunk" if count else "share of a process"
            reasons = ", ".join(self.loader.broken)
            remedy = f"Repair the data ({reasons}), or raise --{'chunk' if count else 'batch'}."
            bad_value(f"step {self.step + 1}", expected=f"a readable sample in every {what}", got="none", remedy=remedy)

    def evaluate(self) -> tuple[dict[str, float], SourceFeatures | None]:
        """Evaluate retrieval on the held-out data.

        The main process does it and tells the others. Sharded towers need all processes to encode.

        Returns:
            The metrics, and on the main process the features.

        Raises:
            FloatingPointError: Features are NaN or infinite.
        """
        from accelerate.utils import broadcast_object_list

        found = self._encode(self.held_out) if self.main or self.sharded else None
        told: list[tuple[str, dict[str, float]]] = [("", {})]
        if self.main and found is not None:
            wrong = not_finite(found, self.towers.kinds)
            skipped: dict[str, float] = {"skipped": found.broken} if found.broken else {}
            near = neighbors(found) if self.config.augment.views == 2 and not wrong else {}
            told = [(wrong, {} if wrong else retrieval(found) | near | skipped)]
        wrong, metrics = broadcast_object_list(told)[0]
        if wrong:
            raise self._diverged(f"evaluation after step {self.step} found {wrong}")
        self.evaluated = self.step
        return metrics, found if self.main else None

    def evaluate_zero_shot(self) -> dict[str, float]:
        """Classify the zero-shot data of the run.

        The main process does it and tells the others. Sharded towers need all processes to encode.

        Returns:
            `zero_shot_top1` and so on, on all processes; empty if the run has no such data.

        Raises:
            ValueError: The data cannot be read.
            FloatingPointError: Features are NaN or infinite.
        """
        from accelerate.utils import broadcast_object_list

        if self.zero_shot is None:
            return {}
        told: list[tuple[Exception | None, dict[str, float]]] = [(None, {})]
        if self.main or self.sharded:
            chunk, limit = self.chunk, self.config.data.broken_limit
            try:
                with self.accelerator.autocast():
                    told = [(None, self.zero_shot.evaluate(self.towers, chunk=chunk, broken_limit=limit))]
            except (ValueError, OSError, FloatingPointError) as error:
                told = [(error, {})]  # raised on all processes, so that none waits for this one
        refusal, metrics = broadcast_object_list(told)[0]
        if isinstance(refusal, FloatingPointError):
            raise self._diverged(f"zero-shot evaluation after step {self.step} found {refusal}")
        if refusal is not None:
            raise refusal
        return dict(metrics)

    def _encode(self, source: Indexed | Stream, kept: dict[str, Tensor] | None = None) -> SourceFeatures:
        options: dict[str, Any] = {"broken_limit": self.config.data.broken_limit, "kept": kept or {}}
        if self.config.augment.views == 2:
            options["augment"] = self.config.augment
        with self.accelerator.autocast():
            return encode(self.towers, source, chunk=self.chunk, **options)

    def save(self) -> None:
        """Save a checkpoint: everything that the next step depends on. All processes call it; the main one writes.

        Raises:
            FloatingPointError: Weights are NaN or infinite. Nothing is saved then.
        """
        if self._any_process(not all(finite(p) for p in self.towers.parameters())):  # other ranks have other shards
            raise self._diverged(f"step {self.step} has left weights that are not finite")
        random, positions = (gather_objects(x) for x in (random_state(), self.loader.state_dict()))
        state = {"model": whole(self.towers.state_dict()), "optimizer": whole(self.optimizer.state_dict())}
        if self.main:
            run, known = self.config.run, not math.isinf(self.best)
            facts = {
                "step": self.step,
                "best": self.best if known else None,
                "best_step": self.best_step if known else None,
                "loader": positions,
                "config": to_dict(self.config),
                "recipe": recipe_checksums(run.out),
            }
            checkpoint.save(
                run.out / "checkpoints" / checkpoint.step_name(self.step), {**state, "random": random}, facts
            )
            checkpoint.keep(run.out, last=run.keep)
        self.accelerator.wait_for_everyone()

    def _any_process(self, flag: bool) -> bool:
        """Whether the flag is set on any process: all must leave the loop at the same step."""
        if self.accelerator.num_processes == 1:
            return flag
        total = torch.tensor(float(flag), device=self.accelerator.device)
        return bool(self.accelerator.reduce(total, "sum") > 0)

    def _diverged(self, what: str) -> FloatingPointError:
        lr, resumed = self.optimizer.param_groups[0]["lr"], self.resumed is not None
        return diverged(what, self.towers, self.config.run.out, step=self.step, lr=lr, resumed=resumed)


def scale_of(towers: Towers) -> float:
    """The learned scale as a number."""
    return towers.log_scale.detach().exp().item()


def one_argument(inputs: Any) -> Any:
    """Wrap a dictionary of tokens: it is one argument of a tower, not its keywords."""
    return (inputs,) if isinstance(inputs, dict) else inputs
