"""Plants a fault into the trainer's ranks: on PYTHONPATH, this module is imported by every Python that starts.

MESHMARK_TEST_FAULTS is JSON, ``train.seed`` -> {"kind", "rank", "step", "step_s"}: what happens at the start of a step,
and how long each step sleeps.
"""

import json
import os
import runpy
import signal
import sys
import time

FAULTS = json.loads(os.environ.get("MESHMARK_TEST_FAULTS", "{}"))
run_module = runpy.run_module


def fail(kind: str) -> None:
    if kind == "raise":
        raise ValueError("planted")
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1000)
    if kind == "block":  # deaf to the warning, so that the other ranks block inside a collective
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGTERM])
        time.sleep(1000)
    if kind == "eat":
        eaten = []
        while True:
            eaten.append(b"x" * (64 << 20))
            time.sleep(0.05)
    if kind == "fill":
        with open(os.path.join(sys.argv[2], "filler"), "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)


def plant(fault: dict) -> None:
    from trainer_core.train import Trainer

    train_step = Trainer.train_step

    def with_fault(self, step, *args):
        if fault.get("step") == step and fault["rank"] == int(os.environ["RANK"]):
            fail(fault["kind"])
        time.sleep(fault.get("step_s", 0))
        return train_step(self, step, *args)

    Trainer.train_step = with_fault


def run(name: str, *args, **kwargs):
    if name == "trainer_core":
        with open(sys.argv[1]) as file:
            fault = FAULTS.get(str(json.load(file)["train"]["seed"]))
        if fault:
            plant(fault)
    return run_module(name, *args, **kwargs)


runpy.run_module = run
