"""Who may import whom, and what an import costs. Reference: the table of packages in this file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("trainer_core", "bench", "sweeps", "reports")
MAY_IMPORT = {
    "trainer_core": ("trainer_core",),
    "bench": ("bench", "trainer_core"),
    "sweeps": ("sweeps", "bench", "trainer_core.config"),
    "reports": ("reports", "bench", "trainer_core.config", "trainer_core.counts", "trainer_core.stability"),
}
ONLY_INSIDE = {"tokenizers": "data.py", "datasets": "data.py", "pyarrow": "data.py", "pynvml": "metrics.py"}
"""Third-party modules of trainer_core that one file imports, inside the function that needs them."""
NO_TORCH = [
    "trainer_core.config", "trainer_core.rules", "trainer_core.counts", "trainer_core.stability", "bench.spec",
    "bench.result", "bench.store", "bench.run", "bench.measure", "bench.summary", "bench.mfu", "bench.describe",
    "bench.status", "bench.doctor", "bench.cli", "bench.node", "bench.sim.hardware", "bench.sim.cost",
    "bench.sim.schedule",
]  # fmt: skip
FORBIDDEN = ("torch", "torchao")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top level) of every import; ``from a import b`` also as a.b, since b may be a module."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(f"{node.module}.{alias.name}", id(node) in top) for alias in node.names]
    return found


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@pytest.mark.parametrize("package", PACKAGES)
def test_who_imports_whom(package):
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules(package)
        for name, _ in imports(path)
        if name.split(".")[0] in (*PACKAGES, "notebooks", "tests") and not within(name, MAY_IMPORT[package])
    ]
    assert not wrong


def test_heavy_helpers_are_imported_where_they_are_used():
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules("trainer_core")
        for name, top in imports(path)
        if (home := ONLY_INSIDE.get(name.split(".")[0])) and (top or path.name != home)
    ]
    assert not wrong


def test_reports_and_their_roots_need_no_torch():
    """In a Python where torch does not exist: what opens results on a laptop."""
    reports = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in modules("reports") if p.stem != "__main__"]
    names = [*NO_TORCH, *(name.removesuffix(".__init__") for name in reports)]
    names = [n for n in names if (ROOT / (n.replace(".", "/") + ".py")).exists() or n == "reports"]
    code = f"import sys\nfor m in {FORBIDDEN}: sys.modules[m] = None\nimport importlib\n"
    code += f"for name in {names}: importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_core_opens_fast():
    """Processor time, not wall time, so that a busy machine does not fail it. Measured 0.2 s."""
    code = "import bench.spec, bench.result, bench.store, time; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert float(done.stdout) < 1.0
