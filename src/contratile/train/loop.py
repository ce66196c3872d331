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
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.data.loader import Batch
from contratile.data.sample import Indexed, Stream
from contratile.losses.normalized import warn_not_normalized
from contratile.models.encoding import SourceFeatures, encode
from contratile.models.towers import Towers, recipe_checksums
from contratile.planner.loss_memory import dense_loss_bytes, tiled_loss_bytes
from contratile.report.tracking import METRICS, Tracker, history, rewind
from contratile.train import checkpoint
from contratile.train.batch_inputs import batch_inputs
from contratile.train.config_file import to_dict
from contratile.train.divergence import diverged, finite, set_aside_diverged
from contratile.train.evaluate import neighbors, not_finite, retrieval
from contratile.train.launch import gather_objects
from contratile.train.optim import clamp_scale
from contratile.train.preparation import PreparedRun
from contratile.train.random_state import random_state
from contratile.train.results import is_finished
from contratile.train.schedule import learning_rate
from contratile.train.second_model import warn_of_much
from contratile.train.sharding import whole
from contratile.train.stopping import signals

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


class Trainer(PreparedRun):
    """A training run: data, encoders, loss, optimiser, and how far it has come.

    Creating it prepares the run (`PreparedRun`) and restores the newest checkpoint in `config.run.out`, if there is
    one. `run` trains.

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
            return self._closing_evaluation()
        run, saved = self.config.run, self.step
        evaluate_at, save_at = (every or max(1, self.steps // 10) for every in (run.eval_every, run.save_every))
        zero_shot_at = self.config.eval.zero_shot_every or evaluate_at
        metrics = {}
        held_out = None
        # The loader closes last: a stuck worker must not prevent the final checkpoint.
        with (
            signals(tell=self.main) as received,
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
                    better = self._note_best(metrics)
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

    def _closing_evaluation(self) -> Outcome:
        """Evaluate a run that has all its steps. It may have stopped where no evaluation was due."""
        metrics, held_out = self.evaluate()
        metrics |= self.evaluate_zero_shot()
        out = self.config.run.out
        if self.main:
            rewind(out / METRICS, self.step)  # a longer run may have left lines of steps without checkpoints
        if self.main and not any(entry["step"] == self.step and BEST in entry for entry in history(out)):
            with self._tracker() as tracker:
                tracker.evaluation(self.step, metrics, self.sides)
                tracker.flush()
        if self.best_step != self.step and self._note_best(metrics):
            self.save()
        return self._outcome(metrics, held_out)

    def _note_best(self, metrics: dict[str, float]) -> bool:
        """Record whether these weights are the best so far; among equal ones the latest. NaN is never better."""
        better = metrics[BEST] >= self.best
        if better:
            self.best, self.best_step = metrics[BEST], self.step
        return better

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
            second=0 if self.second is None else self.second.towers.left.width,
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
            loss, stats, norms, terms, dropped = self.cache(batch_inputs(self, batch), **learned)
        self.accelerator.backward(loss)
        distill = [] if terms is None else [terms.distill]
        loss, *distill = self.accelerator.reduce(torch.stack([loss.detach(), *distill]), "mean")
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
        if distill:
            facts["distill"] = float(distill[0])
        if dropped is not None:
            facts["guide_drops"] = float(dropped)
            if self.step == 0:
                warn_of_much(facts["guide_drops"])
        if stats is not None:
            facts |= {"top1": float(stats.row_top1), "mean_rank": float(stats.row_rank)}
        padding = self.cache.padding
        if padding.given:  # of this process: the others have other rows of the same data
            facts |= {"tokens": padding.encoded, "padding_saved": padding.saved}
        per_epoch = self.loader.steps_per_epoch
        epoch = self.step // per_epoch if per_epoch else batch.epoch
        return {"epoch": epoch, **facts, "pairs": self.config.run.batch}

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
                **({} if self.second is None else {"second": self.second.facts}),
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
