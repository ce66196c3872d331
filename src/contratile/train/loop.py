"""The training loop.

    outcome = Trainer(TrainConfig()).run()

A step reads: take a global batch, run it through the encoders chunk by chunk (`GradCache`), over the ranks (the loss's
ring), clip, step, clamp the scale. One process or many run the same loop. Everything that decides the next step is in
the checkpoint, so a run that was killed goes on as if it had not been.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from contratile.data.catalog import open_source
from contratile.data.loader import Batch, Loader
from contratile.data.sample import Indexed, Source
from contratile.errors import bad_value
from contratile.grad_cache import GradCache
from contratile.losses.normalized import warn_not_normalized
from contratile.models.locked import kept_outputs, rows_of
from contratile.models.towers import (
    LockedTowerHead,
    Tower,
    Towers,
    build_towers,
    check_recipe,
    recipe_checksums,
    save_recipe,
)
from contratile.report.tracking import Tracker
from contratile.report.wording import side_names
from contratile.train import checkpoint
from contratile.train.claim import claim
from contratile.train.config import CONFIG, TrainConfig, load_config, save_config, to_dict
from contratile.train.evaluate import Encoded, encode, not_finite, retrieval, to_device
from contratile.train.finish import is_finished
from contratile.train.launch import join
from contratile.train.objective import Objective
from contratile.train.optim import clamp_scale, learning_rate, make_optimizer, resolved
from contratile.train.places import located
from contratile.train.resume import check_options, find_checkpoint, run_of
from contratile.train.sharding import (
    asked_of_accelerate,
    is_shard,
    load_model,
    shard,
    shared_out,
    whole,
    without_foreach,
)
from contratile.train.stopping import signals

SIDES = ("left", "right")
BEST = "text_to_image_R@10"
"""The metric whose best checkpoint is kept."""


class Outcome(NamedTuple):
    """How a run ended."""

    step: int
    finished: bool
    """False: a signal stopped it, after a checkpoint."""

    metrics: dict[str, float]
    encoded: Encoded | None
    """The held-out data at the end, on the main process."""


class Trainer:
    """The parts of a run, built once; `run` is the loop."""

    def __init__(
        self,
        config: TrainConfig,
        notify: Callable[[str], object] = lambda text: None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`notify` is told what goes on before the first step, `say` what is to be read afterwards too."""
        from accelerate.utils import set_seed

        self.config = config = located(config)
        run = config.run
        self.notices: list[str] = []
        """What the user should know before the first step."""

        asked = run.fsdp or asked_of_accelerate()
        self.accelerator = join(run)
        self.sharded = asked and self.accelerator.num_processes > 1
        if self.sharded:
            check_sharding(config, self.accelerator.num_processes)
        self.main = bool(self.accelerator.is_main_process)
        set_seed(run.seed)
        self.source, self.held_out = open_source(config.data, "train"), open_source(config.data, "test")
        self.config = config = fitted(config, self.source, self.accelerator.num_processes)
        if config.run.batch != run.batch:
            told = f"batch {run.batch:,} is larger than the data: {config.run.batch:,}, of {len(self.source):,} pairs"  # type: ignore[arg-type]
            self.notices.append(f"{told} to train on, in every step")
        run = config.run
        self.resumed = self._take_up()

        # A tokenizer is trained once, by one process, and read by the others.
        for main_first in (True, False):
            if self.main == main_first:
                known = run_of(self.resumed) if self.resumed else None if self.main else run.out
                bias = config.loss.loss == "siglip"
                self.towers = build_towers(config.towers, texts=texts_of(self.source), folder=known, bias=bias)
                check_kinds(self.source, self.towers.kinds)
                # What was read there stays as it is: its checksum is in the checkpoints.
                if self.main and (known is None or known.resolve() != run.out.resolve()):
                    save_recipe(self.towers, run.out)
            self.accelerator.wait_for_everyone()
        self.sides = side_names(self.held_out)
        self.towers.to(self.accelerator.device).train()

        self.loader = Loader(
            self.source,
            (self.towers.left.prepare, self.towers.right.prepare),
            batch=run.batch,
            chunk=run.chunk,
            seed=run.seed,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            workers=config.data.workers,
            broken_limit=config.data.broken_limit,
        )
        self.steps = run.steps or self._steps_of(run.epochs)
        wait = self.accelerator.wait_for_everyone
        of = {"seed": run.seed, **{section: to_dict(config)[section] for section in ("data", "towers")}}
        tell: dict[str, Any] = {"broken_limit": config.data.broken_limit, "notify": notify, "say": say}
        kept = {
            side: kept_outputs(
                tower, self.source, side, run.out, of=of, chunk=run.chunk, main=self.main, wait=wait, **tell
            )
            for side, tower in (("left", self.towers.left), ("right", self.towers.right))
            if tower.locked
        }
        self.kept = {side: outputs for side, outputs in kept.items() if outputs is not None}
        self.objective = Objective(config.loss)
        self.cache = GradCache(self._encoders(), self.objective, chunk_size=run.chunk, offload=run.offload)
        before = run_of(self.resumed) / CONFIG if self.resumed else None
        saved = load_config(before).optim if before is not None and before.exists() else None
        self.config = config = replace(config, optim=resolved(config.optim, self.towers, saved))
        optimizer = make_optimizer(self.towers, config.optim)
        self.rates = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        self.optimizer = self.accelerator.prepare_optimizer(without_foreach(optimizer) if self.sharded else optimizer)
        self.step, self.best, self.best_step, self.evaluated = 0, -math.inf, 0, -1
        if self.resumed is not None:
            self._restore(self.resumed)
        if self.main:
            save_config(config, run.out)

    def run(self) -> Outcome:
        """Train to the end, or to a signal. A run that has all its steps is evaluated, unless it has been finished."""
        if self.step >= self.steps:
            done = self._agree(self.main and is_finished(self.config.run.out, self.step))
            return Outcome(self.step, True, *({}, None) if done else self.evaluate())
        run, saved = self.config.run, self.step
        evaluate_at, save_at = (every or max(1, self.steps // 10) for every in (run.eval_every, run.save_every))
        metrics: dict[str, float] = {}
        encoded: Encoded | None = None
        # The loader's workers end after the last checkpoint: one that is stuck must not keep it from being written.
        with (
            signals() as received,
            closing(iter(self.loader)) as batches,
            Tracker(self.config, steps=self.steps, step=self.step, main=self.main) as tracker,
        ):
            if self.step == 0:
                tracker.evaluation(0, self.evaluate()[0], self.sides)  # what training starts from
            while self.step < self.steps and not self._agree(bool(received)):
                batch = next(batches)
                began = time.perf_counter()
                facts = self.train_step(batch)
                self.step += 1
                facts["seconds"] = time.perf_counter() - began
                tracker.step(self.step, facts, broken=self.loader.broken)
                last, better = self.step == self.steps, False
                if self.step % evaluate_at == 0 or last:
                    metrics, encoded = self.evaluate()
                    tracker.evaluation(self.step, metrics, self.sides)
                    better = metrics[BEST] >= self.best  # the latest of equal ones: NaN is never better
                    if better:
                        self.best, self.best_step = metrics[BEST], self.step
                if self.step % save_at == 0 or last or better:
                    tracker.flush()
                    self.save()
                    saved = self.step
            if saved < self.step:
                tracker.flush()
                self.save()
        return Outcome(self.step, self.step >= self.steps, metrics, encoded)

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One global batch."""
        optim, towers = self.config.optim, self.towers
        rate = learning_rate(optim, self.step, self.steps)
        for group, scale in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * scale
        self.optimizer.zero_grad()
        learned = {"scale": towers.log_scale.exp()}
        if towers.bias is not None:
            learned["bias"] = towers.bias * 1
        with self.accelerator.autocast():
            loss = self.cache(self._chunks(batch), **learned)
        self.accelerator.backward(loss)
        loss = self.accelerator.reduce(loss.detach(), "mean")
        if not torch.isfinite(loss):
            self._set_aside()
            self._diagnose(f"the loss of step {self.step + 1} is {float(loss)}")
        if self.step == 0 and self.objective.norms is not None:  # the loss was read just now: nothing waits for this
            warn_not_normalized(self.config.loss.loss, self.objective.norms.tolist(), scale_of(towers))
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = self.accelerator.clip_grad_norm_(trained, optim.clip_grad or math.inf)
        # Of fp16, whose gradients are scaled up, accelerate leaves such a step out and lowers the factor.
        if self.config.run.precision != "fp16" and not math.isfinite(float(norm)):
            self._diagnose(f"the norm of the gradient of step {self.step + 1} is {float(norm)}")
        self.optimizer.step()
        clamp_scale(towers.log_scale, self.config.loss.max_scale)
        facts = {"loss": float(loss), "lr": rate, "scale": scale_of(towers), "grad_norm": float(norm)}
        stats = self.objective.stats
        if stats is not None:
            facts |= {"top1": float(stats.row_top1), "mean_rank": float(stats.row_rank)}
        return {"epoch": batch.epoch, **facts, "pairs": self.config.run.batch}

    def _chunks(self, batch: Batch) -> Iterator[tuple[Any, Any]]:
        """The chunks of this rank as the encoders take them: of a locked side, the kept outputs of its backbone."""
        device = self.accelerator.device
        texts = self.objective.texts = []
        for chunk in batch.chunks:
            texts += chunk.texts
            sides = [
                rows_of(self.kept[side], chunk.index, side, self.config.run.out)
                if side in self.kept
                else getattr(chunk, side)
                for side in SIDES
            ]
            yield tuple(wrapped(to_device(x, device)) for x in sides)

    def evaluate(self) -> tuple[dict[str, float], Encoded | None]:
        """Retrieval on held-out data by the main process, which tells the others. Shards need all to take part."""
        from accelerate.utils import broadcast_object_list

        found: Encoded | None = None
        told: list[tuple[str, dict[str, float]]] = [("", {})]
        if self.main or self.sharded:
            with self.accelerator.autocast():
                limit = self.config.data.broken_limit
                found = encode(self.towers, self.held_out, chunk=self.config.run.chunk, broken_limit=limit)
        if self.main and found is not None:
            wrong = not_finite(found, self.towers.kinds)
            skipped: dict[str, float] = {"skipped": found.broken} if found.broken else {}
            told = [(wrong, {} if wrong else retrieval(found) | skipped)]
        wrong, metrics = broadcast_object_list(told)[0]
        if wrong:
            self._diagnose(f"evaluation after step {self.step} found {wrong}")
        self.evaluated = self.step
        return metrics, found if self.main else None

    def save(self) -> None:
        """Everything that decides the next step, by the main process. Weights that are not finite are not saved."""
        if self._agree(not all(finite(p) for p in self.towers.parameters())):  # a shard may be another rank's
            self._diagnose(f"step {self.step} has left weights that are not finite")
        random, positions = (gather_objects(x) for x in (checkpoint.random_state(), self.loader.state_dict()))
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

    def _take_up(self) -> Path | None:
        """The checkpoint to go on from, found by the main process when it has the folder to itself.

        What it refuses is refused by all: nobody waits for it.
        """
        from accelerate.utils import broadcast_object_list

        told: list[Any] = [None, None]
        if self.main:
            run = self.config.run
            try:
                run.out.mkdir(parents=True, exist_ok=True)
                self.claim = claim(run.out)
                checkpoint.check_best(run.out)
                told[0] = find_checkpoint(run.resume, run.out)
            except (ValueError, OSError) as error:
                told[1] = error
        found, refusal = broadcast_object_list(told)
        if refusal is not None:
            raise refusal
        return found  # type: ignore[no-any-return]  # what was told

    def _restore(self, folder: Path) -> None:
        state, facts = checkpoint.load(folder)
        check_recipe(facts, run_of(folder))
        check_options(facts["config"], self.config)
        load_model(self.towers, state["model"])
        checkpoint.load_optimizer(self.optimizer, shared_out(state["optimizer"], self.optimizer))
        self.loader.load_state_dict(facts["loader"])
        self.step = facts["step"]
        out = self.config.run.out
        # The best of another run is not in this one: a branch looks for its own.
        best = checkpoint.best(out) if run_of(folder).resolve() == out.resolve() else None
        if best is not None and facts["best"] is not None and math.isfinite(facts["best"]):
            self.best, self.best_step = facts["best"], checkpoint.step_of(best) or 0
        if self.main:
            checkpoint.keep(out, last=self.config.run.keep)  # a kill may have come before
        rank = self.accelerator.process_index
        if rank < len(state["random"]):
            checkpoint.set_random_state(state["random"][rank])

    def _steps_of(self, epochs: float) -> int:
        if self.loader.steps_per_epoch is None:
            remedy = "Pass --steps: shards and streams do not know their length."
            bad_value("steps", expected="a number of steps", got="epochs", remedy=remedy)
        return max(1, round(epochs * self.loader.steps_per_epoch))

    def _encoders(self) -> tuple[nn.Module, nn.Module]:
        """What a step runs: towers or what a lock leaves of them, under FSDP or DDP if there are several processes."""
        wrapped: dict[int, nn.Module] = {}

        def wrap(tower: Tower) -> nn.Module:
            if id(tower) not in wrapped:
                module: nn.Module = LockedTowerHead(tower) if tower.locked and self._keeps(tower) else tower
                shards = self.sharded and module is tower  # a head is small: it stays whole
                if shards:
                    shard(tower, self.accelerator.device)
                if self.config.towers.compile:
                    module = torch.compile(module)  # type: ignore[assignment]
                if not shards and any(p.requires_grad for p in module.parameters()):
                    module = self.accelerator.prepare_model(module)
                wrapped[id(tower)] = module
            return wrapped[id(tower)]

        return wrap(self.towers.left), wrap(self.towers.right)

    def _keeps(self, tower: Tower) -> bool:
        return any(self.kept.get(side) is not None and getattr(self.towers, side) is tower for side in self.kept)

    def _agree(self, stop: bool) -> bool:
        """Whether any process has to stop: all must leave the loop at the same step."""
        if self.accelerator.num_processes == 1:
            return stop
        flag = torch.tensor(float(stop), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum") > 0)

    def _set_aside(self) -> None:
        """A checkpoint of the present weights, which give no finite loss, is none to go on from: it loses its name.

        Not so if an evaluation has found them in order: then it is this batch alone.
        """
        folder = self.config.run.out / "checkpoints" / checkpoint.step_name(self.step)
        best = self.config.run.out / "best"
        if self.main and folder.is_dir() and self.evaluated != self.step and best.resolve() != folder.resolve():
            aside = folder.with_name(f"diverged-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        self.accelerator.wait_for_everyone()

    def _diagnose(self, what: str) -> NoReturn:
        """Stop, and tell what was not finite. Checkpoints stay as they are: the run goes on from the last one."""
        named = list(self.towers.named_parameters())
        weights = [name for name, p in named if not finite(p)]
        grads = [name for name, p in named if p.grad is not None and not finite(p.grad)]
        last = checkpoint.latest(self.config.run.out)
        facts = [
            f"weights that are not finite: {', '.join(weights[:5]) or 'none'}",
            f"gradients that are not finite: {', '.join(grads[:5]) or 'none'}",
            f"scale {scale_of(self.towers):.4g}, learning rate {self.optimizer.param_groups[0]['lr']:.3g}",
            f"last checkpoint: {last or 'none'}",
        ]
        remedy = (
            "Lower the learning rate, lengthen the warm-up, clip gradients (--clip-grad 1), or use --precision bf16 "
            "instead of fp16, then resume from the last checkpoint."
        )
        if last is not None and last.name == checkpoint.step_name(self.step) and self.resumed is not None:
            remedy += f" If that comes at once again, remove {last} to resume from the one before it."
        raise FloatingPointError(f"{what}: expected finite numbers. {'; '.join(facts)}. {remedy}")


def check_sharding(config: TrainConfig, world: int) -> None:
    """What FSDP wants: every process runs as many chunks as the others, and weights are optimised one by one."""
    run, optimizer = config.run, config.optim.optimizer
    if run.batch % world:
        remedy = "Every process runs as many chunks as the others."
        bad_value("batch", expected=f"a multiple of the {world} processes with --fsdp", got=run.batch, remedy=remedy)
    if run.precision == "fp16":
        remedy = "bf16 needs no scaled gradients."
        bad_value("precision", expected="fp32 or bf16 with --fsdp", got="fp16", remedy=remedy)
    if optimizer.lower().endswith("adafactor"):
        remedy = "adamw has such steps; this one takes means over rows and columns."
        bad_value("optimizer", expected="steps that shards can do with --fsdp", got=optimizer, remedy=remedy)


def fitted(config: TrainConfig, source: Source, world: int) -> TrainConfig:
    """The config with a batch that the data can fill: at most all its pairs, equally many for each process."""
    if not isinstance(source, Indexed) or config.run.batch <= len(source):
        return config
    batch = len(source) // world * world or len(source)
    return replace(config, run=replace(config.run, batch=batch))


def finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x.full_tensor() if is_shard(x) else x).all())  # type: ignore[attr-defined]  # of shards


def scale_of(towers: Towers) -> float:
    return towers.log_scale.detach().exp().item()


def wrapped(inputs: Any) -> Any:
    """A dictionary of tokens is one argument of a tower, not its keywords."""
    return (inputs,) if isinstance(inputs, dict) else inputs


def check_kinds(source: Source, kinds: tuple[str, str]) -> None:
    if tuple(source.kinds) != kinds:
        remedy = "Choose towers for this data: `st:` for text pairs, the others for image-text pairs."
        bad_value(
            "towers", expected=f"encoders of {' and '.join(source.kinds)}", got=" and ".join(kinds), remedy=remedy
        )


def texts_of(source: Source, limit: int = 200_000) -> Iterator[str]:
    """Texts to train a tokenizer on."""
    return islice(source.texts(), limit)


def gather_objects(mine: Any) -> list[Any]:
    """Everybody's, in the order of ranks."""
    from accelerate.utils import gather_object

    return list(gather_object([mine]))
