"""Pairs to train on: icons, WordNet, tables, webdataset shards, Hugging Face datasets; and the loader.

source = open_source(DataConfig(data="icons"), "train")
for batch in Loader(source, prepare, batch=4096, chunk=512):
    for chunk in batch.chunks: ...

For data of your own, write a class with the methods of `Indexed` or `Stream`.
"""

from contratile.data.catalog import DataConfig as DataConfig
from contratile.data.catalog import open_source as open_source
from contratile.data.chunk_maker import Chunk as Chunk
from contratile.data.loader import Batch as Batch
from contratile.data.loader import Loader as Loader
from contratile.data.sample import Broken as Broken
from contratile.data.sample import Indexed as Indexed
from contratile.data.sample import Kind as Kind
from contratile.data.sample import Sample as Sample
from contratile.data.sample import Source as Source
from contratile.data.sample import Stream as Stream
