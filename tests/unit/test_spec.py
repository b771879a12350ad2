"""The spec: its overrides, command line and identity survive every way there and back."""

import json
import random
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from bench import spec as specs
from bench.spec import RunSpec, from_overrides
from trainer_core.config import MODELS, ConfigError

ODD = [
    "a,b", "a:b", "{a}", "[1]", "it's", 'say "x"', "k=v", "#tag", "naïve 日本 🎉", "back\\slash", "end\\", "\\'",
    "$HOME", "`id`", "!x", "null", "true", "1.5", "nan", "a\\\\'b", "-x", "~/x", "%d", "(x)", "*", "a;b", "tab\tx",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_any_text_survives_the_command_line(text):
    """Through quote(), a POSIX shell's word splitting and Hydra's parser."""
    spec = from_overrides([f"data.corpus={specs.quote('jsonl:' + text)}", f"train.init_from={specs.quote(text)}"])
    assert spec.config.data.corpus == f"jsonl:{text}" and spec.config.train.init_from == text
    words = shlex.split(spec.command("out dir"))
    assert words[:4] == ["python", "-m", "bench", "run"] and words[-2:] == ["-o", "out dir"]
    assert from_overrides(words[4:-2]) == spec


def random_overrides(rng: random.Random) -> list[str]:
    pool = {
        "model": list(MODELS), "parallel.tp": [1, 2], "parallel.dp_shard": [1, 4],
        "parallel.reshard_after_forward": ["never"],
        "precision.float8": ["off", "rowwise"], "compile.enable": ["true", "false"], "ac.mode": ["none", "full"],
        "optim.lr": ["1e-4", "0.00037", "3"], "train.seed": [0, 7], "run.memory_limit_gib": ["null", "2.5"],
        "hardware": ["cpu", "h100_80g"], "engine": ["simulate", "measure"], "model.layers": [4, 16],
        "parallel": ["fsdp_tp"], "parallel.world_size": [8], "run.repeats": [1, 3],
    }  # fmt: skip
    keys = rng.sample(sorted(pool), 6)
    if "parallel" in keys and "parallel.world_size" not in keys:
        keys.append("parallel.world_size")
    if "parallel" not in keys and "parallel.world_size" in keys:
        keys.remove("parallel.world_size")
    return [f"{k}={rng.choice(pool[k])}" for k in keys]


def test_overrides_and_plain_data_give_the_spec_back():
    rng, seen = random.Random(0), set()
    for _ in range(150):
        try:
            spec = from_overrides(random_overrides(rng))
        except ConfigError:
            continue
        assert from_overrides(spec.overrides()) == spec
        assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
        seen.add(spec.run_id)
    assert len(seen) > 60


def test_order_of_overrides_does_not_matter_and_the_last_of_a_key_counts():
    keys = ["model.layers=4", "model=llama3_8b", "parallel.tp=2", "parallel=fsdp_tp", "parallel.world_size=8"]
    specs_found = {from_overrides(random.Random(i).sample(keys, len(keys))) for i in range(10)}
    (spec,) = specs_found
    assert (spec.config.model.dim, spec.config.model.layers, spec.config.parallel.dp_shard) == (4096, 4, 4)
    assert from_overrides(["train.seed=1", "train.seed=2"]).config.train.seed == 2


def test_everything_is_resolved():
    spec = from_overrides(["parallel.dp_shard=-1", "parallel.world_size=8", "parallel.tp=2", "parallel.pp=2"])
    assert (spec.config.parallel.dp_shard, spec.config.parallel.microbatches) == (2, 2)
    assert spec.config.train.global_batch_size == 16 and spec.world_size == 8
    assert -1 not in json.loads(json.dumps(spec.to_dict()["parallel"])).values()


SAME = ["run.repeats=9", "run.repeat_as=run", "train.init_from=/somewhere"]
OTHER = [
    "train.seed=1", "parallel.dp_shard=2", "parallel.tp=2", "hardware=h100_80g", "engine=simulate",
    "compile.enable=true", "run.profile=on", "data.corpus=synthetic", "model.layers=4", "optim.lr=0.5",
    "program.kv_expanded=true",
]  # fmt: skip


def test_run_id_is_of_the_point_alone():
    """Repeats and paths do not enter; what is trained, where and by which engine does; equal in another process."""
    base = from_overrides([]).run_id
    assert len(base) == 12 and {from_overrides([o]).run_id for o in SAME} == {base}
    others = [from_overrides([o]).run_id for o in OTHER]
    assert len({base, *others}) == len(OTHER) + 1
    assert from_overrides(["train.global_batch_size=8", "parallel.world_size=1"]).run_id == base
    code = "from bench.spec import from_overrides; print(from_overrides([]).run_id)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == base


def test_code_id_changes_with_the_code_and_the_device(tmp_path, monkeypatch):
    found = {specs.code_id(device) for device in ("cpu", "h100_80g", "h200")}
    assert len(found) == 3
    (tmp_path / "trainer_core").mkdir()
    (tmp_path / "trainer_core" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(specs, "ROOT", tmp_path)
    ids = []
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "trainer_core" / "a.py").write_text(text)
        specs.code_id.cache_clear()
        ids.append(specs.code_id("cpu"))
    monkeypatch.undo()
    specs.code_id.cache_clear()
    assert len({*ids, *found}) == 5


@pytest.mark.parametrize(
    ("overrides", "said", "nearest"),
    [
        (["parallel.tpp=2"], "parallel.cp", "parallel.tp"),
        (["paralel.tp=2"], "published", "parallel"),
        (["model=llama3_9b"], "llama3_10b", "llama3_8b"),
        (["hardware=h1000"], "h100_80g", None),
        (["engine=simulat"], "measure, simulate, torchtitan", "simulate"),
        (["model.dim.x=2"], "unknown key|type int", None),
        (["parallel.tp=2,4"], "python -m sweeps -m", None),
        (["parallel.tp"], "not KEY=VALUE", None),
        (["parallel.tp=two"], "type int", None),
        (["train.deterministic=3"], "type bool", None),
        (["run.repeats=0"], "at least 1", 1),
        (["data.corpus='${oc.env:HOME}'"], "is not resolved", None),
        (["~model.dim"], "deleted", None),
        (["published=nothing"], "is not one of", None),
        (["data.corpus=jsonl:a:b{c"], "in quotes", None),
    ],
)
def test_bad_input_lists_the_way_out(overrides, said, nearest):
    with pytest.raises(ConfigError, match=said) as caught:
        from_overrides(overrides)
    if nearest is not None:
        assert caught.value.problems[0].nearest == nearest


def test_every_fault_is_told_at_once():
    with pytest.raises(ConfigError) as caught:
        from_overrides(["parallel.tpp=2", "engine=none", "optim.lr=fast"])
    assert {p.key for p in caught.value.problems} == {"parallel.tpp", "engine", "optim.lr"}


@pytest.mark.parametrize("word", ["on", "off"])
def test_words_that_yaml_takes_for_booleans(word):
    """``on`` and ``off`` mean the option, also as the boolean that YAML makes of them."""
    flag = {"on": True, "off": False}[word]
    for data in ({"async_tp": word}, {"async_tp": flag}):
        assert RunSpec.from_dict({"parallel": data}).config.parallel.async_tp == word
    assert RunSpec.from_dict({"ac": {"mode": None}, "precision": {"float8": False}}).config.ac.mode == "none"
    assert RunSpec.from_dict({"run": {"profile": flag}}).run.profile == word


def test_check_uses_the_device():
    """MXFP8 is emulated on CPU, refused on an H100."""
    spec = from_overrides(["precision.float8=mxfp8"])
    assert specs.check(spec)[0] == []
    errors, _ = specs.check(replace(spec, hardware=replace(spec.hardware, device="h100_80g")))
    assert [e.key for e in errors] == ["precision.float8"]


@pytest.mark.parametrize(
    "text", ["run.wall_s=-1", "run.wall_s=nan", "run.hang_s=0", "run.memory_limit_gib=-3", "run.repeats=0"]
)
def test_limits_are_positive(text):
    """A limit that ends every run at once, or never, is refused before anything starts."""
    with pytest.raises(ConfigError) as error:
        from_overrides([text])
    assert error.value.problems[0].key == text.split("=")[0] and error.value.problems[0].nearest is not None
