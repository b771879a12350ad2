"""What a results folder says, whatever state it is in. Reference: one row a folder, named in the requirements."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from bench.endings import Ending
from bench.measure import empty
from bench.result import Value
from bench.run import claim
from bench.spec import from_overrides
from bench.store import finished, load_all, own, owner_lives, write_text


@pytest.fixture
def spec():
    return from_overrides(["train.steps=6", "train.warmup_steps=1"])


def store(spec, results, status="ok", steps=6, loss=1.0, **values):
    folder = claim(spec, results)
    result = replace(
        empty(spec, folder, Ending(status)), steps_done=steps, started_at=folder.path.name, code_id="c",
        metrics={"final_loss": Value(loss, n=1, unit="nats")}, environment={"fingerprint": "f"}, **values,
    )  # fmt: skip
    write_text(folder.result, result.to_json())
    return folder


def test_every_state_gets_its_row(spec, tmp_path):
    good = store(spec, tmp_path)
    shutil.copytree(good.path, good.path.with_name("r000 (copy)"))
    shutil.copytree(tmp_path / "runs", tmp_path / "copied-sweep")
    cut = store(spec, tmp_path)
    cut.result.write_text(cut.result.read_text()[:200])
    store(spec, tmp_path).result.write_text("")
    nan = store(spec, tmp_path)
    nan.result.write_text(nan.result.read_text().replace('"value": 1.0', '"value": NaN'))
    store(spec, tmp_path, "oom", steps=2)
    store(spec, tmp_path, steps=4)
    store(spec, tmp_path, attempts=2)
    odd = store(spec, tmp_path)
    odd.result.write_text("[1]")
    rows = {(r.repeat, r.sweep): r for r in load_all(tmp_path)}
    kept = [r.status for r in load_all(tmp_path)]
    assert sorted(kept) == sorted(["ok", "corrupt", "corrupt", "diverged", "oom", "incomplete", "ok", "corrupt"])
    assert sum(r.attempts == 2 for r in rows.values()) == 1
    assert next(r for r in rows.values() if r.status == "incomplete").reason == "4 of 6 steps done"


def test_a_run_without_a_result(spec, tmp_path):
    folder = claim(spec, tmp_path)
    assert [r.status for r in load_all(tmp_path)] == ["queued"]
    folder.rank_file(0).write_text("")
    assert [(r.status, r.steps_requested) for r in load_all(tmp_path)] == [("running", 6)]
    owner = json.loads(folder.owner.read_text())
    folder.owner.write_text(json.dumps(owner | {"created": "1"}))
    assert [r.status for r in load_all(tmp_path)] == ["lost"], "the pid was given to another process"
    folder.owner.write_text(json.dumps(owner | {"host": "elsewhere"}))
    assert owner_lives(folder) is None
    own(folder)
    assert owner_lives(folder) is True


def test_finished_needs_the_same_code_and_machine(spec, tmp_path):
    folder = store(spec, tmp_path)
    store(spec, tmp_path, "failed")
    shutil.copytree(folder.path, folder.path.with_name("r009"))
    assert len(finished(tmp_path, spec, "c", "f")) == 1
    assert finished(tmp_path, spec, "other", "f") == finished(tmp_path, spec, "c", "other") == []
    assert finished(tmp_path, replace(spec, engine="simulate"), "c", "f") == []


def test_claims_at_the_same_time_get_their_own_folders(spec, tmp_path):
    with ThreadPoolExecutor(16) as pool:
        paths = list(pool.map(lambda _: claim(spec, tmp_path).path, range(16)))
    assert len(set(paths)) == 16
    assert not [p for p in os.listdir(paths[0]) if p.startswith(".")], "no temporary file is left"
