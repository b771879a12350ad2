"""A pool of gloo ranks for the whole test session: a rank costs 3 CPU-seconds to start, a new world 0.1 s."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp


class RankError(AssertionError):
    """A rank raised; the text is the first failing rank's traceback."""


class Pool:
    """Up to ``size`` ranks, started when first needed. ``run`` gives a function a world of its own."""

    def __init__(self, size: int):
        self.size, self.workers = size, []

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 300) -> list[Any]:
        """``function(*args)`` on ranks 0..world-1 of a fresh gloo group; its results by rank."""
        assert world <= self.size, f"{world} ranks, the pool has {self.size}"
        while len(self.workers) < world:
            self._start()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for rank, (_, pipe) in enumerate(self.workers[:world]):
            pipe.send((function, args, rank, world, port))
        answers = []
        for rank, (process, pipe) in enumerate(self.workers[:world]):
            if not pipe.poll(timeout) or not process.is_alive():
                self.close()
                raise RankError(f"rank {rank} of {world} did not answer in {timeout} s")
            answers.append(pipe.recv())
        failures = [(rank, text) for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.close()
            first = next((f for f in failures if "Connection closed" not in f[1]), failures[0])
            raise RankError(f"rank {first[0]} of {world}:\n{first[1]}")
        return [value for _, value in answers]

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        # ranks are forked from a server that has imported torch once
        context.set_forkserver_preload(["torch", "torch.distributed", "tests.dist.curves"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        self.workers.append((process, ours))

    def close(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_fast_path_sharding_prop_cache, _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, world, port = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
            value = function(*args)
            # teardown while a peer still sends ends in an abort
            dist.barrier()
            dist.destroy_process_group()
            # both hold on to the device meshes, that is the process groups, of the world that just ended
            torch._dynamo.reset()
            _clear_sharding_prop_cache()
            _clear_fast_path_sharding_prop_cache()
            pipe.send((True, value))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return
