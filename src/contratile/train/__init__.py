"""Train, evaluate and search from Python.

    from contratile.train import RunConfig, TrainConfig, Trainer, write_results

    trainer = Trainer(TrainConfig(run=RunConfig(out=Path("runs/icons"), steps=100)))
    outcome = trainer.run()                      # started again, it continues from the last checkpoint
    if outcome.held_out is not None:             # None if the run had been finished before
        write_results(trainer, outcome)          # gallery, contact sheet, report.html

    towers, config, step = load_run(Path("runs/icons"))
    retrieval(encode(towers, open_source(config.data, "test"), chunk=256))
    search(towers, load_gallery(Path("runs/icons")), ["battery charging"])

Needs the packages of the extra `demo`, or of `train` for pretrained encoders and other data.
"""

from contratile.data.catalog import DataConfig as DataConfig
from contratile.data.catalog import open_source as open_source
from contratile.models.encoding import SourceFeatures as SourceFeatures
from contratile.models.encoding import encode as encode
from contratile.models.towers import TowerConfig as TowerConfig
from contratile.models.towers import Towers as Towers
from contratile.models.towers import build_towers as build_towers
from contratile.report.gallery import Gallery as Gallery
from contratile.report.gallery import load_gallery as load_gallery
from contratile.report.tracking import history as history
from contratile.train.config import EvalConfig as EvalConfig
from contratile.train.config import LossConfig as LossConfig
from contratile.train.config import RunConfig as RunConfig
from contratile.train.config import TrainConfig as TrainConfig
from contratile.train.config_file import load_config as load_config
from contratile.train.config_file import save_config as save_config
from contratile.train.evaluate import chance as chance
from contratile.train.evaluate import class_features as class_features
from contratile.train.evaluate import retrieval as retrieval
from contratile.train.evaluate import zero_shot as zero_shot
from contratile.train.export import export_run as export_run
from contratile.train.gallery_search import search as search
from contratile.train.load import Run as Run
from contratile.train.load import load_run as load_run
from contratile.train.loaded import Model as Model
from contratile.train.loop import Outcome as Outcome
from contratile.train.loop import Trainer as Trainer
from contratile.train.optim import OptimConfig as OptimConfig
from contratile.train.results import write_results as write_results
