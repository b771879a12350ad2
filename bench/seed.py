"""``bench seed``: the initial parameters of a model as a checkpoint, for runs of every layout (``train.init_from``)."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from bench.spec import RunSpec, from_overrides


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the folder of the checkpoint")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")


def main(args: argparse.Namespace) -> int:
    from bench.cli import UsageError

    if args.out.exists() and any(args.out.iterdir()):
        raise UsageError(f"{args.out} is not empty: a seed goes into a folder of its own")
    write_seed(from_overrides(args.overrides), args.out)
    print(f"{args.out}: use it with train.init_from={args.out.resolve()}")
    return 0


def write_seed(spec: RunSpec, folder: Path) -> None:
    """Draw ``spec``'s model whole, in this process, by its ``train.seed``, and save it."""
    import torch
    import torch.distributed as dist

    from trainer_core.checkpoint import save_seed
    from trainer_core.config import ParallelConfig, PrecisionConfig, resolve
    from trainer_core.train import setup

    config = replace(spec.config, parallel=ParallelConfig(), precision=PrecisionConfig(param="fp32"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save_seed(folder, setup(resolve(config), torch.device("cpu")).parts)
    finally:
        dist.destroy_process_group()
