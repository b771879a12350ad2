"""``python -m reports build``: results in, a page, Markdown, figures and tables out. No torch."""

from __future__ import annotations

from pathlib import Path

from reports import figures, markdown, page, report, table


def build(results: Path, out: Path) -> report.Report:
    """Writes index.html, report.md, figures/*.svg, results.csv and results.parquet into ``out``."""
    made = report.make(results, out)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for old in (out / "figures").glob("*.svg"):
        old.unlink()
    for drawing in made.drawings:
        (out / "figures" / f"{drawing.name}.svg").write_text(figures.standalone(drawing.svg), encoding="utf-8")
    page.write(made, out / "index.html")
    markdown.write(made, out / "report.md")
    table.write_csv(made.rows, out / "results.csv")
    table.write_parquet(made.rows, out / "results.parquet")
    return made
