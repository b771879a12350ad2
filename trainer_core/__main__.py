"""A rank: ``python -m trainer_core SPEC_JSON RUN_DIR`` under an agent that sets RANK, WORLD_SIZE and the rendezvous.

Events go to ``RUN_DIR/ranks/<rank>.jsonl``, one JSON line each. Exit code 0 at the last step, 75 where a signal ended
the run after a checkpoint, 1 after an exception, whose traceback is in the file.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import traceback
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer_core.config import TrainConfig, from_dict, resolve
from trainer_core.metrics import RankWriter
from trainer_core.train import run

INTERRUPTED = 75


def main(spec: Path, folder: Path) -> int:
    rank = int(os.environ["RANK"])
    rank_log = RankWriter(folder / "ranks" / f"{rank}.jsonl")
    rank_log.write("start", rank=rank, pid=os.getpid(), host=socket.gethostname())
    try:
        return _train(json.loads(spec.read_text()), folder, rank_log)
    except BaseException as error:
        rank_log.write(
            "error", rank=rank, type=type(error).__name__, message=str(error), traceback=traceback.format_exc()
        )
        raise


def _train(data: dict[str, Any], folder: Path, rank_log: RankWriter) -> int:
    config = resolve(from_dict(TrainConfig, {f.name: data[f.name] for f in fields(TrainConfig)}))
    device = _device()
    _quiet()
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.train.seed)
    rank_log.write("phase", name="init")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    whole = run(config, folder, rank_log, device, profile=data["run"]["profile"] == "on")
    # a rank that leaves while a peer still sends makes the peer abort
    dist.barrier()
    if whole:
        rank_log.write("end", steps_done=config.train.steps)
    dist.destroy_process_group()
    return 0 if whole else INTERRUPTED


def _device() -> torch.device:
    """The rank's GPU if the run's hardware has one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _quiet() -> None:
    """Keep out of the log what says nothing about the run."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
