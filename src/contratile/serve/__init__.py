"""A local web page to search the gallery of a run, or embedded features.

with make_server(load_finder(Path("runs/icons")), port=0) as server:
    print(server.address)
    server.serve_forever()
"""

from contratile.serve.finder import Finder, load_finder
from contratile.serve.server import Server, make_server

__all__ = ["Finder", "Server", "load_finder", "make_server"]
