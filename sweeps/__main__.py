"""``python -m sweeps [-m] KEY=VALUE ...``: Hydra's command line.

Exit codes: 0 ok, 1 some points failed, 2 usage error or invalid plan, 4 internal error.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

CONF = Path(__file__).resolve().parent / "conf"


def main() -> None:
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from bench.cli import UsageError
    from sweeps.schema import register
    from trainer_core.config import ConfigError

    sys.argv[0] = "python -m sweeps"  # the name in usage messages
    # Hydra takes plugins only from the top-level namespace package hydra_plugins: ours lies inside this package.
    sys.path.insert(0, str(CONF.parent / "plugins"))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of ending in Hydra's exit code 1
    register()
    # Hydra composes cluster.* too, though nobody reads it from there: ++ has it take keys that the file leaves out.
    sys.argv[1:] = [f"++{a.lstrip('+')}" if a.lstrip("+").startswith("cluster.") else a for a in sys.argv[1:]]
    try:
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(lambda config: None)()
    except ConfigError as error:
        _usage([p.message for p in error.problems])
    except UsageError as error:
        _usage([str(error).removesuffix(" with -o")])  # the option is bench run's
    except (HydraException, OmegaConfBaseException) as error:
        _usage(_explain(sys.argv[1:]) or [str(error)])


def _explain(arguments: list[str]) -> list[str]:
    """What our own reading of the overrides finds wrong: it lists the valid keys and values, Hydra does not."""
    from sweeps.points import Point, expand
    from trainer_core.config import ConfigError

    overrides = [a for a in arguments if "=" in a and not a.startswith(("-", "hydra"))]
    try:
        return sorted({p.message for job in expand(overrides) for p in Point.build(job).problems})
    except ConfigError as error:
        return [p.message for p in error.problems]


def _usage(messages: list[str]) -> None:
    print("\n".join(messages), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(4)
