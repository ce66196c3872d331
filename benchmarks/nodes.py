"""Flat ring against ring over nodes, on emulated nodes of this machine. Needs root (network namespaces) and iproute2.

    python benchmarks/nodes.py --out benchmarks/results/nodes
    python benchmarks/nodes.py --rates 100 0 --pairs 3 --out bench-nodes      # Mbit/s; 0: not shaped

Two network namespaces are the nodes. Each rank of a node has a link of its own to its partner on the other node: a veth
pair whose two ends are shaped with `tc tbf`. Ranks of a node reach each other through their namespace's loopback. gloo
binds each rank to the address of its link, so what rank r sends to another node passes the link of one rank.

All ranks time both rings in turn, pair by pair; the slowest rank counts. Namespaces are removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from contratile import clip_loss
from contratile.bench.clock import Step
from contratile.bench.contestants.loss import LossProblem, with_backward
from contratile.bench.plots import draw
from contratile.bench.ring_rank import agreed, common_time
from contratile.bench.rows import NodesRow, Recording, provenance, save_rows
from contratile.machine import environment
from contratile.ring.nodes import RingKind

NODES, LOCAL = 2, 4
RINGS: tuple[RingKind, ...] = ("flat", "nodes")
BURST = "128kb"
"""Of the token bucket: two packets of the largest size that the kernel hands over."""


def run(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


def space(node: int) -> str:
    return f"contratile-node{node}"


def shape(rate: int) -> None:
    """Give every link this rate in Mbit/s, in both directions; 0 removes the limit."""
    for node in range(NODES):
        for place in range(LOCAL):
            device = f"dev link{place} root"
            if rate:
                run(f"tc -n {space(node)} qdisc replace {device} tbf rate {rate}mbit burst {BURST} latency 200ms")
            else:
                subprocess.run(shlex.split(f"tc -n {space(node)} qdisc del {device}"), stderr=subprocess.DEVNULL)


@contextmanager
def namespaces() -> Iterator[None]:
    """The nodes and their links, for as long as the block runs."""
    made = []
    try:
        for node in range(NODES):
            run(f"ip netns add {space(node)}")
            made.append(node)
            run(f"ip -n {space(node)} link set lo up")
        for place in range(LOCAL):
            run(f"ip -n {space(0)} link add link{place} type veth peer name link{place} netns {space(1)}")
            for node in range(NODES):
                run(f"ip -n {space(node)} addr add 10.231.{place}.{node + 1}/24 dev link{place}")
                run(f"ip -n {space(node)} link set link{place} up")
        yield
    finally:
        for node in made:
            run(f"ip netns del {space(node)}")


def measure(options: argparse.Namespace) -> None:
    """On one rank: time both rings at every rate. Rank 0 sets the rates and writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{options.store}", rank=options.rank, world_size=NODES * LOCAL)
    problem = LossProblem.make(options.local, options.d, scale=14.3, seed=options.rank)
    rows: list[NodesRow] = []
    facts = environment() | {"device": "cpu"}

    steps: dict[str, Step] = {ring: problem.bind(with_backward(partial(clip_loss, ring=ring))) for ring in RINGS}
    for rate in options.rates:
        if options.rank == 0:
            shape(rate)
        dist.barrier()
        seconds: dict[str, list[float]] = {ring: [] for ring in RINGS}
        for step in steps.values():
            step()
        for pair in range(options.pairs):
            for ring in RINGS if pair % 2 else RINGS[::-1]:
                seconds[ring].append(common_time(steps[ring]))
        speedups = [flat / nodes for flat, nodes in zip(*seconds.values(), strict=True)]
        for name, times in seconds.items():
            place: dict[str, Any] = {"n": options.local * NODES * LOCAL, "d": options.d, "dtype": "float32"}
            rows.append(
                NodesRow(
                    **place,
                    contestant=name,
                    status="ok",
                    seconds_best=min(times),
                    seconds_median=median(times),
                    world=NODES * LOCAL,
                    nodes=NODES,
                    local=options.local,
                    link_mbit=rate,
                    pairs=options.pairs,
                    speedup=median(speedups) if name == "nodes" else 1.0,
                    speedup_lowest=min(speedups) if name == "nodes" else 1.0,
                    speedup_highest=max(speedups) if name == "nodes" else 1.0,
                    **provenance(facts, options.command),
                )
            )
        if options.rank == 0:
            told = f"{median(seconds['flat']):.3f} s flat, {median(seconds['nodes']):.3f} s over nodes"
            print(f"{rate or 'not shaped'} Mbit/s: {told}, {median(speedups):.2f} x", flush=True)
    agreed(0.0)
    if options.rank == 0:
        recording = Recording(tuple(rows), facts, options.command, "nodes")
        print("written:", *save_rows(recording, options.out), *draw(recording, options.out))
    dist.destroy_process_group()


def start(arguments: list[str], store: str) -> int:
    """Start a rank in the namespace of its node, for every rank, and wait for them."""
    ranks = []
    for rank in range(NODES * LOCAL):
        node, place = divmod(rank, LOCAL)
        command = ["ip", "netns", "exec", space(node), sys.executable, __file__, *arguments]
        chosen = {"CONTRATILE_NODE": str(node), "GLOO_SOCKET_IFNAME": f"link{place}", "OMP_NUM_THREADS": "1"}
        words = ["--rank", str(rank), "--store", store]
        ranks.append(subprocess.Popen([*command, *words], env={**os.environ, **chosen}))
    codes = [rank.wait() for rank in ranks]
    return max(map(abs, codes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 250, 500, 1000, 2000, 0], help="Mbit/s per link")
    parser.add_argument("--pairs", type=int, default=10, help="timed pairs at each rate")
    parser.add_argument("--local", type=int, default=256, help="pairs of features per rank")
    parser.add_argument("--d", type=int, default=512, help="features")
    parser.add_argument("--out", type=Path, default=Path("bench-nodes"))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        shown = sys.argv[1 : sys.argv.index("--rank")]
        options.command = shlex.join(["python", "benchmarks/nodes.py", *shown])
        measure(options)
        return 0
    if os.geteuid():
        parser.error("network namespaces need root")
    with tempfile.TemporaryDirectory() as folder, namespaces():
        return start(sys.argv[1:], f"{folder}/store")


if __name__ == "__main__":
    sys.exit(main())
