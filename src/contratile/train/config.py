"""The options of a training run: checked dataclasses.

    config = TrainConfig(run=RunConfig(batch=4096), data=DataConfig(data="icons"))

On the command line every field is an option of the same name; in a recipe it stands under its section
(`config_file.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from contratile.data.augment import AugmentConfig
from contratile.data.catalog import DataConfig
from contratile.engine.spec import GuideMargin
from contratile.errors import bad_value, check_choice, check_count, check_size
from contratile.losses.directions import ONE_TYPE, Direction, Directions, HardnessMode, PartitionMode
from contratile.models.towers import TowerConfig
from contratile.ring.nodes import RingKind
from contratile.train.optim import OptimConfig
from contratile.train.second_options import Second, check_second

LossName = Literal["clip", "infonce", "siglip", "ntxent", "supcon"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss and its options."""

    loss: LossName = "clip"
    """clip: both directions; infonce: left to right; siglip; ntxent: sides are views; supcon: one class per text."""

    same_id: Literal["exclude", "positive", "negative"] = "exclude"
    """How pairs of the same id are treated: left out, as further positives, or as negatives like all other pairs
    (clip, infonce, siglip)."""

    ids: Literal["auto", "left", "right"] = "auto"
    """Which pairs have the same id: those of equal left or of equal right side. auto: left if the data has several
    texts for a left side, else right. The classes of supcon are ids, too."""

    hard_negatives: Literal["all", "own"] = "all"
    """Hard negatives of the data are compared with all pairs of the batch, or only with their own pair."""

    margin: float | None = None
    """Drop negatives whose similarity exceeds that of the positive minus this margin (clip, infonce)."""

    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all keys (clip, infonce)."""

    matryoshka_dims: tuple[int, ...] = ()
    """Sum the loss over the first features of every row, each time normalised: for example 64 128 256, with or without
    the full width (clip, infonce, siglip). The log then has no batch statistics."""

    matryoshka_weights: tuple[float, ...] = ()
    """Weights of these losses, in the order of the dimensions; 1 each by default."""

    backend: Literal["auto", "torch", "triton", "dense"] = "auto"
    """Implementation of the loss; dense holds all scores in memory and is meant for comparison."""

    cache_mib: int = 0
    """Memory in MiB for keeping score tiles from forward to backward: faster, same results."""

    ring: RingKind = "auto"
    """How blocks travel between ranks; auto: over nodes if the run has several of equal size."""

    max_scale: float = 100.0
    """Upper limit of the learned scale; it is clamped after every step."""

    directions: tuple[Direction, ...] = ("query_to_doc",)
    """Directions to compare (infonce), where left sides are queries and right sides documents: query_to_doc,
    query_to_query, doc_to_query, doc_to_doc."""

    partition_mode: PartitionMode = "joint"
    """One softmax over all directions, or the mean of one per direction (infonce)."""

    hardness_mode: HardnessMode | None = None
    """Negatives that get more weight the more similar they are: those of other pairs, a pair's own hard negatives, or
    all (infonce)."""

    hardness_strength: float = 0.0
    """Factor of their similarity, which is added to their score without a gradient."""

    guide: str = ""
    """Frozen model that drops false negatives, as GISTEmbed does: pairs that it finds more similar than a sample's own
    pair do not count (clip, infonce). The folder of a run, or pretrained hf:<model> | open_clip:<model>:<pretrained> |
    st:<model>."""

    guide_margin: float = 0.0
    """Drop pairs whose guide similarity exceeds that of the sample's own pair minus this margin."""

    guide_margin_strategy: GuideMargin = "absolute"
    """absolute: the margin as it is; relative: times the guide's similarity of the own pair."""

    teacher: str = ""
    """Frozen model to learn from, named like a guide: adds the cross-entropy with its softmax over the batch, as
    open_clip's DistillClipLoss (clip, infonce)."""

    teacher_weight: float = 1.0
    """Factor of that term."""

    teacher_temperature: float = 1.0
    """Divides the teacher's scores: above 1 its targets are softer."""

    teacher_scale: float = 0.0
    """Scale of the teacher's cosines; 0: the one that its run learned. Pretrained models need it: 100 for those of
    OpenAI and open_clip."""

    @property
    def more(self) -> Directions:
        """The options of the same names."""
        return Directions(self.directions, self.partition_mode, self.hardness_mode, self.hardness_strength)

    @property
    def second(self) -> Second | None:
        """The model that encodes each batch too, if there is one."""
        role: Literal["guide", "teacher"] = "guide" if self.guide else "teacher"
        return Second(role, getattr(self, role)) if getattr(self, role) else None

    @property
    def rows_per_pair(self) -> int:
        """2 if the loss compares both sides of all pairs with each other (ntxent, supcon), else 1."""
        return 2 if self.loss in ("ntxent", "supcon") else 1

    def check(self) -> None:
        """Refuse values out of range, and options that the loss has no use for."""
        check_count("cache_mib", self.cache_mib, least=0)
        if not 0 <= self.label_smoothing < 1:
            got = self.label_smoothing
            bad_value("label_smoothing", expected="a share from 0 to below 1", got=got, remedy="0.1 is common.")
        if not self.max_scale >= 1:
            bad_value("max_scale", expected="at least 1", got=self.max_scale, remedy="CLIP uses 100.")
        if self.loss not in ("clip", "infonce"):
            for name in ("margin", "label_smoothing"):
                if getattr(self, name):
                    remedy = "Drop it, or use --loss clip or infonce."
                    bad_value(name, expected=f"none with --loss {self.loss}", got=getattr(self, name), remedy=remedy)
        if self.ids != "auto" and self.loss == "ntxent":
            remedy = "Drop it: this loss has no ids."
            bad_value("ids", expected=f"auto with --loss {self.loss}", got=self.ids, remedy=remedy)
        if self.same_id != "exclude" and self.loss in ("ntxent", "supcon"):
            remedy = "Drop it, or use --loss clip, infonce or siglip."
            bad_value("same_id", expected=f"exclude with --loss {self.loss}", got=self.same_id, remedy=remedy)
        if self.same_id == "positive" and (self.margin is not None or self.label_smoothing):
            remedy = "Both are measured from one positive: drop them, or use --same-id exclude."
            expected = "no --margin and no --label-smoothing with it"
            bad_value("same_id=positive", expected=expected, got="one of them", remedy=remedy)
        check_second(self)
        self._check_matryoshka()
        if self.more != Directions():
            self._check_directions()

    def _check_matryoshka(self) -> None:
        dims, weights = self.matryoshka_dims, self.matryoshka_weights
        if weights and len(weights) != len(dims):
            remedy = "Pass one weight for each of --matryoshka-dims."
            bad_value("matryoshka_weights", expected=f"{len(dims)} numbers", got=len(weights), remedy=remedy)
        if not dims:
            return
        if min(dims) < 1 or len(set(dims)) < len(dims):
            remedy = "Pass numbers of leading features, for example 64 128 256."
            bad_value("matryoshka_dims", expected="distinct numbers from 1 up", got=dims, remedy=remedy)
        if not all(math.isfinite(x) and x >= 0 for x in weights):
            bad_value("matryoshka_weights", expected="numbers from 0 up", got=weights, remedy="1 each is the default.")
        for option, given in (
            (f"--loss {self.loss}", self.loss in ("ntxent", "supcon")),
            ("--margin", self.margin is not None),
            ("--label-smoothing", self.label_smoothing),
            ("--cache-mib", self.cache_mib),
            ("--same-id positive", self.same_id == "positive" and self.loss != "siglip"),
            ("--directions query_to_query or doc_to_doc", set(ONE_TYPE) & self.more.names),
            ("--hardness-mode", self.more.hardness),
        ):
            if given:
                remedy = "Drop one of the two."
                bad_value("matryoshka_dims", expected=f"none with {option}", got=dims, remedy=remedy)

    def _check_directions(self) -> None:
        if self.loss != "infonce":
            remedy = "Use --loss infonce, or drop --directions, --partition-mode and --hardness-*."
            bad_value("directions and hardness", expected="--loss infonce", got=self.loss, remedy=remedy)
        self.more.check()
        margin = self.more.hardness or set(ONE_TYPE) & self.more.names
        for name, given in (
            ("label_smoothing", bool(self.label_smoothing)),
            ("same_id=positive", self.same_id == "positive"),
            ("margin", self.margin is not None and bool(margin)),
            ("matryoshka_dims", bool(self.matryoshka_dims) and bool(margin)),
        ):
            if given and (self.more.several or self.more.hardness):
                remedy = f"Drop {name}, or the directions beyond query_to_doc and the hardness."
                bad_value(f"{name} and directions or hardness", expected="one of them", got="both", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run: where it writes, how long it trains, on what."""

    out: Path = Path("runs/latest")
    """Folder of the run: configuration, metrics, checkpoints, gallery and report."""

    batch: int = 4096
    """Pairs in a step, over all processes. The loss compares all of them with each other."""

    chunk: int | Literal["auto"] = 256
    """Pairs that go through the encoders at a time. Lower it if they run out of memory; results stay the same. auto:
    the largest that fits into memory, found by trial before the first step."""

    steps: int = 0
    """Steps of the run; 0: use epochs."""

    epochs: float = 10.0
    """Passes over the data, if steps is 0."""

    seed: int = 0
    """Seed for weights, data order and dropout."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the encoders; fp16 needs an accelerator. The loss accumulates in fp32."""

    fsdp: bool = False
    """Shard weights, gradients and optimiser state over the processes (FSDP2). No effect with one process."""

    offload: Literal["none", "host", "disk"] = "none"
    """Where the inputs of a batch are kept between the two passes through the encoders."""

    lengths: Literal["auto", "off"] = "auto"
    """auto: texts of a batch are sorted by length before they are cut into chunks, so that little padding is encoded,
    if their encoder gives the same features without padding. off: chunks keep the order of the batch."""

    eval_every: int = 0
    """Steps between evaluations on held-out data; 0: ten in a run. There is always one at the end."""

    save_every: int = 0
    """Steps between checkpoints; 0: ten in a run."""

    keep: int = 2
    """Number of newest checkpoints to keep, besides the best one."""

    resume: str = "auto"
    """auto: continue the run in `out` if there is one; never: refuse to; or a checkpoint's folder, for a new run."""

    log_every: int = 1
    """Steps between lines of metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files too, if the package is installed."""

    track: tuple[str, ...] = ()
    """Further trackers, by the names that accelerate has for them: wandb, trackio, mlflow and others. They get
    everything that metrics.jsonl has, and use no network unless their environment variables ask for it."""

    cpu: bool = False
    """Use the CPU even if there is an accelerator."""

    timeout: float = 1800.0
    """Seconds that processes wait for each other before a dead or stalled one ends the run."""

    gallery: Literal["auto", "held-out", "all"] = "auto"
    """What `contratile search` covers: all pairs, held-out pairs, or auto: all pairs if there are at most 20,000 and
    the run sees each at least once."""

    queries: tuple[str, ...] = ()
    """Texts to search for at the end of the run; the results are printed and shown in the report."""

    large_loss: bool = False
    """At the end, run one loss step that is too large for a dense loss on this machine (or as large as about a minute
    allows), and report its time and memory."""

    def check(self) -> None:
        """Refuse values out of range."""
        if isinstance(self.chunk, str):
            check_choice("chunk", self.chunk, ("auto",))
        else:
            check_count("chunk", self.chunk, least=1)
        check_choice("lengths", self.lengths, ("auto", "off"))
        for name in ("batch", "keep", "log_every"):
            check_count(name, getattr(self, name), least=1)
        for name in ("steps", "eval_every", "save_every"):
            check_count(name, getattr(self, name), least=0)
        if not 0 <= self.seed < 2**32:
            bad_value("seed", expected="0 to 4294967295", got=self.seed, remedy="Choose any number in that range.")
        if self.steps == 0 and not self.epochs > 0:
            bad_value("epochs", expected="a positive number", got=self.epochs, remedy="Or pass --steps.")
        if not 0 < self.timeout < 1e9:
            expected = "a positive number of seconds"
            bad_value("timeout", expected=expected, got=self.timeout, remedy="The default is 1800.")
        if "tensorboard" in self.track and not self.tensorboard:
            remedy = "Drop --no-tensorboard, or tensorboard from --track."
            bad_value("track", expected="other trackers with --no-tensorboard", got="tensorboard", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Zero-shot classification during training, in addition to retrieval on held-out pairs."""

    zero_shot: str = ""
    """Data to classify: named as in --data, with class names as texts, or the folder of a CLIP_benchmark data set."""

    classes: str = ""
    """Class names: imagenet (from open_clip) or a file with one per line; default: the distinct texts of the data."""

    templates: str = ""
    """Prompts: openai or simple (from open_clip) or a file with one per line; {} stands for the class name."""

    zero_shot_every: int = 0
    """Steps between zero-shot evaluations; 0: at every evaluation. There is always one at the end."""

    def __post_init__(self) -> None:
        check_count("zero_shot_every", self.zero_shot_every, least=0)
        for name in ("classes", "templates", "zero_shot_every"):
            if getattr(self, name) and not self.zero_shot:
                remedy = "Pass --zero-shot, or drop it."
                bad_value(name, expected="data to classify (--zero-shot)", got=getattr(self, name), remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train two encoders with a contrastive loss at any batch size."""

    run: RunConfig = field(default_factory=RunConfig)
    """Where the run writes, how long it trains, on what."""

    data: DataConfig = field(default_factory=DataConfig)
    """Where the pairs come from."""

    towers: TowerConfig = field(default_factory=TowerConfig)
    """The encoders."""

    loss: LossConfig = field(default_factory=LossConfig)
    """The loss."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser and its schedule."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Random changes to training images."""

    eval: EvalConfig = field(default_factory=EvalConfig)
    """Zero-shot evaluation."""

    def __post_init__(self) -> None:
        for section in SECTIONS:
            for option, value in vars(getattr(self, section)).items():
                if isinstance(value, int | float):
                    check_size(option, value)
        self.run.check()
        self.loss.check()
        self._check_combinations()
        if self.augment.views == 2:
            self._check_views()

    def _check_combinations(self) -> None:
        """Options of one section that do not fit those of another."""
        loss, towers, negatives = self.loss, self.towers, self.data.negatives
        if not towers.learn_scale and towers.init_scale > loss.max_scale:
            remedy = "Raise --max-scale, or lower --init-scale."
            bad_value("init_scale", expected=f"at most {loss.max_scale:g}", got=towers.init_scale, remedy=remedy)
        if negatives and loss.loss not in ("clip", "infonce"):
            remedy = "Drop it, or use --loss clip or infonce."
            bad_value("negatives", expected=f"none with --loss {loss.loss}", got=negatives, remedy=remedy)
        if loss.teacher and (negatives or self.data.num_negatives):
            remedy = "Its softmax runs over the pairs of the batch: drop it, or pass --num-negatives 0."
            what = "negatives" if negatives else "num_negatives"
            got = negatives or self.data.num_negatives
            bad_value(what, expected="none with --teacher", got=got, remedy=remedy)

    def _check_views(self) -> None:
        """Two views of each image train no text encoder."""
        if self.loss.loss not in ("ntxent", "supcon"):
            remedy = "Pass --loss ntxent; supcon also uses the classes."
            bad_value("views", expected=f"1 with --loss {self.loss.loss}", got=2, remedy=remedy)
        if self.eval.zero_shot:
            remedy = "Classes are told apart by their names, and --views 2 trains no text encoder."
            bad_value("zero_shot", expected="none with --views 2", got=self.eval.zero_shot, remedy=remedy)
        if self.run.queries:
            remedy = "Search with pictures afterwards: contratile search RUN PICTURE."
            expected = "none with --views 2, which trains no text encoder"
            bad_value("queries", expected=expected, got=len(self.run.queries), remedy=remedy)


SECTIONS = ("run", "data", "towers", "loss", "optim", "augment", "eval")
