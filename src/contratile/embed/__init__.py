"""Features of any data on disk, and hard negatives of any data as a table to train on.

from contratile.embed import embed_source, mine_source
from contratile.train import load_run, open_source

towers, config, step = load_run(Path("runs/icons"))
embed_source(towers, open_source(config.data, "test"), Path("features.npy"))
"""

from contratile.embed.embed import Embedded as Embedded
from contratile.embed.embed import Ranks as Ranks
from contratile.embed.embed import embed_source as embed_source
from contratile.embed.mine import Mined as Mined
from contratile.embed.mine import mine_source as mine_source
from contratile.embed.open_corpus import open_corpus as open_corpus
from contratile.mining.options import Rules as Rules
