"""The job scripts: golden texts of four clusters, hostile values read back by bash, illegal clusters refused.

Reference: sbatch(1), and for the quoting bash itself; that sbatch reads the options back unchanged is held on a real
SLURM in tests/e2e/test_slurm.py. MESHMARK_GOLDEN=write writes the golden texts anew.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bench.spec import ROOT, from_overrides
from sweeps.cluster import Cluster
from sweeps.points import Point, own_keys
from sweeps.slurm import arrays, launch
from trainer_core.config import ConfigError

GOLDEN = Path(__file__).parent / "golden"
FOLDER = Path("/shared/results with space/.jobs/meshmark-x-0")
HOSTILE = "sp ace 'single' \"double\" $HOME `id` $(id) ; , # % \\ \\\\ ünï ☃ -x =*?"
HOSTILE_CHANGES = {
    "partition": "a,b", "account": HOSTILE, "constraint": "[rack1|rack2]&ib", "qos": "a;b", "gpu_request": "gres",
    "sbatch_args": {"comment": HOSTILE, "reservation": "it's", "spread_job": True, "mail_user": None, "hold": False},
    "srun_args": [f"--container-name={HOSTILE}"], "env": {"NCCL_SOCKET_IFNAME": HOSTILE, "PLAIN": 1},
    "setup": ["source /etc/profile.d/modules.sh"],
}  # fmt: skip


def cluster(name: str) -> Cluster:
    return Cluster.load("bare", HOSTILE_CHANGES) if name == "hostile" else Cluster.load(name)


def script(of: Cluster, world: int = 4) -> str:
    texts = [[f"parallel.dp_shard={world}", f"train.seed={seed}"] for seed in range(3)]
    (array,) = arrays([Point.build(t) for t in texts], of, "meshmark-x")
    return array.script(FOLDER, of)


@pytest.mark.parametrize("name", ["bare", "gpu", "local", "hostile"])
def test_script_is_the_golden_text(name: str) -> None:
    text = script(cluster(name)).replace(sys.executable, "@PYTHON@").replace(str(ROOT), "@ROOT@")
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("MESHMARK_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_bash_reads_hostile_values_back() -> None:
    """The lines below #SBATCH, run with printf in the place of python."""
    of = Cluster.load("bare", {**HOSTILE_CHANGES, "setup": []})
    text = script(of).replace(f"exec {sys.executable}", "exec printf '%s\\0' \"$NCCL_SOCKET_IFNAME\"")
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == [HOSTILE, "-m", "sweeps.task", str(FOLDER)]
    assert shlex.split(shlex.join(of.agent_launcher(2)))[-1] == f"--container-name={HOSTILE}"


def test_a_bare_partition_asks_for_nothing_else() -> None:
    options = [line for line in script(cluster("bare")).splitlines() if line.startswith("#SBATCH")]
    own = ("array", "job-name", "nodes", "open-mode", "output", "requeue", "signal")
    assert [o for o in options if not o.startswith(tuple(f"#SBATCH --{name}" for name in own))] == [
        "#SBATCH --partition=compute"
    ]


def test_points_of_unlike_sizes_are_arrays_of_their_own() -> None:
    of = Cluster.load("gpu", {"max_array": 2})
    points = [Point.build([f"parallel.dp_shard={n}", f"train.seed={s}"]) for n in (2, 8, 16) for s in range(3)]
    found = arrays(points, of, "x")
    assert [(a.nodes, a.ranks, len(a.points)) for a in found] == [(1, 2, 2), (1, 2, 1), (1, 8, 2), (1, 8, 1),
                                                                  (2, 8, 2), (2, 8, 1)]  # fmt: skip
    assert len({a.name for a in found}) == len(found)


def test_how_to_submit_is_no_part_of_the_identity() -> None:
    plain = Point.build(["train.seed=3"])
    submitted = Point.build(["train.seed=3", "cluster=gpu", "cluster.qos=high", "cluster.env={NCCL_DEBUG: INFO}"])
    assert submitted.run_id == plain.run_id == from_overrides(["train.seed=3"]).run_id


def test_dryrun_writes_scripts_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    own = own_keys(["cluster=gpu", "cluster.time_min=7", f"results={results}"])
    assert launch([["parallel.dp_shard=16"], ["parallel.dp_shard=2"]], own, str(tmp_path / "sbatch")) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert len(paths) == 2 and all("#SBATCH --time=7\n" in p.read_text() for p in paths)
    assert not results.exists()


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("lokal", {}, "cluster=lokal is not one of bare, gpu, local"),
        ("bare", {"partitoin": "x"}, "unknown key cluster.partitoin; valid keys: cluster.name, cluster.partition"),
        ("bare", {"time_min": "soon"}, "cluster.time_min='soon': a value of type int or null"),
        ("bare", {"max_attempts": 0}, "cluster.max_attempts=0: at least 1"),
        ("bare", {"account": "a\nrm -rf /"}, "a line break can not stand in an option"),
        ("bare", {"sbatch_args": {"comment": "a\n#SBATCH --uid=0"}}, "a line break can not stand in an option"),
        ("bare", {"env": {"A=1; rm": "x"}}, "'A=1; rm' is not the name of a variable"),
    ],
)
def test_illegal_clusters_are_refused(name: str, changes: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        Cluster.load(name, changes)
    assert told in str(error.value)


def test_ranks_that_do_not_fill_nodes_are_refused_with_the_nearest_number() -> None:
    with pytest.raises(ConfigError, match="12 ranks do not fill whole nodes of 8: take 6 a node"):
        Cluster.load("gpu").shape(from_overrides(["parallel.dp_shard=12"]))
