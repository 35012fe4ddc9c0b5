"""A page that needs nothing but itself, and how it looks: light and dark, on a desk, a phone and paper."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def page(title: str, sections: Iterable[str]) -> str:
    """HTML; what is empty is left out."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n<style>\n{STYLE}</style>\n'
        "</head>\n<body>\n<main>\n" + "\n".join(filter(None, sections)) + "\n</main>\n</body>\n</html>\n"
    )


STYLE = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --card: #f6f7f9; --ink: #14181f; --muted: #5a6472; --line: #dfe3e8;
  --blue: #2563eb; --orange: #d97706; --green: #15803d; --violet: #7c3aed;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #0e1116; --card: #171c23; --ink: #e6e9ee; --muted: #98a2b0; --line: #2b323b;
    --blue: #6ea8fe; --orange: #f5b14c; --green: #4ade80; --violet: #b794f6;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif;
}
main { max-width: 1000px; margin: 0 auto; padding: 48px 28px 64px; }
h1 { margin: 0; font-size: 2rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 0 0 12px; font-size: 1.15rem; }
section { margin-top: 40px; }
.kicker { margin: 0 0 4px; color: var(--muted); font-size: .875rem; }
.outcome {
  display: inline-block; margin: 14px 0 0; padding: 3px 12px;
  border: 1px solid; border-radius: 6px; font-size: .9375rem;
}
.good { color: var(--green); }
.open { color: var(--orange); }
.lead { margin: 14px 0 0; font-size: 1.125rem; color: var(--muted); }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px; margin: 32px 0 0; }
.tiles div { background: var(--card); border-radius: 8px; padding: 14px 16px; }
.tiles dt { color: var(--muted); font-size: .8125rem; }
.tiles dd { margin: 2px 0 0; font-size: 1.375rem; font-weight: 600; white-space: nowrap; }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 32px 24px; }
table + .charts { margin-top: 28px; }
figure { margin: 0; min-width: 0; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; }
figure.narrow { display: none; }
figcaption { margin-bottom: 8px; font-weight: 600; font-size: .9375rem; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; }
table { width: 100%; border-collapse: collapse; font-size: .9375rem; }
tr { border-bottom: 1px solid var(--line); break-inside: avoid; }
tr:last-child { border-bottom: 0; }
th, td { padding: 7px 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { width: 30%; padding-right: 16px; font-weight: 400; color: var(--muted); overflow-wrap: normal; }
.grid th { width: auto; white-space: nowrap; }
td, dd { font-variant-numeric: tabular-nums; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: .875rem; }
pre {
  margin: 0; padding: 16px 18px; background: var(--card); border-radius: 8px;
  white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
}
.sample { line-height: 1.6; }
.prompt { color: var(--muted); }
.note { margin: 8px 0 0; color: var(--muted); font-size: .875rem; }
summary { cursor: pointer; color: var(--muted); font-size: .9375rem; }
details pre { margin-top: 12px; }
@media screen and (max-width: 640px) {
  main { padding: 28px 16px 48px; }
  h1 { font-size: 1.5rem; }
  .lead { font-size: 1rem; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tiles dd { font-size: 1.125rem; }
  .charts { grid-template-columns: 1fr; }
  figure.wide { display: none; }
  figure.narrow { display: block; }
  th { width: 38%; }
}
@media print {
  body { font-size: 11pt; }
  main { max-width: none; padding: 0; }
  section { margin-top: 24px; }
  h2 { break-after: avoid; }
  .tiles div, pre { background: none; border: 1px solid var(--line); }
  .tiles div { padding: 8px 10px; }
  .tiles dd { font-size: 1rem; }
  details::details-content { content-visibility: visible; block-size: auto; }
  summary { display: none; }
}
"""
