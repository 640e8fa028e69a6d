"""How reports look: light, dark where the reader prefers it, and light again on paper.

Colours of series are apart for the common kinds of colour blindness, by lightness too, and stand
out from the ground by 3:1 or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LIGHT = {"ground": "#ffffff", "text": "#1b1f24", "quiet": "#57606a", "rule": "#d5dae0"}
DARK = {"ground": "#14171b", "text": "#e6e9ec", "quiet": "#a2abb5", "rule": "#363c44"}
LIGHT_SERIES = ("#0a81d1", "#d85d0c", "#09463d", "#b86e95", "#593700", "#1e0939")
DARK_SERIES = ("#4bacff", "#fc5a43", "#d6ffcd", "#f09dc6", "#eee647", "#0d7367")
# Grounds of tokens by origin, as on the server's page: name -> light, dark.
ORIGINS = {
    "accepted": ("#d6ebfb", "#12385a"),
    "copied": ("#eadffb", "#3b2a5c"),
    "recovered": ("#fde3d1", "#57300f"),
    "bonus": ("#eceef1", "#2a2f36"),
}

_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
p { max-width: 44rem; margin: .75rem 0; overflow-wrap: anywhere; }
.subtitle, .note { color: var(--quiet); }
.subtitle { margin: 0 0 1.5rem; }
.note { font-size: .875rem; margin: .375rem 0; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .25rem 1.5rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.scroll { overflow: auto; max-height: 28rem; margin: .75rem 0; border: 1px solid var(--rule);
  border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { padding: .375rem .75rem; text-align: left; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { position: sticky; top: 0; background: var(--ground);
  box-shadow: inset 0 -1px var(--rule); white-space: nowrap; }
tbody th { font-weight: normal; }
p { white-space: pre-wrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
figure { margin: 1.5rem 0; break-inside: avoid; }
figcaption { font-weight: 600; }
figure ul { display: flex; flex-wrap: wrap; gap: .125rem 1.25rem; list-style: none; padding: 0;
  margin: .375rem 0; font-size: .875rem; overflow-wrap: anywhere; }
.key { width: 34px; height: 14px; margin-right: .375rem; vertical-align: -2px; }
.wide { overflow-x: auto; }
.chart { display: block; width: 100%; height: auto; }
.chart text { font-size: 12px; fill: var(--text); font-variant-numeric: tabular-nums; }
.chart .name, .chart .small { fill: var(--quiet); }
.chart .small { font-size: 10.5px; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.grid { stroke: var(--rule); fill: none; }
.axis { stroke: var(--quiet); fill: none; }
.line { stroke: currentColor; stroke-width: 2; fill: none; stroke-linejoin: round; }
.filled { fill: currentColor; }
.hatch { stroke: var(--ground); stroke-width: 2; }
.dot { fill: var(--ground); }
.figures { display: flex; flex-wrap: wrap; gap: .75rem 2.5rem; margin: 1.25rem 0; padding: 0;
  list-style: none; }
.figures b { display: block; font-size: 1.75rem; line-height: 1.2; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.figures span { color: var(--quiet); font-size: .875rem; }
.tinted { white-space: pre-wrap; }
.origin { border-radius: 2px; }
.origin + .origin { margin-left: 1px; }
.recovered { text-decoration: underline dotted; text-underline-offset: 3px; }
details { margin: .375rem 0; }
summary { cursor: pointer; color: var(--quiet); font-size: .875rem; }
pre { overflow: auto; max-height: 28rem; padding: .75rem; border: 1px solid var(--rule);
  border-radius: 6px; font-size: .8125rem; }
:focus-visible { outline: 2px solid var(--series-0); outline-offset: 2px; }
@media (max-width: 32rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin: 0 0 .5rem; } }
@media print {
  main { max-width: none; padding: 0; }
  .scroll, pre, .wide { max-height: none; overflow: visible; }
  thead th { position: static; }
  .scroll thead th { white-space: normal; }
  th, td { padding: .25rem .35rem; }
  tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .chart { min-width: 0 !important; }
  * { print-color-adjust: exact; }
}
"""


def stylesheet() -> str:
    """The CSS of every report."""
    classes = "".join(
        f".series-{i} {{ color: var(--series-{i}); }}\n" for i in range(len(LIGHT_SERIES))
    )
    classes += "".join(f".{name} {{ background: var(--{name}); }}\n" for name in ORIGINS)
    light, dark = ({name: pair[at] for name, pair in ORIGINS.items()} for at in (0, 1))
    # Paper is always light: the dark colours are for screens alone.
    return (
        f":root {{ color-scheme: light dark; {_variables({**LIGHT, **light}, LIGHT_SERIES)} }}\n"
        "@media screen and (prefers-color-scheme: dark) "
        f"{{ :root {{ {_variables({**DARK, **dark}, DARK_SERIES)} }} }}\n{classes}{_RULES}"
    )


def _variables(colours: Mapping[str, str], series: Sequence[str]) -> str:
    named = {**colours, **{f"series-{i}": colour for i, colour in enumerate(series)}}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())
