#!/usr/bin/env python3
"""A real SLURM on one machine, for development and tests: ``local.py up|down [FOLDER]``.

Debian's packages (slurm-wlm slurmctld slurmd slurm-client munge, slurmdbd mariadb-server), started by hand: no systemd,
no root needed, everything in FOLDER. Four nodes share the machine; each has eight make-believe GPUs, so that a
``--gpus-per-node`` request is accepted. Accounting is slurmdbd on a private MariaDB, so that ``sacct`` is the real one.
``up`` prints the ``export`` lines that a shell needs, and changes nothing where SLURM already runs: ``eval "$(make -s
slurm-up)"``. ``down`` cancels every job, waits for their processes and stops the daemons; FOLDER can then be deleted.

Partitions: test (n1-n2, the default), spare (n3, to kill), low and high (n4: a job in high preempts those in low).
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
BINARIES = ("munged", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "mariadb-install-db", "sinfo", "sbatch")
PACKAGES = "slurm-wlm slurmctld slurmd slurm-client munge slurmdbd mariadb-server"
DEFAULT = Path(__file__).resolve().parents[2] / "build" / "slurm"
MAX_SOCKET_PATH = 107  # sun_path of a unix socket, without its final zero

SLURM_CONF = """\
ClusterName=meshmark
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={folder}/munge.sock
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
KillWait=5
KillOnBadExit=1
GresTypes=gpu
{versioned}
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first_port}-{last_port}] CPUs=16 RealMemory=20000 \
Gres=gpu:{gpus} State=UNKNOWN
PartitionName=test Nodes=n[1-2] Default=YES MaxTime=INFINITE PreemptMode=OFF State=UP
PartitionName=spare Nodes=n3 MaxTime=INFINITE PreemptMode=OFF State=UP
PartitionName=low Nodes=n4 MaxTime=INFINITE PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes=n4 MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""

DBD_CONF = """\
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=meshmark
StoragePass={password}
StorageLoc=slurm_acct
"""


