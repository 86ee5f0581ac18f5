"""HTML building blocks of the report: document, cards, tables, sample browser, style and script.

Callers escape cells and bodies; titles and sentences are escaped here. The page makes no network requests, and its
Content-Security-Policy forbids them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence


def document(title: str, subtitle: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """The complete page; sections are (id, heading, body as HTML)."""
    links = "".join(f'<a href="#{id_}">{html.escape(head)}</a>' for id_, head, _ in sections)
    bodies = "".join(
        f'<section id="{id_}"><h2>{html.escape(head)}</h2>{body}</section>' for id_, head, body in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
        f"<title>{html.escape(title)} · areax</title><style>{STYLE}</style></head><body>"
        f'<header><p class="brand">areax run report</p><h1>{html.escape(title)}</h1>'
        f'<p class="lead">{html.escape(subtitle)}</p></header><nav>{links}</nav><main>{bodies}</main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def tile(label: str, value: str, words: str) -> str:
    """A tile with one highlighted value; `value` is HTML."""
    return (
        f'<div class="tile"><span class="label">{html.escape(label)}</span><b>{value}</b>'
        f"<small>{html.escape(words)}</small></div>"
    )


def card(title: str, kind: str, words: str, picture: str) -> str:
    """A chart with its title, the kind of steps it shows, and a line of explanation."""
    return (
        f'<figure class="card"><figcaption><h4>{html.escape(title)}<span class="kind">{html.escape(kind)}</span></h4>'
        f"<p>{html.escape(words)}</p></figcaption>{picture}</figure>"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of HTML cells."""
    top = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(words: str, body: str) -> str:
    """A collapsible body."""
    return f"<details><summary>{html.escape(words)}</summary>{body}</details>"


def browser(samples: Sequence[dict], words: str) -> str:
    """The sample browser. Its data is JSON with <, > and & escaped, so it cannot contain markup."""
    data = json.dumps(samples, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    modes = (
        ("logp", "log-probability"),
        ("version", "policy version"),
        ("gap", "trainer − sampler"),
    )
    choices = "".join(
        f'<label><input type="radio" name="colour" value="{value}"{" checked" if value == "logp" else ""}>'
        f"<span>{text}</span></label>"
        for value, text in modes
    )
    notes = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in SAMPLE_WORDS)
    return (
        f'<p class="lead">{html.escape(words)}. What the policy wrote, token by token. '
        "Hover over a token for details; the arrow keys move between samples.</p>"
        '<noscript><p class="lead">This part needs JavaScript.</p></noscript>'
        '<div id="s-browser" class="browser" tabindex="0" hidden>'
        '<div class="controls"><button id="s-prev" title="previous sample">‹ previous</button>'
        '<button id="s-next" title="next sample">next ›</button>'
        '<label class="slide">step <input id="s-step" type="range" min="0" value="0"><b id="s-step-name"></b></label>'
        f'<span class="modes">colour by {choices}</span></div>'
        '<div id="s-strip" class="strip" aria-label="samples of this step, by reward"></div>'
        '<dl id="s-facts" class="facts"></dl>'
        '<h4>Prompt</h4><pre id="s-prompt" class="text"></pre>'
        '<h4>Answer <span id="s-scale" class="scale"></span></h4><pre id="s-answer" class="text answer"></pre>'
        '<p id="s-reading" class="reading">Hover over a token.</p>'
        '<div id="s-other"><h4>Answer as text</h4><pre id="s-plain" class="text"></pre></div>'
        f'</div><details><summary>What these numbers mean</summary><dl class="words">{notes}</dl></details>'
        f'<script type="application/json" id="s-data">{data}</script>'
    )


