"""`contratile serve`: a local page to search a run, or embedded features, by text or picture."""

import argparse
from collections.abc import Sequence

from contratile.cli.corpus import add_corpus
from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.printable import printable


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = Parser(
        prog="contratile serve",
        description="Search a finished run, or features that `contratile embed` wrote, in the browser, by text or by a "
        "dropped picture. The page loads nothing from elsewhere and only this machine can reach it. It covers what "
        "`contratile search` covers. Ctrl-C ends it.",
    )
    add_corpus(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 lets everyone on the network search the run and see its pictures: there is "
        "no password (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--port", type=int, help="port to listen on, 0 for any free one (default: 8000, or a free one if that is taken)"
    )
    return parser


def serve(argv: Sequence[str]) -> int:
    """Serve a run until Ctrl-C.

    Args:
        argv: The words after `contratile serve`.

    Returns:
        The exit code.
    """
    options = parser().parse_args(argv)
    if missing("serve", TRAIN, "train"):
        return 1
    quiet_progress()
    from contratile.serve import load_finder, make_server
    from contratile.serve.server import PORT

    try:
        finder = load_finder(options.corpus, run=options.run, pictures=options.pictures)
        with make_server(finder, host=options.host, port=options.port) as server:
            found = printable(f"{finder.title}: {finder.corpus.counts()}")
            if finder.corpus.remark:
                print(printable(f"pictures are missing: {finder.corpus.remark}"))
            if options.port is None and server.server_port != PORT:
                print(f"port {PORT} is taken: using {server.server_port} (--port chooses another)")
            print(f"{found}\nopen {server.address} (Ctrl-C ends it)", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        print()
    return 0
