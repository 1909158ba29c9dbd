"""Tables as HTML, for the workflow's report: a browser shows a file alone, and the report takes claims.html for its first page.

A file is a fragment in one <div> with its own style, so that it changes nothing around it.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import pandas as pd

STATUS = {"PASS": "#007a5a", "FAIL": "#b00020", "NOT RUN": "#8a5a00"}
"""Colour of each verdict; the word stands there, too."""

STYLE = """
.snapmla { font: 13px/1.4 sans-serif; color: #202020; }
.snapmla table { font: inherit; border-collapse: collapse; margin: 0 0 1em; }
.snapmla th, .snapmla td { border-bottom: 1px solid #d8d8d8; padding: 3px 8px; text-align: left; vertical-align: top; }
.snapmla th { border-bottom: 2px solid #808080; }
.snapmla .right { text-align: right; }
.snapmla details p { margin: 4px 0; font-size: 12px; color: #505050; }
"""


def text(value: object) -> str:
    """Escaped; "–" where there is nothing."""
    return html.escape(str(value)) or "–"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], sides: Sequence[str] = ()) -> str:
    """Cells are HTML already, names are text. sides: "left" or "right" of each column."""
    classes = [f' class="{side}"' if side == "right" else "" for side in sides or ["left"] * len(columns)]
    head = "".join(f"<th{side}>{text(name)}</th>" for name, side in zip(columns, classes, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{side}>{cell}</td>' for cell, side in zip(row, classes, strict=True))}</tr>\n" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n"


def fragment(*parts: str) -> str:
    return f'<!DOCTYPE html><meta charset="utf-8">\n<div class="snapmla"><style>{STYLE}</style>\n{"".join(parts)}</div>\n'


def claims(found: pd.DataFrame, counts: str, machines: pd.DataFrame) -> str:
    """The claims, each to be opened for its tolerance, source and detail; then the machines of this run."""
    rows = []
    for claim in found.itertuples():
        more = {"Tolerance": claim.tolerance, "Source": claim.source, "Detail": claim.detail}
        opened = "".join(f"<p><b>{name}:</b> {text(value)}</p>" for name, value in more.items())
        verdict = f'<b style="color: {STATUS[claim.status]}">{claim.status}</b>'
        rows.append(
            (
                f"<details><summary>{text(claim.claim)}</summary>{opened}</details>",
                text(claim.paper_value),
                text(claim.ours),
                verdict,
            )
        )
    of_machines = table(list(machines), [[text(cell) for cell in row] for row in machines.to_numpy()])
    return fragment(
        f"<h2>Claims: {text(counts)}</h2>\n",
        table(("Claim", "Paper", "Ours", "Verdict"), rows),
        "<h2>Environment of this run</h2>\n",
        of_machines,
    )
