"""Process groups for the tests: real ranks on gloo, with hard time-outs and every rank's traceback.

    results = pool(3).run(function, *args)      # function(*args) on ranks 0, 1, 2 of a running group
    outcomes = fresh_group(2, function, ...)    # a group of its own, for tests that break it

A function must be defined at the top level of a module, because it is pickled by name. Pools are kept for the whole
test session; a pool in which a test failed is replaced.
"""

import contextlib
import datetime
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

READY = "ready"

PRELOADED = ["tests.ranks", "tests.helpers", "contratile", "contratile.engine.autograd", "torch.nn.parallel"]
"""What a process imports from which ranks are forked: each would take seconds for it."""


class Outcome(NamedTuple):
    """How a rank ended: its result, its traceback, or neither if it died or was killed at the time-out."""

    ok: bool
    result: Any


def torchrun(world: int, folder: Path) -> list[str]:
    """The command that starts the `-m module` or script after it on `world` processes."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]


def accelerate_launch(world: int, folder: Path) -> list[str]:
    """The same with accelerate, which uses MPI on CPUs and needs a file of hosts, written to `folder`."""
    hosts = folder / "hosts"
    hosts.write_text(f"localhost slots={world}\n")
    options = (
        f"--cpu --num_processes {world} --num_machines 1 --mpirun_hostfile {hosts} --main_process_port {free_port()}"
    )
    return [sys.executable, "-m", "accelerate.commands.launch", *options.split()]


def launch_environment() -> dict[str, str]:
    """One thread per process, MPI on the path, and MPI allowed to run as root."""
    as_root = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **as_root, "PATH": path, "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def process_context() -> Any:
    """How processes are started: forked from a process that has imported what they need and computed nothing."""
    if sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(rank: int, world: int, port: int, timeout: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    # On a busy machine ranks start far apart: a short time-out applies only when all have started.
    patient, limit = (datetime.timedelta(seconds=seconds) for seconds in (600, timeout))
    store = TCPStore("127.0.0.1", port, world, rank == 0, timeout=patient)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    store.set_timeout(limit)
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, args = task
        pipe.send(READY)  # unpickling imported the function's module, which takes each rank a different time
        pipe.recv()
        try:
            outcome = Outcome(True, function(*args))
        except BaseException:
            outcome = Outcome(False, traceback.format_exc())
        pipe.send(outcome)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


class Pool:
    """`world` ranks that run one function after the other."""

    def __init__(self, world: int, *, timeout: float = 580.0) -> None:
        context, port = process_context(), free_port()
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.broken = False

    def outcomes(
        self, function: Callable[..., Any], *args: Any, limit: float = 600.0, ranks: tuple[int, ...] | None = None
    ) -> list[Outcome]:
        """One outcome per rank, after at most `limit` seconds or when all of `ranks` have answered.

        All ranks start together, so that a short time-out of the group measures the function only.
        """
        for pipe in self.pipes:
            pipe.send((function, args))
        for step in (Connection.recv, lambda pipe: pipe.send(READY)):
            for pipe in self.pipes:
                with contextlib.suppress(EOFError, OSError):  # a rank that died is reported below
                    step(pipe)
        start = time.monotonic()
        found: dict[int, Outcome] = {}
        awaited = set(range(len(self.pipes)) if ranks is None else ranks)
        while awaited - found.keys() and time.monotonic() - start < limit:
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in found}
            for rank in map(waiting.__getitem__, wait(list(waiting), timeout=1.0)):
                try:
                    found[rank] = self.pipes[rank].recv()
                except EOFError:
                    found[rank] = Outcome(False, "the process died")
        late = Outcome(False, "no answer in time")
        result = [found.get(rank, late) for rank in range(len(self.pipes))]
        self.broken = self.broken or not all(outcome.ok for outcome in result)
        return result

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results in rank order; fails with all tracebacks if a rank failed."""
        outcomes = self.outcomes(function, *args)
        bad = [f"--- rank {rank}\n{out.result}" for rank, out in enumerate(outcomes) if not out.ok]
        assert not bad, "\n".join(bad)
        return [outcome.result for outcome in outcomes]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(0.1 if self.broken else 60)
            if process.is_alive():
                process.kill()
                process.join()


_pools: dict[int, Pool] = {}


def pool(world: int) -> Pool:
    """The session's pool of that size."""
    if world in _pools and _pools[world].broken:
        _pools.pop(world).close()
    if world not in _pools:
        _pools[world] = Pool(world)
    return _pools[world]


def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


@contextlib.contextmanager
def fresh_group(world: int, *, timeout: float) -> Iterator[Pool]:
    """A group of its own with a short time-out, for tests that kill or stall a rank."""
    group = Pool(world, timeout=timeout)
    try:
        yield group
    finally:
        group.broken = True
        group.close()
