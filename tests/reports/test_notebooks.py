"""The notebooks run on a synthetic sweep, hold no outputs and no logic."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest
import synthetic
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
LOGIC = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.If, ast.ListComp, ast.DictComp, ast.Lambda, ast.Try)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebooks")
    synthetic.forty(folder)
    return folder


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(NOTEBOOKS) == 2
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code), "strip it: nbstripout " + path.name
    nodes = [node for cell in code for node in ast.walk(ast.parse(cell.source))]
    assert not [node for node in nodes if isinstance(node, LOGIC)]
    monkeypatch.setenv("MESHMARK_RESULTS", str(results))
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
    kinds = [kind for cell in code for output in cell.outputs for kind in output.get("data", {})]
    assert "text/html" in kinds and kinds.count("image/svg+xml") >= 4
