"""The encoders of a run: built on every process, locked backbones computed once, wrapped for several processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contratile.data.chunk_maker import negatives_side
from contratile.data.sample import Source, traits_of
from contratile.models.locked import kept_outputs
from contratile.models.towers import LockedTowerHead, Tower, Towers, build_towers, save_recipe
from contratile.train.config import TrainConfig
from contratile.train.config_file import to_dict
from contratile.train.setup import check_kinds, negatives_of, tokenizer_texts
from contratile.train.sharding import shard

SIDES = ("left", "right")


def shared_towers(
    config: TrainConfig, source: Source, *, main: bool, wait: Callable[[], object], resumed: Path | None
) -> Towers:
    """Build the same towers on every process.

    The main process trains the tokenizer, if there is one, and writes it to the run's folder; the others read it there.

    Args:
        config: The options of the run.
        source: The training data.
        main: Whether this is the main process.
        wait: A barrier over all processes.
        resumed: Folder of the run that is resumed, with its tokenizer; None for a new run.
    """
    out, towers = config.run.out, None
    for main_first in (True, False):
        if main == main_first:
            folder = resumed or (None if main else out)
            bias = config.loss.loss == "siglip"
            views = config.augment.views == 2
            towers = build_towers(config.towers, texts=tokenizer_texts(source), folder=folder, bias=bias, views=views)
            check_kinds(source, towers.kinds, views=views)
            # Files of a run that is resumed are not written again: checkpoints hold their checksum.
            if main and (folder is None or folder.resolve() != out.resolve()):
                save_recipe(towers, out)
        wait()
    assert towers is not None
    return towers


def locked_outputs(
    config: TrainConfig,
    towers: Towers,
    source: Source,
    *,
    chunk: int,
    main: bool,
    wait: Callable[[], object],
    notify: Callable[[str], object],
    say: Callable[[str], object],
) -> dict[str, Tensor]:
    """Compute the outputs of locked backbones for all training samples, once for all epochs, by side.

    Streams have none: their samples have no number, so they are encoded every time. So are texts of which one of
    several is chosen for each epoch, and both sides of a tower that also encodes hard negatives.
    """
    run, found = config.run, {}
    if not config.towers.keep_outputs or _changing(config, towers, source):
        return {}
    # The file of outputs is computed again if any of these options changes.
    depends_on = {"seed": run.seed, **{section: to_dict(config)[section] for section in ("data", "towers")}}
    for side in SIDES:
        tower = getattr(towers, side)
        if tower.locked:
            outputs = kept_outputs(
                tower,
                source,
                side,
                run.out,
                of=depends_on,
                chunk=chunk,
                main=main,
                wait=wait,
                broken_limit=config.data.broken_limit,
                notify=notify,
                say=say,
            )
            if outputs is not None:
                found[side] = outputs
    return found


def _changing(config: TrainConfig, towers: Towers, source: Source) -> bool:
    """Whether a locked tower encodes something that is not the same in every epoch."""
    negatives = negatives_of(config, source)
    encodes_negatives = (towers.left, towers.right)[negatives_side(source)] if negatives else None
    several = towers.right if traits_of(source).several_texts else None
    return any(tower is not None and tower.locked for tower in (encodes_negatives, several))


def step_encoders(
    towers: Towers, kept: dict[str, Tensor], accelerator: Any, *, sharded: bool, compiled: bool
) -> tuple[nn.Module, nn.Module]:
    """The modules that a training step runs for the left and the right side.

    A side with kept outputs runs only its head. With several processes modules are wrapped in DDP, or sharded.

    Args:
        towers: The encoders; sharding changes them in place.
        kept: Kept outputs of locked backbones, by side.
        accelerator: accelerate's `Accelerator`.
        sharded: Shard the weights over the processes (FSDP).
        compiled: Run the modules through torch.compile.
    """
    made: dict[int, nn.Module] = {}

    def wrap(tower: Tower) -> nn.Module:
        if id(tower) not in made:
            head_only = any(getattr(towers, side) is tower for side in kept)
            module: nn.Module = LockedTowerHead(tower) if head_only else tower
            shards = sharded and module is tower  # a head is small: it stays whole
            if shards:
                shard(tower, accelerator.device)
            if compiled:
                module = torch.compile(module)  # type: ignore[assignment]
            if not shards and any(p.requires_grad for p in module.parameters()):
                module = accelerator.prepare_model(module)
            made[id(tower)] = module
        return made[id(tower)]

    return wrap(towers.left), wrap(towers.right)
