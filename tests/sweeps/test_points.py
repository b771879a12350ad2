"""From text to points: the override grammar, sweep files, Hydra's composition, identity, selection."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.spec import RunSpec, from_overrides, groups, quote
from sweeps.points import OWN, SWEEPS, Point, SweepFile, expand, own_keys, unique
from sweeps.schema import register
from sweeps.work import Outcome, summary_line
from trainer_core.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = ["a, b", "x:y", "{c}", "[d]", "it's", 'say "hi"', "k=v", "#5", "é ü 漢", "back\\slash\\", "$HOME", "`ls`; *"]


def points(*arguments: str) -> list[Point]:
    return unique([Point.build(texts) for texts in expand(arguments)])


def test_a_grid_is_the_product_of_choices_ranges_and_globs() -> None:
    """Reference: counted by hand, 2 x 3 x 2."""
    found = points("model.dim=64,128", "train.seed=range(0,3)", "precision=glob(*16)", "parallel.tp=1", "ac=glob(*l*)")
    assert len(found) == 2 * 3 * 1 * 2
    assert {p.spec.config.ac.mode for p in found if p.spec} == {"full", "selective"}
    assert found[0].name == "dim=64 seed=0 ac=full"


def test_a_value_survives_from_the_shell_to_the_spec_and_back(tmp_path: Path) -> None:
    """Each hostile text is the value in the spec, and the reproduce command, through a shell, gives the same run_id."""
    for text in HOSTILE:
        override = f"data.corpus={quote('jsonl:/' + text)}"
        (point,) = points(override)
        assert point.spec is not None and point.spec.config.data.corpus == "jsonl:/" + text
        shown = subprocess.run(
            ["bash", "-c", f"printf '%s\\0' {point.spec.command()}"], capture_output=True, text=True, check=True
        ).stdout.split("\0")
        start, end = shown.index("run") + 1, shown.index("-o")
        assert from_overrides(shown[start:end]).run_id == point.run_id
        assert shlex.split(point.spec.command())[start:end] == shown[start:end]


def test_every_shipped_sweep_is_a_valid_plan_and_has_its_line_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in sorted(SWEEPS.glob("*.yaml")):
        found = points(f"sweep={path.stem}")
        assert found and not [p.reason for p in found if p.problems], path.stem
        assert len({p.name for p in found}) == len(found)
        assert SweepFile.load(path.stem).about
        assert f"`{path.stem}`" in readme, f"README.md has no line about sweep={path.stem}"
        assert len(points(f"sweep={path.stem}", "engine=simulate", "hardware=h100_80g")) == len(found)


def test_the_main_job_covers_the_strategies_on_one_global_batch() -> None:
    """At least 14 points over 12 layouts, equal in seed, data, precision of the parameters and global batch."""
    found = [p.spec for p in points("sweep=strategies") if p.spec]
    parallel = [s.config.parallel for s in found]
    layouts = {(*p.degrees.values(), p.schedule, p.cp_method) for p in parallel}
    assert len(found) >= 14 and len(layouts) >= 12
    assert len({(s.config.train.global_batch_size, s.config.train.seed, s.config.data) for s in found}) == 1
    assert {s.config.precision.param for s in found} == {"fp32"}
    assert all(s.run.repeats >= 5 and s.config.train.steps - s.config.train.warmup_steps >= 5 for s in found)
    techniques = [s for s in found if s.config.compile.enable or s.config.precision.float8 != "off"]
    assert techniques and max(s.world_size for s in techniques) <= 2
    assert max(s.world_size for s in found) == 16


def test_the_command_line_applies_on_top_of_every_point() -> None:
    base = points("sweep=smoke")
    found = points("sweep=smoke", "train.seed=7", "precision=bf16,fp32")
    assert len(found) == 2 * len(base)
    assert {p.spec.config.train.seed for p in found if p.spec} == {7}
    assert [p.name for p in points("sweep=smoke", "point=TP,FSDP")] == ["FSDP", "TP"]


def test_two_names_of_one_spec_are_one_point() -> None:
    assert len(points("parallel.tp=2", "parallel.world_size=-1,2", "parallel.loss_parallel=true,true")) == 1


def test_published_rows_are_points_of_any_sweep() -> None:
    found = points("published=glob(tt202412_8b_*)", "train.seed=0,1")
    assert len(found) >= 2 and {p.spec.engine for p in found if p.spec} == {"simulate"}
    for point in found:
        assert point.spec is not None and from_overrides(point.spec.overrides()) == point.spec


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep=strategy"], ["strategies", "smoke"]),
        (["sweep=smoke", "point=nope"], ["one rank", "FSDP", "TP"]),
        (["train.seed=interval(0,1)"], ["range("]),
        (["~model"], ["deleted"]),
        (["data.corpus='${oc.env:HOME}'"], ["not resolved"]),
        (["published=glob(nope*)"], ["published=glob(nope*) matches no published row", "tt202412_8b_8gpu_fsdp"]),
        (["train.steps=glob(*)"], ["glob() works for", "model"]),
        (["parallel.tp"], ["KEY=VALUE"]),
    ],
)
def test_what_is_no_point_is_refused_with_the_way_out(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        expand(arguments)
    assert all(word in str(error.value) for word in words)


def test_unknown_values_of_own_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="only=fail is not one of failed"):
        own_keys(["only=fail"])


@pytest.mark.parametrize(
    "counts, line",
    [
        ({"ok": 2, "failed": 1}, "3 points: 2 ok, 1 failed"),
        ({"timeout": 2, "invalid": 2}, "4 points: 0 ok, 4 failed (2 invalid, 2 timeout)"),
        ({"failed": 1, "oom": 1, "unsupported": 1, "not run": 1},
         "4 points: 0 ok, 2 failed (1 failed, 1 oom), 1 unsupported, 1 not run"),
    ],
)  # fmt: skip
def test_the_summary_line_counts_every_kind_of_failure(counts: dict[str, int], line: str) -> None:
    (point,) = points("train.seed=0")
    assert summary_line([Outcome(point, status) for status, n in counts.items() for _ in range(n)]) == line


def compose(overrides: list[str]) -> RunSpec:
    """The spec as Hydra composes it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(SWEEPS.parent), version_base="1.3"):
        data = OmegaConf.to_container(hydra_compose("config", overrides), resolve=True)
    assert isinstance(data, dict)
    return RunSpec.from_dict({k: v for k, v in data.items() if k not in OWN})


