"""What the notebooks call: the one table as a DataFrame, and figures to display. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from reports import figures, report, table

if TYPE_CHECKING:
    import pandas as pd
    from IPython.display import SVG


def read(results: str | Path) -> report.Report:
    """Everything a report says about a results folder."""
    return report.make(Path(results), Path.cwd())


def frame(made: report.Report) -> pd.DataFrame:
    """The one table, a row a point."""
    import pandas as pd

    return pd.DataFrame([{c.key: row.get(c.key) for c in table.COLUMNS} for row in made.rows]).set_index("run_id")


def parity(made: report.Report) -> pd.DataFrame:
    """Each layout against one rank: verdict, worst relative deviations, limit or reason."""
    import pandas as pd

    rows = [(v.point.name, v.verdict, v.loss, v.grad_norm, v.steps, v.text) for v in made.parity]
    return pd.DataFrame(rows, columns=["layout", "verdict", "loss", "grad_norm", "steps", "limit or reason"])


def show(made: report.Report, names: Iterable[str]) -> list[SVG]:
    """The figures of these names that the results can fill."""
    from IPython.display import SVG

    by_name = {d.name: d for d in made.drawings}
    return [SVG(data=figures.standalone(by_name[n].svg)) for n in names if n in by_name]  # type: ignore[no-untyped-call]
