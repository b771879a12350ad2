"""Engine "measure": a spec as supervised child processes, and what they wrote as a result. No torch here."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import environment, summary
from bench.endings import Ending, classify
from bench.ranks import read_ranks
from bench.result import METRICS, RunResult, Value
from bench.sim.hardware import load
from bench.spec import ROOT, RunSpec
from bench.store import RunDir
from bench.supervise import OnProgress, supervise


def unsupported(spec: RunSpec, elsewhere: bool) -> str | None:
    """Why this machine can not run the spec, with the way out; None if it can.

    ``elsewhere``: a launcher starts the ranks on other machines, so this one's devices say nothing.
    """
    cuda = load(spec.hardware.device).kind == "cuda"
    if cuda and not elsewhere:
        have = environment.visible_gpus()
        if have == 0:
            return (f"hardware={spec.hardware.device} needs CUDA devices and nvidia-smi finds none here; "
                    "engine=simulate predicts it, hardware=cpu runs here, cluster=NAME submits it")  # fmt: skip
        if have < spec.world_size:
            return (f"{spec.world_size} ranks need as many GPUs, {have} are visible here; "
                    "lower the degrees or submit to several nodes with cluster=NAME")  # fmt: skip
    if spec.config.compile.enable or spec.config.compile.loss:
        if not cuda and environment.cxx_compiler() is None:
            return ("torch.compile on CPU needs a C++ compiler and finds none: install g++ (apt-get install g++), "
                    "set CXX, or run with compile.enable=false compile.loss=false")  # fmt: skip
        if cuda and not elsewhere and environment.c_compiler() is None:
            return ("torch.compile on CUDA needs a C compiler and finds none: install gcc (apt-get install gcc), "
                    "set CC, or run with compile.enable=false compile.loss=false")  # fmt: skip
    return None


def rank_environment(spec: RunSpec) -> dict[str, str]:
    """The variables the ranks start with: this process's own, and defaults for what it leaves open."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
    if load(spec.hardware.device).kind == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
        if spec.world_size > 1:
            env.setdefault("OMP_NUM_THREADS", "1")
    return env


def cache_dir() -> Path:
    """Shared between runs, so that a graph is compiled once."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshmark"


def agent_command(
    spec: RunSpec, run: RunDir, module: str, launcher: Sequence[str], agent_args: Sequence[str]
) -> list[str]:
    """The node agent: one on this machine, or one a node behind ``launcher`` (srun, options, interpreter)."""
    where = ["--parent", str(os.getpid())] if not launcher else []
    nproc = [] if "--nproc" in agent_args else ["--nproc", str(spec.world_size)]
    agent = ["-m", "bench.node", *nproc, *agent_args, *where, "--module", module]
    return [*(launcher or [sys.executable]), *agent, str(run.spec), str(run.path)]


def measure(
    spec: RunSpec, run: RunDir, *, module: str = "trainer_core", launcher: Sequence[str] = (),
    agent_args: Sequence[str] = (), cancel: threading.Event | None = None, on_progress: OnProgress | None = None,
) -> RunResult:  # fmt: skip
    """Run ``spec`` in ``run`` (whose spec.json is written) and return its result, whatever the ending.

    A folder that an earlier attempt left is gone on with: the trainer resumes from its newest checkpoint.
    """
    reason = unsupported(spec, bool(launcher))
    if reason:
        return empty(spec, run, Ending("unsupported", reason))
    argv = agent_command(spec, run, module, launcher, agent_args)
    outcome = supervise(argv, rank_environment(spec), run, spec.run, spec.world_size, cancel or threading.Event(),
                        on_progress)  # fmt: skip
    ending = classify(read_ranks(run), spec.config.train.steps, spec.world_size, outcome)
    return summary.summarize(empty(spec, run, ending), spec, run)


def empty(spec: RunSpec, run: RunDir, ending: Ending) -> RunResult:
    """A result without figures: each is null, with the ending as its reason."""
    why = f"{ending.status}: {ending.reason}" if ending.reason else ending.status
    result = RunResult(
        spec.run_id, ending.status, spec.to_dict(), run.repeat, engine=spec.engine, reason=ending.reason,
        first_failed_rank=ending.first_failed_rank, steps_requested=spec.config.train.steps,
        world_size=spec.world_size, metrics={name: Value.none(name, why) for name in METRICS},
    )  # fmt: skip
    return replace(result, evidence={"error": ending.error} if ending.error else {})