SAMPLE_WORDS = (
    ("reward", "reward of the answer; – means it could not be scored"),
    ("advantage", "reward relative to the other answers to the same prompt; above 0 is reinforced"),
    ("finish", "stop: the policy ended its answer; length: truncated"),
    ("trained at", "policy version trained on the sample"),
    ("sampled by", "policy versions that generated its tokens; several if weights changed during generation"),
    ("log-probability", "of the token when it was sampled, in nats; 0 is certain, -2.3 one in ten"),
    (
        "trainer − sampler",
        "difference between the token's two log-probabilities; nonzero through rounding or staleness",
    ),
)

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
section{padding:30px 0 6px;scroll-margin-top:34px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:12px;margin:8px 0 18px}
.tile,.card,.browser,.scroll,details{background:var(--card);border:1px solid var(--line);border-radius:12px}
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
code,.words{font:12.5px ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:break-word}
.words{overflow-wrap:anywhere}
.n{white-space:nowrap}
details{padding:10px 16px;margin:8px 0}
details .scroll{border:0;margin:8px -16px 0;border-radius:0}
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
.browser{padding:16px;outline:none}
.browser:focus-visible{border-color:var(--accent)}
.controls{display:flex;flex-wrap:wrap;align-items:center;gap:8px 10px}
.browser h4{margin:14px 0 5px;color:var(--soft);font-size:12.5px;font-weight:500}
button{font:inherit;font-size:13px;color:var(--ink);background:var(--bg);border:1px solid var(--line);border-radius:8px;
padding:3px 12px;cursor:pointer}
button:hover{border-color:var(--accent)}
.slide{display:flex;align-items:center;gap:8px;color:var(--soft);font-size:13px;margin:0 8px}
.slide input{width:200px;accent-color:var(--accent)}
.slide b{color:var(--ink);min-width:64px;font-variant-numeric:tabular-nums}
.modes{display:flex;align-items:center;flex-wrap:wrap;gap:4px;margin-left:auto;color:var(--soft);font-size:13px}
.modes input{position:absolute;opacity:0}
.modes span{padding:3px 10px;border:1px solid var(--line);border-radius:8px;cursor:pointer;display:inline-block}
.modes input:checked+span{color:var(--accent);border-color:var(--accent)}
.modes input:focus-visible+span{outline:2px solid var(--accent)}
.strip{display:flex;flex-wrap:wrap;gap:4px;margin:14px 0 4px}
.strip button{min-width:34px;padding:1px 7px;font-size:12px;font-variant-numeric:tabular-nums}
.strip button.on{outline:2px solid var(--accent);outline-offset:1px}
.strip .gap{width:10px}
.facts{display:flex;flex-wrap:wrap;gap:6px 26px;margin:12px 0 0;font-size:13.5px}
.facts div{display:flex;gap:7px}
.facts dt,.words dt{color:var(--faint)}
.facts dd,.words dd{margin:0;font-variant-numeric:tabular-nums}
dl.words{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;font:inherit;font-size:13px}
.text{margin:0;padding:10px 12px;background:var(--bg);border-radius:8px;white-space:pre-wrap;overflow-wrap:anywhere;
font:13.5px/1.75 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;max-height:420px;overflow:auto}
.answer span{border-radius:3px;padding:2px 1px;margin-right:1px;cursor:default}
.answer span:hover{outline:1.5px solid var(--ink)}
.answer .given{color:var(--faint)}
.answer .mark{color:var(--faint);padding:0}
.scale{float:right;display:flex;flex-wrap:wrap;align-items:center;gap:4px 10px}
.scale i{display:inline-block;width:120px;height:9px;border-radius:5px}
.scale .chip{width:11px;height:11px;border-radius:3px;margin-right:5px;vertical-align:-1px}
.reading{margin:8px 2px 0;color:var(--soft);font-size:13px;min-height:1.5em;font-variant-numeric:tabular-nums}
@media (max-width:700px){nav{position:static}.cards{grid-template-columns:minmax(0,1fr)}.modes{margin-left:0}}
@media print{nav,.controls{display:none}}
"""

SCRIPT = """
(() => {
  const holder = document.getElementById("s-data");
  if (!holder) return;
  const samples = JSON.parse(holder.textContent);
  const $ = (id) => document.getElementById("s-" + id);
  const steps = [];
  samples.forEach((s, i) => {
    const name = (s.kind + " " + s.step).trim();
    if (!steps.length || steps[steps.length - 1].name !== name) steps.push({name, first: i, count: 0});
    steps[steps.length - 1].count++;
    s.place = steps.length - 1;
  });
  const rewards = samples.map((s) => s.reward).filter((r) => r !== null);
  const low = Math.min(...rewards, 0), high = Math.max(...rewards, low + 1e-9);
  let at = 0, mode = "logp";

  const number = (x) => x === null || x === undefined ? "–"
    : x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(1) : String(+x.toPrecision(4));
  const signed = (x) => (x > 0 ? "+" : "") + number(x);
  const node = (tag, words, kind) => {
    const made = document.createElement(tag);
    if (words !== undefined) made.textContent = words;
    if (kind) made.className = kind;
    return made;
  };
  const hue = (v, list) => `var(--c${list.indexOf(v) % 8})`;
  // Strength of a difference on a log scale, so that rounding errors stay pale: 1e-6 none, 1 full.
  const strength = (d) => d === 0 ? 0 : Math.max(0, Math.min(1, (Math.log10(Math.abs(d)) + 6) / 6));

  function colour(s, i, versions) {
    if (mode === "version") {
      const v = s.versions[i];
      return v === undefined || v < 0 ? "" : `color-mix(in srgb, ${hue(v, versions)} 38%, transparent)`;
    }
    if (mode === "gap") {
      const d = s.gap[i];
      return d ? `rgb(var(--${d > 0 ? "up" : "down"}) / ${0.75 * strength(d)})` : "";
    }
    const p = s.logp[i];
    return p === null || p === undefined ? "" : `rgb(var(--hot) / ${0.75 * Math.min(1, -p / 4)})`;
  }

  function scale(s, versions) {
    const box = $("scale");
    box.textContent = "";
    const strip = (css) => { const i = node("i"); i.style.background = css; return i; };
    if (mode === "version") {
      for (const v of versions) {
        const count = s.versions.filter((x) => x === v).length;
        const one = node("span"), chip = node("i", "", "chip");
        chip.style.background = `color-mix(in srgb, ${hue(v, versions)} 38%, transparent)`;
        one.append(chip, `version ${v}: ${count} token${count === 1 ? "" : "s"}`);
        box.append(one);
      }
    } else if (mode === "gap") {
      if (!s.gap.length) { box.append("the run logged no trainer log-probabilities"); return; }
      const c = (n, a) => `rgb(var(--${n}) / ${a})`;
      const css = `linear-gradient(90deg, ${c("down", 0.75)}, ${c("down", 0)}, ${c("up", 0)}, ${c("up", 0.75)})`;
      box.append("trainer lower by 1 nat", strip(css), "higher (log scale, none below 1e-6)");
    } else {
      box.append("certain", strip("linear-gradient(90deg, rgb(var(--hot) / 0), rgb(var(--hot) / .75))"),
        "unlikely (-4 nats)");
    }
  }

  function reading(s, i) {
    const v = s.versions[i], parts = [`token ${i + 1} of ${s.tokens.length}: ${JSON.stringify(s.tokens[i])}`];
    if (v !== undefined && v < 0) return parts[0] + " · not sampled by the policy";
    const p = s.logp[i];
    if (p !== null && p !== undefined) parts.push(`log-probability ${number(p)} (${(100 * Math.exp(p)).toFixed(1)}%)`);
    if (v !== undefined) {
      const late = s.version === null ? null : s.version - v;
      parts.push(`version ${v}` + (late > 0 ? `, ${late} behind` : ""));
    }
    if (s.gap[i] !== null && s.gap[i] !== undefined) parts.push(`trainer − sampler ${signed(s.gap[i])}`);
    return parts.join(" · ");
  }

  function show() {
    const s = samples[at], step = steps[s.place];
    const versions = [...new Set(s.versions.filter((v) => v >= 0))].sort((a, b) => a - b);
    $("step").value = s.place;
    $("step-name").textContent = step.name;
    $("strip").textContent = "";
    for (let i = step.first; i < step.first + step.count; i++) {
      if (i > step.first && samples[i].prompt !== samples[i - 1].prompt) $("strip").append(node("span", "", "gap"));
      const one = node("button", number(samples[i].reward), i === at ? "on" : "");
      const share = samples[i].reward === null ? 0 : (samples[i].reward - low) / (high - low);
      one.style.background = `color-mix(in srgb, var(--c2) ${Math.round(45 * share)}%, var(--bg))`;
      one.title = `sample ${i - step.first + 1} of ${step.count}, reward ${number(samples[i].reward)}`;
      one.onclick = () => { at = i; show(); };
      $("strip").append(one);
    }
    const known = s.logp.filter((p, i) => p !== null && !(s.versions[i] < 0));
    const mean = known.length ? number(known.reduce((a, b) => a + b, 0) / known.length) : "–";
    const facts = [["reward", number(s.reward)], ["advantage", number(s.adv)], ["finish", s.finish],
      ["tokens", s.tokens.length],
      ["mean log-probability", mean],
      ["trained at", s.version === null ? "–" : "version " + s.version],
      ["sampled by", versions.length ? "version " + versions.join(", ") : "–"]];
    $("facts").textContent = "";
    for (const [term, value] of facts) {
      const pair = node("div");
      pair.append(node("dt", term), node("dd", value));
      $("facts").append(pair);
    }
    $("prompt").textContent = s.prompt;
    $("answer").textContent = "";
    s.tokens.forEach((words, i) => {
      const one = node("span", undefined, s.versions[i] < 0 ? "given" : "");
      words.split(/(\\n)/).forEach((part) => {
        if (part === "\\n") one.append(node("span", "⏎", "mark"), "\\n");
        else if (part) one.append(part);
      });
      one.style.background = s.versions[i] < 0 ? "" : colour(s, i, versions);
      one.title = reading(s, i);
      one.onmouseenter = () => { $("reading").textContent = reading(s, i); };
      $("answer").append(one);
    });
    $("other").hidden = !s.text;
    $("plain").textContent = s.text;
    $("reading").textContent = "Hover over a token.";
    scale(s, versions);
  }

  const move = (by) => { at = Math.max(0, Math.min(samples.length - 1, at + by)); show(); };
  $("prev").onclick = () => move(-1);
  $("next").onclick = () => move(1);
  $("step").max = steps.length - 1;
  $("step").oninput = (e) => { at = steps[+e.target.value].first; show(); };
  for (const box of document.getElementsByName("colour")) box.onchange = () => { mode = box.value; show(); };
  $("browser").onkeydown = (e) => {
    if (e.target.type === "range" || e.target.type === "radio") return;
    if (e.key === "ArrowRight") move(1); else if (e.key === "ArrowLeft") move(-1); else return;
    e.preventDefault();
  };
  $("browser").hidden = false;
  show();
})();
"""
