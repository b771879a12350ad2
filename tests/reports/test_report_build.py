"""The written report: golden files, the same numbers in every form, hostile names, 0, 1 and 40 runs, its commands."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import synthetic

from bench import published
from bench.result import RunResult, Status, Value
from bench.store import RESULT
from reports import points, table
from reports.__main__ import main
from reports.notices import find

GOLDEN = Path(__file__).parent / "golden"
SECTIONS = ["summary", "heatmaps", "ladder", "loss", "memory", "verdicts", "claims", "runs", "environment"]


class Page(HTMLParser):
    """Elements by name, section ids, and the text of each row of the runs table."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[str]] = {}
        self.text = ""
        self._row = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self._row = dict(attrs).get("data-run-id") or ""
        if tag == "td" and self._row:
            self.rows.setdefault(self._row, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._row = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._row and self.rows.get(self._row):
            self.rows[self._row][-1] += data + " "

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def build(results: Path, out: Path, code: int = 0) -> Page:
    assert main(["build", str(results), "-o", str(out)]) == code
    page = Page((out / "index.html").read_text())
    sections = [a["id"] for a in page.of("section")]
    assert [s for s in sections if s != "scaling"] == SECTIONS
    assert all((a.get("src") or "") == "" for _, a in page.tags), "something is loaded from elsewhere"
    return page


def read_csv(out: Path) -> list[dict[str, str]]:
    with open(out / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Four runs, ids in place of digests so that the golden files do not depend on the spec's fields."""
    folder = tmp_path / "small"
    cases: list[tuple[dict[str, dict[str, object]], float, Status]] = [
        ({"parallel": {"dp_shard": 1}, "train": {"local_batch_size": 8}}, 2000.0, "ok"),
        ({}, 1500.0, "ok"),
        ({"compile": {"enable": True}}, 1800.0, "ok"),
        ({"parallel": {"dp_shard": 2, "cp": 2}, "train": {"local_batch_size": 4}}, 1.0, "oom"),
    ]
    for i, (sections, tps, status) in enumerate(cases):
        made = synthetic.result(synthetic.spec(**sections), tps, status, 2.0 + i)
        synthetic.write(folder, replace(made, run_id=f"run{i}"), losses=synthetic.decay(shift=i * 1e-5))
    return folder


@pytest.mark.parametrize("name", ["report.md", "results.csv"])
def test_golden(small: Path, name: str) -> None:
    """MESHMARK_GOLDEN=write renews the files; read the difference before committing it."""
    build(small, small.parent / "out")
    text = (small.parent / "out" / name).read_text()
    if os.environ.get("MESHMARK_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


def test_one_table_feeds_every_form(small: Path) -> None:
    """Each printed figure is the CSV's number in the page's format; Parquet holds the same numbers."""
    import pandas as pd

    out = small.parent / "out"
    page, markdown = build(small, out), (out / "report.md").read_text()
    frame = pd.read_parquet(out / "results.parquet").set_index("run_id")
    for row in read_csv(out):
        cells = page.rows[row["run_id"]]
        (line,) = [x for x in markdown.splitlines() if x.startswith(f"| {row['run_id']} |")]
        for key, index in (("tps_per_gpu", 2), ("tps_global", 3), ("memory_gib", 4), ("final_loss", 6)):
            printed = table.show(float(row[key]) if row[key] else None, table.BY_KEY[key].unit)
            assert cells[index].split()[0] == printed, (key, cells[index])
            assert f"| {printed} |" in line
            assert (
                frame.loc[row["run_id"], key] == float(row[key]) if row[key] else pd.isna(frame.loc[row["run_id"], key])
            )


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    h = synthetic.HOSTILE
    statuses: tuple[Status, ...] = ("ok", "ok", "failed")
    for i, status in enumerate(statuses):
        s = synthetic.spec(
            model={"name": h}, data={"corpus": f"jsonl:{h}"}, train={"seed": i}, compile={"enable": i == 1}
        )
        made = synthetic.result(s, 1000 + i, status, reason=f"=HYPERLINK({h})" if i == 2 else None)
        made = replace(made, sweep=h, environment={"fingerprint": h, h: h}, code_id=h, command=f"+{h}")
        folder = synthetic.write(tmp_path / "in", made, "sweep", synthetic.decay())
        (folder / RESULT).write_text(made.to_json())
    page, out = build(tmp_path / "in", tmp_path / "out"), tmp_path / "out"
    assert not page.of("img") and len(page.of("script")) == 2
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert json.loads((out / "index.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    markdown = (out / "report.md").read_text()
    assert not re.search("<(img|/?script)", re.sub(r"(?m)^- .*: ` .* `$", "", markdown))  # code spans are text
    grids = re.findall(r"(?:^\|.*\n)+", markdown, re.M)
    assert grids and all(len({len(re.findall(r"(?<!\\)\|", x)) for x in g.splitlines()}) == 1 for g in grids)
    rows = read_csv(out)
    assert all(v[:1] not in ("=", "+", "-", "@", "\t", "\r") for row in rows for v in row.values())
    assert {row["command"] for row in rows} == {f"'+{h}"} and {row["model"] for row in rows} == {h}
    for svg in (out / "figures").glob("*.svg"):
        assert "<img" not in svg.read_text()


def test_no_run_one_run_and_no_successful_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(tmp_path / "absent"), "-o", str(tmp_path / "out")]) == 2
    assert "is no folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main(["build", str(tmp_path / "empty"), "-o", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'} can not be written (Not a directory" in capsys.readouterr().err
    assert "There is no run here." in build(tmp_path / "empty", tmp_path / "out", code=2).text
    broken = synthetic.write(
        tmp_path / "failed", synthetic.result(synthetic.spec(), 1, "oom", reason="rank 3 needs 9 GiB")
    )
    page = build(tmp_path / "failed", tmp_path / "out")
    assert "No run succeeded." in page.text and "rank 3 needs 9 GiB" in page.text
    (broken / RESULT).write_text("{ half a res")
    page = build(tmp_path / "failed", tmp_path / "out")
    assert "corrupt" in page.text and [a["data-status"] for a in page.of("tr") if "data-status" in a] == ["corrupt"]
    synthetic.write(tmp_path / "one", synthetic.result(synthetic.spec(), 1234))
    page = build(tmp_path / "one", tmp_path / "out")
    assert "FSDP 4" in page.text and "it is the plainest run of this workload" in page.text


def test_forty_strategies(tmp_path: Path) -> None:
    synthetic.forty(tmp_path / "in")
    page, out = build(tmp_path / "in", tmp_path / "out"), tmp_path / "out"
    rows = [a for a in page.of("tr") if "data-run-id" in a]
    assert len(rows) == 41 and {a["data-engine"] for a in rows} == {"measure"}
    assert sorted(a["data-status"] or "" for a in rows if a["data-status"] != "ok") == ["hung", "oom", "oom"]
    names = {p.stem for p in (out / "figures").glob("*.svg")}
    losses = {f"loss_{x}" for x in ("steps", "tokens", "time", "deviation")}
    assert names == losses | {"heatmap_tps", "heatmap_memory", "ladder", "memory", "time", "scaling"}
    for path in (out / "figures").glob("*.svg"):
        text = path.read_text()
        assert "<text" in text and "DejaVuSans-" not in text, "text is drawn as paths"
        ids = [e.get("id") for e in ElementTree.fromstring(text).iter() if e.get("id")]
        assert len(ids) == len(set(ids)) and set(re.findall(r"(?:url\(|href=\")#([^)\"]+)", text)) <= set(ids)
    inline = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(inline) == len(set(inline))
    svg = (out / "figures" / "memory.svg").read_text()
    assert "activations" in svg and "prefers-color-scheme" in svg
    assert {float(x) for x in re.findall(r"font: (?:[a-z]+ )?([0-9.]+)px", svg)} <= {11.5, 11.0, 12.0}


def test_simulated_and_published_are_named(tmp_path: Path) -> None:
    """8,788 simulated against 8,532 published is 1.030; each stands in a column of its own."""
    row = published.rows()["tt202412_8b_8gpu_fsdp_compile_float8"]
    made = synthetic.result(row.spec(), 8788.0)
    figures = {**made.metrics, "tps_per_gpu": Value(8788.0, 8085.0, 9491.0, 0.8, 0, "tokens/s")}
    synthetic.write(tmp_path / "in", replace(made, metrics=figures))
    build(tmp_path / "in", tmp_path / "out")
    html, markdown = (tmp_path / "out" / "index.html").read_text(), (tmp_path / "out" / "report.md").read_text()
    section = html.partition('id="verdicts"')[2].partition("</section>")[0]
    assert "8,532" in section and "8,788" in section and "1.030" in section and "simulated" in section
    assert row.source.commit in section and "bench run" in section
    (line,) = [x for x in markdown.splitlines() if "TPS/GPU" in x and "8,532" in x]
    assert "8,788 (simulated)" in line and "1.030 (0.948 to 1.112)" in line


def _noisy(r: RunResult) -> RunResult:
    return replace(r, metrics={**r.metrics, "tps_per_gpu": synthetic.value("tps_per_gpu", 1000, rel=0.2)})


@pytest.mark.parametrize(
    ("change", "notice"),
    [
        (lambda r: replace(r, environment={"fingerprint": "another"}), "mixed machines"),
        (lambda r: replace(r, code_id="another"), "mixed code"),
        (_noisy, "noisy window"),
        (lambda r: replace(r, metrics={**r.metrics, "mfu": Value(1.2, unit="fraction")}), "implausible MFU"),
        (lambda r: replace(r, evidence={"graphs_compiled": 0}), "technique without effect"),
        (lambda r: replace(r, evidence={"memory_growth_10_steps": 0.03}), "memory growth"),
    ],
)  # fmt: skip
def test_notices(tmp_path: Path, change: Callable[[RunResult], RunResult], notice: str) -> None:
    synthetic.write(tmp_path, synthetic.result(synthetic.spec(), 1000))
    assert find(points.load(tmp_path)) == []
    synthetic.write(tmp_path, change(synthetic.result(synthetic.spec(compile={"enable": True}), 1000)))
    assert [n.kind for n in find(points.load(tmp_path))] == [notice]


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = synthetic.write(tmp_path, synthetic.result(synthetic.spec(), 1000))
    fast = synthetic.result(synthetic.spec(compile={"enable": True}), 1200)
    synthetic.write(tmp_path, replace(fast, environment={**fast.environment, "host": "node2"}))
    assert main(["diff", str(a), fast.run_id, "--results", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["spec"] == {"compile.enable": [False, True]} and found["environment"] == {"host": ["node1", "node2"]}
    assert found["comparable"] is None and found["metrics"]["tps_per_gpu"]["ratio"]["value"] == pytest.approx(1.2)
    assert main(["diff", str(a), fast.run_id, "--results", str(tmp_path)]) == 0
    assert "+20.0 % (+18.3 % to +21.7 %)" in capsys.readouterr().out
    assert main(["diff", str(a), "nowhere", "--results", str(tmp_path)]) == 2
    assert "neither a run's folder nor a run id" in capsys.readouterr().err


@pytest.mark.budget
def test_help_is_quick(budget: Callable[[str, float, float, str], None]) -> None:
    times = []
    for _ in range(3):
        begin = time.monotonic()
        subprocess.run([sys.executable, "-m", "reports", "--help"], check=True, capture_output=True)
        times.append(time.monotonic() - begin)
    budget("python -m reports --help", min(times), 0.5, "s")


def test_no_torch_and_light_help(small: Path) -> None:
    """In a fresh interpreter: a report is built without torch, and --help loads neither pandas nor matplotlib."""
    code = (
        "import sys\nfrom reports.__main__ import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'pandas', 'matplotlib', 'numpy', 'jinja2', 'torch'} & set(sys.modules)\nassert not heavy, heavy\n"
        f"main(['build', {str(small)!r}, '-o', {str(small.parent / 'out')!r}])\n"
        "assert not {'torch', 'hydra'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
