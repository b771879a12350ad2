"""Hydra's view of our sweeper and launchers: Hydra takes plugins from the namespace package hydra_plugins only."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from sweeps.points import OwnKeys, expand, own_keys
from trainer_core.config import ConfigError, Problem


class MeshmarkSweeper(Sweeper):
    """Expands the command line and the chosen sweep into points; ends the process with the launcher's exit code.

    Hydra's own sweeper composes every point with OmegaConf, which takes minutes for a thousand of them.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        launcher: Any = self.launcher
        launcher.own = own_keys(arguments)
        if launcher.own.cluster and not isinstance(launcher, SlurmLauncher):
            message = f"cluster={launcher.own.cluster} says how to submit: it needs hydra/launcher=slurm"
            raise ConfigError([Problem("cluster", launcher.own.cluster, message, "hydra/launcher", "slurm")])
        if launcher.own.report and not isinstance(launcher, SlurmLauncher):
            message = (f"report={launcher.own.report} is for hydra/launcher=slurm; here, once the sweep has ended: "
                       f"python -m reports build {shlex.quote(launcher.own.results)}")  # fmt: skip
            raise ConfigError([Problem("report", launcher.own.report, message, "hydra/launcher", "slurm")])
        launcher.launch(expand(arguments), initial_job_idx=0)
        sys.exit(launcher.exit_code)


class LocalLauncher(Launcher):
    """Runs the points on this machine, as many at once as it has cores for."""

    own: OwnKeys
    exit_code = 0

    def __init__(self, at_once: int | None = None):
        self.at_once = at_once

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from sweeps.local import launch

        self.exit_code = launch(job_overrides, self.own, self.at_once)
        return []


class SlurmLauncher(Launcher):
    """Submits the points as job arrays and returns; ``dryrun`` names a folder for the job scripts instead, ``report``
    the one in which ``report=after`` builds the report."""

    own: OwnKeys
    exit_code = 0

    def __init__(self, dryrun: str | None = None, report: str = "build/report"):
        self.dryrun, self.report = dryrun, report

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from sweeps.slurm import launch

        self.exit_code = launch(job_overrides, self.own, self.dryrun, self.report)
        return []


ConfigStore.instance().store(
    group="hydra/sweeper", name="meshmark", node={"_target_": f"{__name__}.MeshmarkSweeper"}, provider="meshmark"
)
ConfigStore.instance().store(
    group="hydra/launcher",
    name="local",
    node={"_target_": f"{__name__}.LocalLauncher", "at_once": None},
    provider="meshmark",
)
ConfigStore.instance().store(
    group="hydra/launcher",
    name="slurm",
    node={"_target_": f"{__name__}.SlurmLauncher", "dryrun": None, "report": "build/report"},
    provider="meshmark",
)