class SlurmError(RuntimeError):
    """What is missing or would not start, and where to look."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT)
    args = parser.parse_args(argv)
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    try:
        folder = args.folder.resolve()
        if args.action == "down":
            down(folder)
            return 0
        started = time.monotonic()
        up(folder)
        took = time.monotonic() - started
        print(f"SLURM {version()[0]}.{version()[1]:02d} in {folder}, {took:.1f} s", file=sys.stderr)
        print(f"export SLURM_CONF={folder}/slurm.conf")
        return 0
    except SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def up(folder: Path) -> None:
    """Start what does not run yet, and return when every node is idle or busy. Raises SlurmError."""
    check(folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    if not (folder / "slurm.conf").exists():
        configure(folder)
    start_munge(folder)
    start_database(folder)
    if not running(folder / "slurmdbd.pid", "slurmdbd"):
        start(["slurmdbd"], folder / "slurmdbd.log")
        wait(lambda: answers("sacctmgr", "-n", "list", "cluster"), "slurmdbd to answer", folder / "slurmdbd.log")
    if "meshmark" not in output("sacctmgr", "-n", "list", "cluster", "format=cluster"):
        output("sacctmgr", "-i", "add", "cluster", "meshmark")
    if not running(folder / "slurmctld.pid", "slurmctld"):
        start(["slurmctld"], folder / "slurmctld.log")
    for node in NODES:
        if not running(folder / f"slurmd.{node}.pid", "slurmd"):
            start(["slurmd", "-N", node], folder / f"slurmd.{node}.log")
    wait(lambda: up_nodes() == set(NODES), "every node to register", folder / "slurmctld.log")


def down(folder: Path) -> None:
    """Cancel all jobs, wait for their processes, stop the daemons. Nothing of it is left running."""
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    if running(folder / "slurmctld.pid", "slurmctld"):
        subprocess.run(["scancel", "--user", getpass.getuser()], capture_output=True, timeout=30)
        with contextlib.suppress(SlurmError):  # a job that can not be killed must not keep the daemons up
            wait(lambda: not output("squeue", "-h"), "the jobs to end", folder / "slurmctld.log", 20)
    daemons = [(folder / f"slurmd.{node}.pid", "slurmd") for node in NODES]
    daemons += [(folder / f"{name}.pid", name) for name in ("slurmctld", "slurmdbd", "mariadbd", "munged")]
    for pid_file, name in daemons:
        pid = running(pid_file, name)
        if pid:
            stop(pid)
        pid_file.unlink(missing_ok=True)


def check(folder: Path) -> None:
    """The packages are there and the folder's name can be written into slurm.conf and into a socket's address."""
    missing = [name for name in BINARIES if not shutil.which(name)]
    if missing:
        raise SlurmError(f"{', '.join(missing)} not found: apt-get install -y --no-install-recommends {PACKAGES}")
    if not re.fullmatch(r"[\w./+-]+", str(folder), re.ASCII) or len(str(folder / "mariadbd.sock")) > MAX_SOCKET_PATH:
        raise SlurmError(f"{folder}: slurm.conf takes no spaces, quotes, commas or '#', and a socket's path at most "
                         f"{MAX_SOCKET_PATH} bytes: choose a short plain folder, such as /tmp/slurm")  # fmt: skip


def configure(folder: Path) -> None:
    """Write slurm.conf last: its presence means that the configuration is whole."""
    base = free_ports(3 + len(NODES))
    gpus = gpu_files()
    modern = version() >= (23, 2)
    values = {
        "folder": folder, "user": getpass.getuser(), "host": socket.gethostname().split(".")[0], "gpus": len(gpus),
        "ctld_port": base, "dbd_port": base + 1, "sql_port": base + 2, "first_port": base + 3,
        "last_port": base + 2 + len(NODES), "password": secrets.token_hex(16),
        # The key moved in 23.02; where it is not known, it takes every client down.
        "versioned": "PreemptParameters=send_user_signal" if modern else "SlurmctldParameters=preempt_send_user_signal",
    }  # fmt: skip
    (folder / "state").mkdir(exist_ok=True)
    write_private(folder / "munge.key", secrets.token_bytes(128))
    write_private(folder / "slurmdbd.conf", DBD_CONF.format(**values).encode())
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={path}\n" for path in gpus))
    if modern:  # these versions ask for a cgroup even where no plugin uses one
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    (folder / "slurm.conf").write_text(SLURM_CONF.format(**values))


def gpu_files() -> list[str]:
    """Up to eight character devices that stand for GPUs: without real device files SLURM drains the node."""
    names = [*(f"tty{i}" for i in range(8)), "null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"]
    found = [f"/dev/{n}" for n in names if os.path.exists(f"/dev/{n}") and stat.S_ISCHR(os.stat(f"/dev/{n}").st_mode)]
    return found[:8]


def start_munge(folder: Path) -> None:
    if not running(folder / "munged.pid", "munged"):
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munge.log",
                 "seed-file": "munge.seed"}  # fmt: skip
        start(["munged", "--force", *(f"--{k}={folder}/{v}" for k, v in files.items())], folder / "munge.log")


def start_database(folder: Path) -> None:
    """MariaDB on a port of 127.0.0.1, with the one user and database that slurmdbd.conf names."""
    if running(folder / "mariadbd.pid", "mariadbd"):
        return
    conf = dict(line.split("=", 1) for line in (folder / "slurmdbd.conf").read_text().splitlines())
    data, log, user = folder / "db", folder / "mariadbd.log", f"--user={getpass.getuser()}"
    sql = folder / "init.sql"
    write_private(sql, (f"CREATE DATABASE IF NOT EXISTS {conf['StorageLoc']};\n"
                        f"GRANT ALL ON {conf['StorageLoc']}.* TO 'meshmark'@'127.0.0.1' IDENTIFIED BY "
                        f"'{conf['StoragePass']}';\n").encode())  # fmt: skip
    if not (data / "mysql").exists():
        start(["mariadb-install-db", "--no-defaults", f"--datadir={data}", user, "--skip-test-db"], log)
    with open(log, "ab") as out:
        subprocess.Popen(["mariadbd", "--no-defaults", f"--datadir={data}", user, f"--socket={folder}/mariadbd.sock",
                          "--bind-address=127.0.0.1", f"--port={conf['StoragePort']}", f"--init-file={sql}",
                          f"--pid-file={folder}/mariadbd.pid", "--skip-name-resolve",
                          "--innodb-flush-log-at-trx-commit=0"],
                         stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    wait(lambda: running(folder / "mariadbd.pid", "mariadbd"), "MariaDB to start", log)


def version() -> tuple[int, int]:
    """(22, 5) of ``slurm-wlm 22.05.8``."""
    found = re.search(r"(\d+)\.(\d+)", output("slurmctld", "-V"))
    if not found:
        raise SlurmError("slurmctld -V does not tell its version")
    return int(found[1]), int(found[2])


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring free TCP ports, below the range of outgoing connections."""
    for base in range(16800, 32000, count):
        try:
            for port in range(base, base + count):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
            return base
        except OSError:
            continue
    raise SlurmError(f"no {count} neighbouring free ports between 16800 and 32000")


def up_nodes() -> set[str]:
    return set(re.findall(r"^(\S+) (?:idle|mix|alloc)", output("sinfo", "-h", "-N", "-o", "%N %T"), re.M))


def running(pid_file: Path, name: str) -> int:
    """The pid in ``pid_file`` if a process of that name has it, else 0."""
    try:
        pid = int(pid_file.read_text())
        return pid if name[:15] == Path(f"/proc/{pid}/comm").read_text().strip() else 0
    except (OSError, ValueError):
        return 0


def stop(pid: int) -> None:
    for sig, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)
        end = time.monotonic() + patience
        while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                return
            time.sleep(0.05)
        if not Path(f"/proc/{pid}").exists():
            return


def start(command: list[str], log: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SlurmError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}; log: {log}")


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def answers(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def wait(condition, what: str, log: Path, patience: float = 60.0) -> None:
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            tail = log.read_text(errors="replace")[-500:] if log.exists() else "(no log)"
            raise SlurmError(f"waited {patience:.0f} s for {what}; the end of {log}:\n{tail}")
        time.sleep(0.1)


def write_private(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


if __name__ == "__main__":
    sys.exit(main())
