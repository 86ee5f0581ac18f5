"""HTML building blocks of the report: document, sections, cards, tables, and the style sheet.

Callers escape cells and bodies; titles and sentences are escaped here. The page has no script and makes no network
requests, and its Content-Security-Policy forbids both; that of a run that is followed (live.py) has one script, which
asks its own server alone. Sections fold; on a narrow screen a table's rows become blocks.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def escape(value) -> str:
    return html.escape(str(value))


OWN_SCRIPT = "; script-src 'self'; connect-src 'self'"


def document(title: str, subtitle: str, sections: Sequence[tuple[str, str, str, bool]], live: str = "") -> str:
    """The complete page; sections are (id, heading, body as HTML, whether it is open).

    Args:
      live: elements behind the subtitle, as HTML, of a page that its script keeps up to date; "" = it has none.
    """
    links = "".join(f'<a href="#{id_}">{escape(head)}</a>' for id_, head, *_ in sections)
    bodies = "".join(  # a link to an id within a closed section opens it
        f'<details class="section"{" open" if shown else ""}><summary><h2>{escape(head)}</h2></summary>'
        f'<div id="{id_}">{body}</div></details>'
        for id_, head, body, shown in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src 'unsafe-inline'; img-src data:{OWN_SCRIPT if live else ''}\">"
        f"<title>{escape(title)} · areax</title><style>{STYLE}</style></head><body>"
        f'<header><p class="brand">areax run report</p><h1>{escape(title)}</h1>'
        f'<p class="lead" id="subtitle">{escape(subtitle)}</p>{live}</header><nav>{links}</nav><main>{bodies}</main>'
        "</body></html>\n"
    )


def tile(label: str, value: str, words: str) -> str:
    """A tile with one highlighted value; `value` is HTML."""
    head = f'<span class="label">{escape(label)}</span>'
    return f'<div class="tile">{head}<b>{value}</b><small>{escape(words)}</small></div>'


def card(title: str, kind: str, words: str, picture: str) -> str:
    """A chart with its title, the kind of steps it shows, and a line of explanation."""
    return (
        f'<figure class="card"><figcaption><h4>{escape(title)}<span class="kind">{escape(kind)}</span></h4>'
        f"<p>{escape(words)}</p></figcaption>{picture}</figure>"
    )


def cards(found: Sequence[str], shown: int | None = None) -> str:
    """Cards side by side; those after the first `shown` are folded."""
    body = f'<div class="cards">{"".join(found[:shown])}</div>' if found else ""
    rest = found[shown:] if shown else []
    return body + (folded(f"{len(rest)} more charts", f'<div class="cards">{"".join(rest)}</div>') if rest else "")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML cells."""
    top = "".join(f"<th>{escape(h)}</th>" for h in heads)
    cell = lambda head, x: f'<td data-head="{escape(head)}">{x}</td>'
    body = "".join("<tr>" + "".join(map(cell, heads, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(words: str, body: str, open: bool = False) -> str:
    """A collapsible body."""
    return f"<details{' open' if open else ''}><summary>{escape(words)}</summary>{body}</details>"


STYLE = """
:root{--bg:#f5f6f8;--card:#fff;--ink:#171a21;--soft:#5d6675;--faint:#8a93a1;--line:#e2e5ea;--grid:#edf0f3;
--accent:#2563d9;--hot:217 119 6;--up:37 99 217;--down:220 60 60;--warn:#a3470b;--warnbg:#fff4e8;
--c0:#2563d9;--c1:#e07a0c;--c2:#11967a;--c3:#8a54d6;--c4:#d43f5e;--c5:#5f6b7c;--c6:#0c98c4;--c7:#a07a10}
@media (prefers-color-scheme:dark){:root{--bg:#0e1116;--card:#161b22;--ink:#e6eaf0;--soft:#9aa5b4;--faint:#76818f;
--line:#2a313b;--grid:#212730;--accent:#78a9ff;--hot:245 158 11;--up:96 150 255;--down:255 105 105;--warn:#ffb870;
--warnbg:#2b2013;--c0:#6ea3ff;--c1:#ffab4a;--c2:#3fcfae;--c3:#b694ff;--c4:#ff7f97;--c5:#9aa7b8;--c6:#4cc6ee;--c7:#d8b24a}}
*{box-sizing:border-box}
html{scroll-behavior:smooth}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-font-smoothing:antialiased}
header,main,nav{max-width:1220px;margin:0 auto;padding:0 24px}
main{padding-bottom:60px}
header{padding-top:36px}
.brand{margin:0;color:var(--accent);font-size:13px;font-weight:600;letter-spacing:.04em}
h1{margin:2px 0 4px;font-size:32px;line-height:1.2;letter-spacing:-.02em}
h2{margin:0 0 6px;font-size:21px;letter-spacing:-.01em}
h3{margin:18px 0 8px;font-size:15px;font-weight:600}
h4{margin:0;font-size:14.5px;font-weight:600}
.lead{margin:0 0 14px;color:var(--soft)}
nav{position:sticky;top:0;z-index:2;display:flex;flex-wrap:wrap;gap:4px 18px;padding-top:10px;padding-bottom:10px;
background:var(--bg);border-bottom:1px solid var(--line)}
nav a{color:var(--soft);text-decoration:none;font-size:13.5px}
nav a:hover{color:var(--accent)}
.section{margin:0;padding:0;background:none;border:0;border-bottom:1px solid var(--line);border-radius:0}
.section>summary{padding:16px 0;color:var(--ink)}
.section>summary h2{display:inline;margin:0 0 0 6px}
.section>div{padding:0 0 24px;scroll-margin-top:100px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:12px;margin:8px 0 18px}
.tile,.card,.scroll,details{background:var(--card);border:1px solid var(--line);border-radius:12px}
.tile{padding:14px 16px;display:flex;flex-direction:column}
.tile .label{color:var(--soft);font-size:13px}
.tile b{font-size:26px;line-height:1.3;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.tile .words{font:inherit}
.tile small{color:var(--faint);font-size:12px;line-height:1.4}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(350px,1fr));gap:14px}
.card{margin:0;padding:14px 14px 8px;min-width:0;display:flex;flex-direction:column}
.card figcaption{flex:1}
.card p{margin:2px 0 8px;color:var(--soft);font-size:12.5px;line-height:1.4}
.kind{float:right;color:var(--faint);font-size:11.5px;font-weight:500;border:1px solid var(--line);
border-radius:20px;padding:0 8px}
.still{margin:12px 2px 0;padding-left:18px;color:var(--soft);font-size:13px}
.still b{color:var(--ink);font-weight:600}
.warnings{margin:0 0 16px;padding:10px 14px 10px 32px;color:var(--warn);background:var(--warnbg);border-radius:10px}
.scroll{overflow-x:auto;margin-bottom:6px}
table{width:100%;border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--faint);font-weight:500;font-size:12.5px}
th,td{padding:7px 14px;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
td:last-child{color:var(--soft)}
code,.words{font:12.5px ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
.words{overflow-wrap:anywhere}
.n{white-space:nowrap}
details{padding:10px 16px;margin:8px 0}
details:not(.section)>.scroll{border:0;margin:8px -16px 0;border-radius:0}
summary{cursor:pointer;color:var(--soft);font-size:13.5px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:11.5px;fill:var(--soft)}
svg .tick{fill:var(--faint);font-variant-numeric:tabular-nums}
svg .note{fill:var(--faint)}
svg .middle{text-anchor:middle}
svg .end{text-anchor:end}
.grid{stroke:var(--grid)}
.axis{stroke:var(--faint);stroke-opacity:.6}
.line,.raw{fill:none;stroke-linejoin:round;stroke-linecap:round}
.line{stroke-width:2.2}
.raw{stroke-width:1;stroke-opacity:.32}
.range{stroke:none;fill-opacity:.17}
.band rect{fill:transparent}
.band line{stroke:var(--faint);stroke-dasharray:2 3}
.band line,.band circle{opacity:0}
.band:hover line,.band:hover circle{opacity:1}
.dot{stroke:var(--card);stroke-width:1.2}
.bar{shape-rendering:geometricPrecision}
.bar:hover{filter:brightness(1.15)}
.c0{stroke:var(--c0);fill:var(--c0);background:var(--c0)}.c1{stroke:var(--c1);fill:var(--c1);background:var(--c1)}
.c2{stroke:var(--c2);fill:var(--c2);background:var(--c2)}.c3{stroke:var(--c3);fill:var(--c3);background:var(--c3)}
.c4{stroke:var(--c4);fill:var(--c4);background:var(--c4)}.c5{stroke:var(--c5);fill:var(--c5);background:var(--c5)}
.c6{stroke:var(--c6);fill:var(--c6);background:var(--c6)}.c7{stroke:var(--c7);fill:var(--c7);background:var(--c7)}
.line,.raw{fill:none}
.key,.bar,.range{stroke:none}
.dot{stroke:var(--card)}
.split{display:flex;height:22px;border-radius:7px;overflow:hidden;margin:0 0 12px;gap:1px}
.split i{min-width:1px}
.swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px;vertical-align:-1px}
.pair{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,390px);gap:14px;align-items:start}
.plain td:not(:last-child){white-space:nowrap}
@media (max-width:900px){.pair{grid-template-columns:minmax(0,1fr)}}
.facts{display:flex;flex-wrap:wrap;gap:6px 26px;margin:12px 0 0;font-size:13.5px}
.facts div{display:flex;gap:7px}
.facts dt{color:var(--faint)}
.facts dd{margin:0;font-variant-numeric:tabular-nums}
details>dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:4px 16px;font-size:13px}
details>dl dt{color:var(--faint)}
details>dl dd{margin:0}
.text{margin:0;padding:10px 12px;background:var(--bg);border-radius:8px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13.5px/1.75 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;max-height:420px;overflow:auto}
.answer{margin:6px 0 14px}
.answer i{font-style:normal;border-radius:3px;padding:2px 1px;margin-right:1px;cursor:default}
.answer i:hover{outline:1.5px solid var(--ink)}
.answer .given,.text .mark{color:var(--faint)}
.modes{display:flex;align-items:center;flex-wrap:wrap;gap:4px;color:var(--soft);font-size:13px}
.modes input{position:absolute;opacity:0}
.modes span{padding:3px 10px;border:1px solid var(--line);border-radius:8px;cursor:pointer;display:inline-block}
.modes input:checked+span{color:var(--accent);border-color:var(--accent)}
.modes input:focus-visible+span{outline:2px solid var(--accent)}
.scale{display:none;margin:8px 0;color:var(--soft);font-size:13px}
.samples:has([value=logp]:checked) .scale.logp,.samples:has([value=version]:checked) .scale.version,
.samples:has([value=gap]:checked) .scale.gap,.samples:has([value=advantage]:checked) .scale.advantage{display:block}
.samples:has([value=logp]:checked) .answer i{background:rgb(var(--hot)/calc(.75*var(--p,0)))}
.samples:has([value=gap]:checked) .answer .up{background:rgb(var(--up)/calc(.75*var(--g,0)))}
.samples:has([value=gap]:checked) .answer .down{background:rgb(var(--down)/calc(.75*var(--g,0)))}
.samples:has([value=advantage]:checked) .answer .gain{background:rgb(var(--up)/calc(.75*var(--a,0)))}
.samples:has([value=advantage]:checked) .answer .loss{background:rgb(var(--down)/calc(.75*var(--a,0)))}
.samples:has([value=version]:checked) .v0{background:color-mix(in srgb,var(--c0) 38%,transparent)}
.samples:has([value=version]:checked) .v1{background:color-mix(in srgb,var(--c1) 38%,transparent)}
.samples:has([value=version]:checked) .v2{background:color-mix(in srgb,var(--c2) 38%,transparent)}
.samples:has([value=version]:checked) .v3{background:color-mix(in srgb,var(--c3) 38%,transparent)}
.samples:has([value=version]:checked) .v4{background:color-mix(in srgb,var(--c4) 38%,transparent)}
.samples:has([value=version]:checked) .v5{background:color-mix(in srgb,var(--c5) 38%,transparent)}
.samples:has([value=version]:checked) .v6{background:color-mix(in srgb,var(--c6) 38%,transparent)}
.samples:has([value=version]:checked) .v7{background:color-mix(in srgb,var(--c7) 38%,transparent)}
.choose{display:flex;flex-wrap:wrap;gap:6px 14px;margin:0 0 10px;color:var(--soft);font-size:13px}
.choose select,.choose input{max-width:100%;font:inherit;color:var(--ink);background:var(--card);
border:1px solid var(--line);border-radius:8px;padding:3px 6px}
.note:not(:empty){margin:0 0 12px;padding:8px 14px;color:var(--warn);background:var(--warnbg);border-radius:10px;
overflow-wrap:anywhere}
.samples h4{margin:14px 0 5px;color:var(--soft);font-size:12.5px;font-weight:500}
.numbers{margin:0;font-size:20px;font-weight:600;font-variant-numeric:tabular-nums}
.numbers small{display:block;color:var(--faint);font-size:12px;font-weight:400}
@media (max-width:700px){nav{position:static}header,main,nav{padding-left:14px;padding-right:14px}
.cards{grid-template-columns:minmax(0,1fr)}.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:8px}
.tile{padding:10px 12px}.tile b{font-size:20px;overflow-wrap:anywhere}details{padding:8px 12px}
details:not(.section)>.scroll{margin:8px -12px 0}
details>dl{grid-template-columns:minmax(0,1fr)}details>dl dd{margin-bottom:6px}
thead{display:none}table,tbody{display:block}
tr{display:block;padding:7px 12px;border-bottom:1px solid var(--line)}tr:last-child{border:0}
td{display:inline-block;padding:0 14px 0 0;border:0;overflow-wrap:anywhere}
td:first-child,td:last-child{display:block;white-space:normal}
td:first-child:nth-last-child(2),td:nth-child(2):last-child{display:inline-block}
td:not(:first-child,:last-child,[data-head=value])::before{content:attr(data-head) " ";color:var(--faint);
font-size:12px}}
@media print{nav{display:none}}
"""
