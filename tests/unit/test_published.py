"""bench/published: the 32 rows make legal plans, and carry unit, rounding and source; a faulty row is refused."""

import pytest
import yaml

from bench import published
from bench.spec import PUBLISHED_DIR, check, from_overrides
from trainer_core.config import ConfigError

ROWS = published.rows()


def test_every_row_is_a_legal_plan_on_its_gpus():
    assert len(ROWS) == 32
    for row in ROWS.values():
        spec = row.spec()
        assert check(spec)[0] == [], row.id
        product = 1
        for degree in spec.config.parallel.degrees.values():
            product *= degree
        assert product == row.gpus == spec.world_size
        assert (spec.engine, spec.published) == ("simulate", row.id)
        assert from_overrides(spec.overrides()).run_id == spec.run_id


def test_every_figure_has_unit_rounding_and_source():
    for row in ROWS.values():
        assert row.source.commit and row.source.date and row.source.versions and row.unstated
        assert all(f.unit and f.rounding > 0 for f in row.figures.values())
        assert all(a.source for a in row.assumed)
        # What the source prints is a multiple of its last digit.
        for figure in row.figures.values():
            assert figure.value / figure.rounding == pytest.approx(round(figure.value / figure.rounding), abs=1e-6)


def test_global_batches_equal_the_published_ones():
    # Stated in tables 1, 3, 4 and 5 of the 2024 document.
    batches = {"8b_8gpu_fsdp": 16, "8b_128gpu_fsdp": 256, "70b_256gpu_2d": 512, "405b_512gpu_1f1b": 256}
    for name, size in batches.items():
        assert ROWS[f"tt202412_{name}"].spec().config.train.global_batch_size == size


def test_programs_differ_by_document_not_by_row():
    old, new = ROWS["tt202412_70b_256gpu_2d"].spec(), ROWS["ttasync_70b_256gpu_tensorwise_vanilla"].spec()
    assert (old.config.optim.impl, new.config.optim.impl) == ("foreach", "fused")
    assert (old.config.compile.loss, new.config.compile.loss) == (False, True)
    assert ROWS["tt202412_8b_8gpu_cp2_65536"].spec().program.cp_rotation == "allgather"
    assert ROWS["tt202412_405b_512gpu_1f1b"].spec().program.stage_outputs_kept


def test_select_takes_patterns_and_lists_the_known():
    assert len(published.select("tt202412_405b_*")) == 6
    with pytest.raises(ConfigError, match="matches none of .*trainy_8b_h200_64gpu"):
        published.select("trainy_9b*")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["rows"][0].update(gpus=12), "row trainy_8b_h200_32gpu: parallel.world_size=12, but the degrees"),
        (lambda d: d["rows"][0]["figures"].update(tps_per_gpu=[10938, "GiB", 1]), r"not \[value, tokens/s, rounding"),
        (lambda d: d["rows"][0]["figures"].update(tps_per_gpu=10938), r"not \[value, tokens/s, rounding"),
        (lambda d: d["document"].pop("commit"), "has no source: commit missing"),
        (lambda d: d["rows"][0].pop("workload"), "has no workload"),
        (lambda d: d["rows"][0]["stated"].update({"parallel.tp": 3}), r"dp_shard 32 x tp 3\) make 96"),
        (lambda d: d.update(program="nanotron"), "program nanotron is not one of torchtitan_2024_12"),
    ],
)
def test_a_faulty_row_is_refused(tmp_path, change, message):
    data = yaml.safe_load((PUBLISHED_DIR / "trainy_h200_2025_06.yaml").read_text())
    change(data)
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=message):
        published.read(path)