def test_hydra_composes_what_from_overrides_reads() -> None:
    """The two ways from text to a spec agree for every option of every group and every point of every sweep."""
    sys.path.insert(0, str(ROOT / "sweeps" / "plugins"))
    register()
    options = [[f"{group}={option}"] for group, known in groups().items() for option in known]
    for texts in options:
        if texts[0].startswith("parallel=") and texts[0] != "parallel=single":
            texts.append("parallel.world_size=8")
    shipped = [list(p.overrides) for path in SWEEPS.glob("*.yaml") for p in points(f"sweep={path.stem}")]
    for overrides in [*options, *shipped[::3]]:
        assert compose(overrides) == from_overrides(overrides), overrides


def run_sweeps(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sweeps", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=cwd, check=False)


def test_usage_errors_exit_2_and_list_what_is_valid(tmp_path: Path) -> None:
    for argument, word in (
        ("parallel.tpp=2", "parallel.tp"),
        ("model=lama", "llama3_8b"),
        ("parallel.tp=x", "type int"),
        ("parallel.tp=3", "model.heads=8"),
        ("report=after", "python -m reports build"),
        (f"results={__file__}", "can not be written (File exists): choose another folder\n"),
    ):
        done = run_sweeps(f"results={tmp_path}", argument)
        assert done.returncode == 2 and word in done.stderr, done
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.budget
def test_a_grid_of_1000_points_expands_and_validates_in_10_s(budget) -> None:  # type: ignore[no-untyped-def]
    begin = time.monotonic()
    found = points("model.dim=64,128,256,512", "parallel.tp=range(1,6)", "train.seed=range(0,50)", "precision=rowwise")
    took = time.monotonic() - begin
    assert len(found) == 1000 and 0 < sum(bool(p.problems) for p in found) < 1000
    json.dumps([p.run_id for p in found])
    budget("expand and validate 1,000 points", took, 10.0, "s")
