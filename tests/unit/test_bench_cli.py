"""The commands as a script outside sees them. Reference: the contract's keys and exit codes; published model sizes."""

import json

import pytest

from bench import cli
from bench.run import claim
from bench.spec import from_overrides


@pytest.fixture
def bench(capsys):
    """(exit code, stdout, stderr) of a command."""

    def run(*argv: str):
        code = cli.main(list(argv))
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_describe(bench):
    code, out, _ = bench("describe", "model=llama3_8b", "parallel.dp_shard=8", "parallel.pp=2", "--json")
    data = json.loads(out)
    assert code == 0 and data["params"] == 8_030_261_248, "the size of Llama 3.1 8B's checkpoint"
    assert data["params_no_embedding"] == 8_030_261_248 - 128_256 * 4096
    assert data["world_size"] == 16 and data["layers_per_stage"] == [16, 16]
    assert data["state_gib"]["total"] == pytest.approx(16 * 8_030_261_248 / 16 / 2**30)
    assert {"flops_per_token", "tokens_per_step", "degrees", "microbatches", "float8"} <= set(data)


def test_validate(bench):
    code, out, _ = bench("validate", "parallel.tp=3", "--json")
    data = json.loads(out)
    assert code == 2 and not data["valid"]
    error = next(e for e in data["errors"] if e["conflicts_with"] == "model.heads")
    assert error["key"] == "parallel.tp" and error["value"] == 3 and error["nearest"] == [2, 4]
    assert "3" in error["message"] and "8" in error["message"]
    code, out, _ = bench("validate", "parallel.tp=2", "--json")
    assert code == 0 and json.loads(out) == {"valid": True, "errors": [], "warnings": []}


def test_mfu(bench):
    """PaLM's formula by hand: 8B at sequence 8192 spends 6 x 7.50e9 + 12 x 32 x 4096 x 8192 FLOPs a token."""
    argv = ("mfu", "--tps-per-gpu", "5762", "--device", "h100_80g", "model=llama3_8b", "data.seq_len=8192", "--json")
    _, out, _ = bench(*argv)
    data = json.loads(out)
    gemm = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert data["mfu"] == pytest.approx(5762 * (6 * gemm + 12 * 32 * 4096 * 8192) / 989.4e12, rel=1e-3)
    assert data["hfu"] == data["mfu"] and not data["flagged"] and data["reason"] is None
    _, out, _ = bench(*argv, "ac.mode=full")
    assert json.loads(out)["hfu"] > json.loads(out)["mfu"]
    _, out, _ = bench("mfu", "--tps-per-gpu", "50000", "--device", "h100_80g", "model=llama3_8b", "--json")
    assert json.loads(out)["flagged"]
    _, out, _ = bench(*argv, "precision.float8=tensorwise")
    assert json.loads(out)["mfu"] is None and "ill-defined" in json.loads(out)["reason"]
    _, out, _ = bench("mfu", "--tps-per-gpu", "1", "--json")
    assert json.loads(out)["mfu"] is None and "CPU" in json.loads(out)["reason"]


def test_an_invalid_run_starts_nothing(bench, tmp_path):
    code, out, err = bench("run", "parallel.tp=3", "-o", str(tmp_path), "--json")
    assert code == 2 and not list(tmp_path.iterdir())
    assert json.loads(out)["errors"][0]["nearest"] == [2, 4] and "nearest: 2 or 4" in err


def test_an_unwritable_folder_is_found_first(bench, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _, err = bench("run", "-o", str(blocked / "results"))
    assert code == 2 and "can not be written" in err


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (("describe", "model.dmi=3"), 2, "model.dim"),
        (("describe", "hardware=h1000"), 2, "h100_80g"),
        (("describe", "parallel.tp=1,2"), 2, "sweeps -m"),
        (("summarize", "/nonexistent"), 2, "not a run folder"),
        (("status", "/nonexistent"), 2, "no folder"),
    ],
)
def test_usage_errors(bench, argv, code, text):
    got, _, err = bench(*argv)
    assert got == code and text in err


def test_an_uncaught_exception_is_an_internal_error(bench, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "broken", ("math", "tau", ""))
    assert bench("broken")[0] == 4


def test_unsupported_says_the_way_out(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    code, out, _ = bench("run", "compile.enable=true", "-o", str(tmp_path), "--json")
    data = json.loads(out)
    assert code == 1 and data["status"] == "unsupported" and "apt-get install g++" in data["reason"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, _ = bench("run", "hardware=h100_80g", "-o", str(tmp_path), "--json")
    assert json.loads(out)["status"] == "unsupported" and "engine=simulate" in json.loads(out)["reason"]


def test_status(bench, tmp_path):
    folder = claim(from_overrides(["train.steps=6", "train.warmup_steps=1", "optim.lr=0.5"]), tmp_path, "s")
    rows = [{"kind": "start", "time": 1.0, "rank": 0, "pid": 1, "host": "h"}]
    rows += [{"kind": "step", "time": 2.0, "step": n, "loss": 3.0, "tokens": 100, "step_time_s": 0.5} for n in (1, 2)]
    folder.rank_file(0).write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = bench("status", str(tmp_path), "--json")
    data = json.loads(out)
    (point,) = data["points"]
    assert code == 0 and data["counts"] == {"running": 1}
    assert (point["status"], point["step"], point["steps"]) == ("running", 2, 6)
    assert (point["tps"], point["left_s"]) == (200.0, 2.0)
    assert "optim.lr=0.5" in point["plan"]
    folder.result.write_text("")
    code, out, _ = bench("status", str(tmp_path))
    assert code == 1 and "corrupt" in out and "1 points: 1 corrupt" in out


def test_doctor(bench, monkeypatch):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    code, out, _ = bench("doctor", "--json")
    data = json.loads(out)
    checks = {c["name"]: c for c in data["checks"]}
    assert code == (0 if data["ok"] else 1)
    assert {"python", "torch", "compiler", "disk", "shm", "open files", "cpu", "memory", "gpus", "slurm"} <= set(checks)
    assert checks["compiler"]["status"] == "warn" and "g++" in checks["compiler"]["advice"]
    assert all(c["advice"] for c in data["checks"] if c["status"] != "ok")
