"""A cluster: how its SLURM wants to be asked. ``sweeps/conf/cluster/NAME.yaml``; never part of a run_id."""

from __future__ import annotations

import dataclasses
import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from bench.sim.hardware import load as load_hardware
from bench.spec import RunSpec
from trainer_core.config import ConfigError, Problem, from_dict

CLUSTERS = Path(__file__).resolve().parent / "conf" / "cluster"


@dataclass(frozen=True)
class Cluster:
    """Every field can be left out; null (or empty) leaves the request to the site's default.

    What a job asks for:
        ``gpu_request``: how GPUs are asked for, ``--gpus-per-node``, ``--gres=gpu:`` or not at all; ``gpu_type`` as in
        ``gpu:h100:8``; ``gpus_per_node`` null takes the hardware's. ``sbatch_args``: any other option by its long name
        (a value, or true for a switch).
    How it runs there:
        ``setup``: shell lines before anything starts. ``container``: the command in front of the node agent, such as
        ``[apptainer, exec, --nv, image.sif]``; ``python``: the interpreter in it. ``srun_args``: options of the one
        srun that starts an agent a node. ``env``: variables of the ranks (NCCL_*). ``numa``: bind each rank to the
        NUMA node, socket or cores of its GPU.
    How long and how often:
        ``array_parallelism``: points of an array that run at once; ``max_array``: points in one array. ``signal_s``
        before the time limit the ranks write a checkpoint and the job goes back into the queue. ``max_attempts``:
        starts of one point in all, whatever ended the earlier ones (time limit, preemption, a failed node).
    """

    name: str = ""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool | None = None
    time_min: int | None = None
    mem: str | None = None
    cpus_per_task: int | None = None
    gpu_request: Literal["none", "gpus_per_node", "gres"] = "none"
    gpu_type: str | None = None
    gpus_per_node: int | None = None
    sbatch_args: dict[str, Any] = field(default_factory=dict)
    setup: list[str] = field(default_factory=list)
    container: list[str] = field(default_factory=list)
    python: str | None = None
    srun_args: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    numa: Literal["none", "node", "socket", "exclusive", "core-complex"] = "none"
    array_parallelism: int = 64
    max_array: int = 1000
    signal_s: int = 120
    max_attempts: int = 3

    @classmethod
    def load(cls, name: str, changes: Mapping[str, Any] | None = None) -> Cluster:
        """The cluster of a file with ``changes`` (field -> value). Raises ConfigError for what is unknown."""
        path = CLUSTERS / f"{name}.yaml"
        if not path.exists():
            known = sorted(p.stem for p in CLUSTERS.glob("*.yaml"))
            near = difflib.get_close_matches(name, known, 1)
            message = f"cluster={name} is not one of {', '.join(known)}; a new one is a file in sweeps/conf/cluster"
            raise ConfigError([Problem("cluster", name, message, nearest=near[0] if near else None)])
        data: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
        for key, value in (changes or {}).items():
            data[key] = {**data.get(key, {}), **value} if isinstance(value, Mapping) else value
        data["name"] = name
        cluster = from_dict(cls, data, "cluster.")
        problems = [*_line_breaks(cluster), *_too_small(cluster), *_bad_names(cluster)]
        if problems:
            raise ConfigError(problems)
        return cluster

    def shape(self, spec: RunSpec) -> tuple[int, int]:
        """(nodes, ranks a node) of a spec: the hardware's GPUs a node, unless this cluster has another number.

        Raises ConfigError where the ranks do not fill whole nodes.
        """
        if spec.engine == "simulate":
            return 1, 1
        hardware = load_hardware(spec.hardware.device)
        per_node = self.gpus_per_node or spec.hardware.gpus_per_node or hardware.gpus_per_node
        if spec.world_size <= per_node:
            return 1, spec.world_size
        if spec.world_size % per_node:
            legal = [n for n in range(per_node, 0, -1) if spec.world_size % n == 0]
            raise ConfigError([Problem("cluster.gpus_per_node", per_node, f"{spec.world_size} ranks do not fill whole "
                                       f"nodes of {per_node}: take {legal[0]} a node, or other degrees",
                                       conflicts_with="parallel.world_size", nearest=legal[0])])  # fmt: skip
        return spec.world_size // per_node, per_node

    def sbatch_parameters(self, nodes: int, ranks: int) -> dict[str, Any]:
        """submitit's parameters of a job of ``nodes`` x ``ranks``; None leaves an option out.

        One task a node is SLURM's own default, so it is not asked for: some sites refuse the option.
        """
        same = ("partition", "account", "qos", "constraint", "mem", "cpus_per_task")
        p: dict[str, Any] = {key: getattr(self, key) for key in same}
        p |= {"nodes": nodes, "time": self.time_min, "exclusive": self.exclusive or None}
        gpus = f"{self.gpu_type}:{ranks}" if self.gpu_type else str(ranks)
        p["gres"] = f"gpu:{gpus}" if self.gpu_request == "gres" else None
        extra = {"gpus-per-node": gpus} if self.gpu_request == "gpus_per_node" else {}
        extra |= {k.replace("_", "-"): v for k, v in self.sbatch_args.items() if v not in (None, False)}
        return {**p, "additional_parameters": extra}

    def setup_lines(self) -> list[str]:
        """Shell lines: the variables, quoted, then the site's own set-up as it stands."""
        return [*(f"export {k}={shlex.quote(str(v))}" for k, v in self.env.items()), *map(str, self.setup)]

    def agent_launcher(self, nodes: int) -> list[str]:
        """The command in front of the node agent: one task a node, all ended when one fails."""
        srun = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--kill-on-bad-exit=1", "--unbuffered", "--quiet"]
        if self.cpus_per_task is not None:  # since SLURM 22.05 srun does not take it over from sbatch
            srun.append(f"--cpus-per-task={self.cpus_per_task}")
        return [*srun, *map(str, self.srun_args), *map(str, self.container)]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _line_breaks(cluster: Cluster) -> list[Problem]:
    """A line break would end an ``#SBATCH`` line and start a command."""
    return [
        Problem(f"cluster.{key}", value, f"cluster.{key}={value!r}: a line break can not stand in an option")
        for key, value in {**cluster.to_dict(), **cluster.sbatch_args}.items()
        if isinstance(value, str) and ("\n" in value or "\r" in value)
    ]


def _bad_names(cluster: Cluster) -> list[Problem]:
    """What would be read as more than a name in the script."""
    variables = [k for k in cluster.env if not re.fullmatch(r"[A-Za-z_]\w*", str(k), re.ASCII)]
    options = [k for k in cluster.sbatch_args if not re.fullmatch(r"[a-z][\w-]*", str(k), re.ASCII)]
    return [
        *(Problem("cluster.env", k, f"cluster.env: {k!r} is not the name of a variable") for k in variables),
        *(Problem("cluster.sbatch_args", k, f"cluster.sbatch_args: {k!r} is not an option's long name, without its "
                  "dashes") for k in options),
    ]  # fmt: skip


def _too_small(cluster: Cluster) -> list[Problem]:
    """Counts that must be at least one."""
    names = ("array_parallelism", "max_array", "max_attempts", "gpus_per_node", "cpus_per_task", "time_min")
    values = {name: getattr(cluster, name) for name in names}
    return [
        Problem(f"cluster.{name}", value, f"cluster.{name}={value}: at least 1", nearest=1)
        for name, value in values.items()
        if value is not None and value < 1
    ]
