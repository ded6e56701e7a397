"""A run on one page of HTML: its summary, pictures, incidents and settings, in one file that needs nothing else."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lightning_amp_plus.precisions import scale_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_INCIDENTS = 200
"""How many incidents are on a page, the newest ones."""

_DPI = 144

_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#0072b2"/>'
    '<path d="M2 12h4V8h4V4h4" fill="none" stroke="#fff" stroke-width="2"/></svg>'
)

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1c1e21; --quiet: #5b6066; --line: #d9dce0; --card: #f5f6f8;
  --retried: #8a5a00; --rescued: #006b4f; --skipped: #b04300; --fallback: #8d3b6b; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15171a; --text: #e6e8eb; --quiet: #a0a6ad; --line: #353a40; --card: #1e2125;
    --retried: #f0b429; --rescued: #4cc9a2; --skipped: #ff8a4c; --fallback: #e59cc4; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(0.75rem, 3vw, 2rem) 4rem; max-width: 72rem; background: var(--ground);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.75rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0.75rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
thead th, .quiet, figcaption { color: var(--quiet); font-weight: normal; font-size: 0.9rem; }
.pairs { max-width: 44rem; background: var(--card); border-radius: 8px; }
.pairs tr:last-child > * { border-bottom: 0; }
.pairs th { width: 40%; font-weight: normal; color: var(--quiet); }
figure { margin: 0 0 2rem; }
figure div { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 0.5rem; }
figure img { display: block; width: 100%; min-width: 36rem; height: auto; }
figcaption { margin-top: 0.4rem; }
.incidents td { font-size: 0.9rem; }
.incidents td:nth-child(-n+2), .incidents td:nth-child(4) { white-space: nowrap; }
.incidents th { white-space: nowrap; }
.incidents td:nth-child(3) { min-width: 10rem; }
b.retried { color: var(--retried); } b.rescued { color: var(--rescued); } b.skipped { color: var(--skipped); }
b.fallback { color: var(--fallback); }
@media (max-width: 40rem) {
  .incidents thead { display: none; }
  .incidents tr { display: block; padding: 0.6rem 0; border-bottom: 1px solid var(--line); }
  .incidents td { display: flex; gap: 0.75rem; border: 0; padding: 0.1rem 0; white-space: normal !important; }
  .incidents td::before { content: attr(data-name); flex: 0 0 4.5rem; color: var(--quiet); } }
""".strip()


def figure_png(fig: Figure) -> bytes:
    """Return a figure of matplotlib's as a PNG file, with 144 pixels to the inch."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def render_report(
    *,
    title: str,
    summary: Sequence[tuple[str, str]],
    settings: Sequence[tuple[str, str]],
    incidents: Sequence[Mapping[str, Any]] | None,
    figures: Sequence[tuple[str, Figure]],
) -> str:
    """Return a page of HTML that is complete in itself: no script, no file and no address beside it.

    It reads on a phone and in dark mode. All texts are escaped.

    Args:
        title: The heading, and the title of the window.
        summary: Names and values, for the table at the top.
        settings: Names and values, for the table at the end.
        incidents: What :func:`~lightning_amp_plus.monitoring.incidents.incident_of` returns for steps, oldest first.
            The newest 200 are shown, the newest first. ``None`` if they were not kept.
        figures: Pictures with their captions, which are also what is read out in place of them.

    Example:
        >>> page = render_report(title="run 1", summary=[("steps", "10")], settings=[], incidents=[], figures=[])
        >>> page.startswith("<!doctype html>"), "run 1" in page
        (True, True)

    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        _section("Summary", [_pairs(summary)] if summary else ["<p>Nothing was counted.</p>"]),
        _section("Pictures", [_picture(caption, figure) for caption, figure in figures]) if figures else "",
        _section("Incidents", _incidents(incidents)),
        _section("Settings", [_pairs(settings)]) if settings else "",
    ]
    body = "\n".join(part for part in parts if part)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<link rel="icon" href="data:image/svg+xml,{quote(_ICON)}">
<style>
{_STYLE}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def _section(heading: str, parts: Iterable[str]) -> str:
    return "\n".join([f"<section><h2>{heading}</h2>", *parts, "</section>"])


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    rows = (f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in pairs)
    return "\n".join(['<table class="pairs">', *rows, "</table>"])


def _picture(caption: str, figure: Figure) -> str:
    data = base64.b64encode(figure_png(figure)).decode("ascii")
    text = escape(caption)
    return (
        f'<figure><div tabindex="0" role="region" aria-label="{text}"><img alt="{text}"'
        f' src="data:image/png;base64,{data}"></div><figcaption>{text}</figcaption></figure>'
    )


# Incidents ------------------------------------------------------------------------------------------------------------


def _incidents(incidents: Sequence[Mapping[str, Any]] | None) -> list[str]:
    if incidents is None:
        return ["<p>They were not kept: there was no logger with a local folder, or incidents=False.</p>"]
    if not incidents:
        return ["<p>None was logged.</p>"]
    shown = list(reversed(incidents[-MOST_INCIDENTS:]))
    left_out = len(incidents) - len(shown)
    parts = [f'<p class="quiet">The newest {len(shown)} are shown, {left_out} older ones are not.</p>'] * bool(left_out)
    names = ("step", "batch", "what", "tried", "why")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = []
    for incident in shown:
        cells = (
            escape(str(incident.get("step", ""))),
            _batch(incident),
            _what(incident),
            "<br>".join(escape(_attempt(attempt)) for attempt in incident.get("tried") or ()),
            _why(incident),
        )
        columns = (f'<td data-name="{name}"><div>{cell}</div></td>' for name, cell in zip(names, cells, strict=True))
        rows.append(f"<tr>{''.join(columns)}</tr>")
    return [*parts, f'<table class="incidents"><thead><tr>{head}</tr></thead><tbody>', *rows, "</tbody></table>"]


def _batch(incident: Mapping[str, Any]) -> str:
    if incident.get("batch_idx") is None:
        return ""
    text = f"{incident['batch_idx']}, epoch {incident.get('epoch', '?')}"
    if incident.get("optimizer"):
        text += f", optimizer {incident['optimizer']}"
    return escape(text)


def _what(incident: Mapping[str, Any]) -> str:
    kinds = [f'<b class="{escape(str(kind))}">{escape(str(kind))}</b>' for kind in incident.get("kinds") or ()]
    kinds = kinds or ["validation"]
    goes_on = []
    if incident.get("moves_to"):
        goes_on.append(f"to {incident['moves_to']}")
    if incident.get("kept"):
        goes_on.append(f"in float32: {', '.join(map(str, incident['kept']))}")
    return "<br>".join([*kinds, *map(escape, goes_on)])


def _attempt(attempt: Sequence[Any]) -> str:
    precision, scale = attempt
    return f"{precision} at {scale_text(scale)}" if precision == "16-mixed" else str(precision)


def _why(incident: Mapping[str, Any]) -> str:
    cause, module, detail = incident.get("cause"), incident.get("module"), incident.get("detail")
    if cause is None and detail:
        return escape(str(detail))
    if cause is None:
        seen = incident.get("non_finite")
        return escape(f"inf or NaN in: {seen}") if seen else "not looked into"
    head = f"{cause}: {module}" if module else str(cause)
    return f'{escape(head)}<br><span class="quiet">{escape(str(detail or ""))}</span>'
