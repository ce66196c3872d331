"""Export a run: a folder that transformers, open_clip or sentence-transformers loads without Contratile.

export_run(Path("runs/icons"), "transformers", Path("icons-clip"))
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from contratile.errors import bad_value, check_choice
from contratile.models.export import FORMATS, Exported, Format, export_towers
from contratile.train.load import load_run
from contratile.train.model_card import model_card


def export_run(run: str | Path, to: Format, out: str | Path, weights: str = "best") -> tuple[Exported, int]:
    """Write the model of a run as a folder of another package, with tokenizer, preprocessing and model card.

    The folder is loaded again and its features are compared with those of the run before it gets its name. Weights are
    safetensors. The training data is not needed; a pretrained model that the run started from is.

    Args:
        run: Folder of the run. It may come from anyone: no code in it is executed.
        to: "transformers" for tiny and hf: towers, "open_clip" for open_clip:, "sentence-transformers" for st:.
        out: Folder to write. It must not exist, or be empty.
        weights: Which checkpoint: "best", "last" or a step such as "step-00000100".

    Returns:
        How the folder is loaded and used, and the step of the checkpoint.

    Raises:
        ValueError: The run cannot be loaded, the format has no place for its encoders or head, or `out` is not empty.
        ImportError: The package is missing or broken.

    Examples:
        >>> export_run("runs/icons", "transformers", "icons-clip")                            # doctest: +SKIP
    """
    check_choice("to", to, FORMATS)
    run, out = Path(run), Path(out).absolute()
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        bad_value("out", expected="a new or empty folder", got=out, remedy="Choose another name, or remove it.")
    towers, config, step = load_run(run, weights)
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.part-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        exported = export_towers(towers, to, draft)
        card = model_card(run, config, step, exported, name=out.name, library=to)
        (draft / "README.md").write_text(card, encoding="utf-8")
        for weights_file in draft.rglob("*.safetensors"):  # written for their owner alone, see `usual_mode`
            weights_file.chmod((draft / "README.md").stat().st_mode & 0o777)
        if out.exists():
            out.rmdir()  # empty; a rename onto a folder fails on some systems
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return replace(exported, encode_pixels=None, encode_texts=None), step
