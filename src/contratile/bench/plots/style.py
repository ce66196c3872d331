"""What the plots share: a colour and a label for each contestant, numbers as text, title and hardware."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.bench.rows import hardware_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito for the colour-blind; markers differ too, for prints without colour.
STYLES: dict[str, dict[str, Any]] = {
    "contratile": {"color": "#0072B2", "marker": "o", "linewidth": 2.6, "markersize": 7, "zorder": 5},
    "contratile_cached": {"color": "#0072B2", "marker": "^", "linestyle": "-.", "zorder": 4},
    "contratile_bf16": {"color": "#0072B2", "marker": "v", "linestyle": ":", "zorder": 4},
    "contratile_nodes": {"color": "#56B4E9", "marker": "^"},
    "inf_cl": {"color": "#D55E00", "marker": "P", "markersize": 8},
    "dense": {"color": "#000000", "marker": "s"},
    "open_clip": {"color": "#E69F00", "marker": "D"},
    "inf_cl_ring": {"color": "#D55E00", "marker": "P", "markersize": 8},
    "sentence_transformers": {"color": "#CC79A7", "marker": "X", "markersize": 8},
    "cut_ce": {"color": "#009E73", "marker": "h"},
    "keops": {"color": "#56B4E9", "marker": "*", "markersize": 9},
    "open_clip_grad": {"color": "#E69F00", "marker": "s", "markersize": 10, "linestyle": "-.", "zorder": 1.5},
    "open_clip_local": {"color": "#CC79A7", "marker": "X", "markersize": 8},
    "disco": {"color": "#009E73", "marker": "h"},
    "plain": {"color": "#000000", "marker": "s"},
    "grad_cache": {"color": "#009E73", "marker": "h"},
    "contratile_columns": {"color": "#0072B2", "marker": "v", "linestyle": "--"},
    "contratile_tokens": {"color": "#0072B2", "marker": "^", "linestyle": ":"},
    "contratile_kept": {"color": "#0072B2", "marker": "s", "linestyle": "-."},
    "contratile_unsorted": {"color": "#56B4E9", "marker": "v"},
    "contratile_table": {"color": "#0072B2", "marker": "^", "alpha": 0.5},
    "webdataset": {"color": "#009E73", "marker": "h"},
}
LABELS = {
    "contratile_cached": "contratile, tiles cached",
    "contratile_bf16": "contratile, bf16 features",
    "contratile_ids": "contratile, ids",
    "contratile_positives": "contratile, ids as positives",
    "contratile_margin": "contratile, margin",
    "contratile_loop": "contratile, a call for each dimension",
    "contratile_nodes": "contratile, ring over nodes",
    "inf_cl": "Inf-CL",
    "dense": "dense (N x N logits)",
    "open_clip": "open_clip ClipLoss",
    "inf_cl_ring": "inf-cl ring (PyTorch path)",
    "sentence_transformers": "sentence-transformers cached",
    "cut_ce": "cut-cross-entropy (torch.compile)",
    "keops": "KeOps",
    "open_clip_grad": "open_clip, gather_with_grad",
    "open_clip_local": "open_clip, local_loss + grad",
    "disco": "DisCo-style gather",
    "plain": "plain training",
    "grad_cache": "GradCache package",
    "contratile_columns": "Contratile, each side sorted",
    "contratile_tokens": "Contratile, chunks by tokens",
    "contratile_kept": "Contratile, all graphs kept",
    "contratile_unsorted": "Contratile, not sorted",
    "contratile_table": "contratile, table of files",
}


def finish(figure: "Figure", first: "Axes", title: str, threads_used: str, facts: dict[str, str], path: Path) -> None:
    """Add title and hardware, and write the file."""
    figure.suptitle(title, fontsize="large", fontweight="bold", x=0.01, ha="left")
    hardware = f"{hardware_text(facts)}, {threads_used}, torch {facts['torch']}, commit {facts['commit']}"
    first.set_title(hardware, fontsize="small", color="#555555", loc="left")
    draft = path.with_name(f".{path.name}.part")
    figure.savefig(draft, dpi=150, format="png")
    draft.replace(path)


def count_text(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def bytes_text(mib: float) -> str:
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"


def seconds_text(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
