"""The look of `report.html`: one file, nothing loaded from anywhere, which its content security policy enforces."""

STYLE = """
:root { --page: #f6f7f9; --card: #ffffff; --text: #1c2330; --soft: #5b6676; --line: #dfe3e9; --grid: #e8ebf0; --accent: #1f66b5;
  --strong: #b3263a; --moderate: #8a5a00; --weak: #4c5a6b; --code: #eef1f5; }
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --text: #e4e8ee; --soft: #9aa6b5; --line: #2d3643; --grid: #29313d; --accent: #6aa9f0;
    --strong: #ff8a97; --moderate: #f0b95a; --weak: #b3bfcd; --code: #232b36;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
@media (max-width: 500px) { main { padding: 16px 10px 32px; } section, figure { padding: 12px !important; } }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 8px; overflow-wrap: anywhere; }
h2.free { margin: 28px 0 0; }
h3 { font-size: 1.02rem; margin: 0 0 6px; overflow-wrap: anywhere; }
.scroll + h3, .finding + h3 { margin-top: 22px; }
h4 { font-size: 1rem; margin: 0; overflow-wrap: anywhere; }
p { margin: 6px 0; overflow-wrap: anywhere; }
a { color: var(--accent); }
.soft { color: var(--soft); font-size: .9rem; margin: 0 0 12px; }
.state { border-left: 4px solid var(--accent); background: var(--card); padding: 8px 12px; margin: 8px 0;
  border-radius: 0 8px 8px 0; }
.caution { border-left-color: var(--moderate); }
.beneath { margin: 8px 0 0; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 12px 0; font-size: .95rem; }
section, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px; margin: 16px 0; }
.plots { display: grid; grid-template-columns: minmax(0, 1fr); gap: 16px; margin: 12px 0 16px; }
.plots figure { margin: 0; min-width: 0; }
@media (min-width: 900px) {
  .plots { grid-template-columns: repeat(2, minmax(0, 1fr)); } .plots .wide { grid-column: 1 / -1; }
}
ul { margin: 0; padding-left: 1.2em; } li { margin: 4px 0; overflow-wrap: anywhere; }
.warning { border-left: 4px solid #d1495b; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child { text-align: left; padding-left: 0; }
td { white-space: nowrap; } tbody th { font-weight: inherit; white-space: normal; min-width: 9.5em; max-width: 26em; }
thead th { color: var(--soft); font-weight: 600; }
tr.bold td, tr.bold th { font-weight: 650; }
tbody tr:last-child > * { border-bottom: 0; }
.finding { border-left: 4px solid var(--weak); padding: 2px 0 2px 12px; margin: 14px 0; }
.finding.strong { border-color: var(--strong); } .finding.moderate { border-color: var(--moderate); }
.badge { display: inline-block; border: 1px solid currentColor; border-radius: 99px; padding: 0 9px; margin-right: 6px;
  font-size: .8rem; font-weight: 650; color: var(--weak); vertical-align: 1px; }
.badge.strong { color: var(--strong); } .badge.moderate { color: var(--moderate); }
.cell-strong { color: var(--strong); font-weight: 650; } .cell-moderate { color: var(--moderate); font-weight: 650; }
.advice::before { content: "→ "; }
details { margin: 6px 0; } summary { cursor: pointer; color: var(--accent); }
dl { display: grid; grid-template-columns: minmax(6em, max-content) minmax(0, 1fr); gap: 2px 14px; margin: 8px 0;
  font-size: .9rem; }
dt { color: var(--soft); overflow-wrap: anywhere; } dd { margin: 0; overflow-wrap: anywhere; }
code { font: .85rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { background: var(--code); border-radius: 6px; padding: 8px 10px; margin: 6px 0; white-space: pre-wrap; }
pre code { user-select: all; -webkit-user-select: all; }
.plot { width: 100%; }
"""

# Sizes: a legend above a plot takes lines by the width of the page, so the page, which knows it, adds their height to the figure.
SCRIPT = """
function theme() {
  const css = getComputedStyle(document.documentElement), of = name => css.getPropertyValue(name).trim();
  return { text: of("--text"), soft: of("--soft"), grid: of("--grid"), line: of("--line"), card: of("--card") };
}
function themed(layout) {
  const t = theme(), changed = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": t.text };
  changed["hoverlabel.bgcolor"] = t.card; changed["hoverlabel.font.color"] = t.text; changed["hoverlabel.bordercolor"] = t.line;
  for (const key of Object.keys(layout)) if (/^[xy]axis[0-9]*$/.test(key)) {
    changed[key + ".gridcolor"] = t.grid; changed[key + ".linecolor"] = t.line; changed[key + ".tickfont.color"] = t.soft;
    changed[key + ".showgrid"] = true; changed[key + ".showline"] = true;
  }
  return changed;
}
function sized(figure, width) {
  const names = figure.data.filter(t => t.showlegend !== false && t.name).map(t => t.name);
  if (names.length < 2 && !figure.data.some(t => t.showlegend === true)) return { height: figure.base, "margin.t": 10 };
  const longest = Math.max(...names.map(name => 40 + 5.8 * name.length));
  const beside = figure.layout.yaxis?.type === "category" ? Math.max(...figure.data.flatMap(t => t.y).map(y => y.length)) : 0;
  const lines = Math.ceil(names.length / Math.max(1, Math.floor((width - 56 - 6 * beside) / longest)));
  return { height: figure.base + 20 * lines, "margin.t": 16 + 20 * lines };
}
async function draw() {
  for (const [key, figure] of Object.entries(figures)) {
    const box = document.getElementById("plot-" + key);
    figure.base = figure.layout.height;
    figure.width = box.clientWidth;
    const size = sized(figure, figure.width);
    box.style.height = size.height + "px";
    if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false;  // a finger scrolls the page
    await Plotly.newPlot(box, figure.data, figure.layout, { responsive: true, displaylogo: false, displayModeBar: false });
    await Plotly.relayout(box, { ...themed(figure.layout), ...size });
  }
  document.documentElement.dataset.drawn = "yes";
}
let waiting = 0;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    for (const [key, figure] of Object.entries(figures)) {
      const box = document.getElementById("plot-" + key);
      if (box.clientWidth === figure.width) continue;
      figure.width = box.clientWidth;
      const size = sized(figure, figure.width);
      box.style.height = size.height + "px";
      Plotly.relayout(box, size);
    }
  }, 150);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [key, figure] of Object.entries(figures)) Plotly.relayout("plot-" + key, themed(figure.layout));
});
draw();
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="color-scheme" content="light dark">
<title>{{ report.title }}</title>
<link rel="icon" href="data:,">
<style>{{ style }}</style>
</head>
<body>
{% macro show(table, badges=false) %}
<div class="scroll" role="region" tabindex="0" aria-label="{{ table.title or 'table' }}"><table>
<thead><tr>{% for cell in table.header %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr{% if loop.index0 in table.bold %} class="bold"{% endif %}>
{% for cell in row %}{% if loop.first %}<th scope="row">{{ cell }}</th>{% else %}
<td{% if badges and cell in ("strong", "moderate") %} class="cell-{{ cell }}"{% endif %}>{{ cell }}</td>{% endif %}
{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% if table.note %}<p class="soft beneath">{{ table.note }}</p>{% endif %}
{% endmacro %}
{% macro finding(one) %}
<div class="finding {{ one.strength }}">
<h4><span class="badge {{ one.strength }}">{{ one.strength }}</span>{{ one.title }}</h4>
<p>{{ one.text }}</p>
<p class="advice">{{ one.advice }}</p>
<details><summary>Evidence and rows</summary>
<dl><dt>kind</dt><dd>{{ one.kind }}</dd><dt>rests on</dt><dd>{{ one.figure }}</dd>
{% for name, value in one.evidence %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}
<dt>rows to look at</dt><dd>{{ one.rows }}</dd></dl>
<p class="soft">For DuckDB, started in the report's folder; one click selects it:</p>
<pre><code>{{ one.query }}</code></pre></details>
</div>
{% endmacro %}
{% macro together(one) %}
<div class="finding {{ one.strength }}">
<h4><span class="badge {{ one.strength }}">{{ one.strength }}</span>{{ one.title }}</h4>
<p>{{ one.figure }} Runs: {{ one.runs }}.</p>
<p>{{ one.text }}</p>
{% for line in one.advice %}<p class="advice">{{ line }}</p>{% endfor %}
</div>
{% endmacro %}
<main>
<header>
<h1>{{ report.title }}</h1>
<p class="soft">{{ report.subtitle }}</p>
{% for line in report.states %}<p class="state" role="status">{{ line }}</p>{% endfor %}
{% for line in report.warnings %}<p class="state caution" role="note">{{ line }}</p>{% endfor %}
</header>
{% if report.differences %}
<section class="warning"><h2>Not comparable as they are</h2>
<ul>{% for line in report.differences %}<li>{{ line }}</li>{% endfor %}</ul></section>
{% endif %}
<section id="summary"><h2>Summary</h2><ul>{% for line in report.head %}<li>{{ line }}</li>{% endfor %}</ul></section>
<nav aria-label="Contents">{% for anchor, title in sections %}<a href="#{{ anchor }}">{{ title }}</a>{% endfor %}</nav>
{% set told = report.findings %}
<section id="findings"><h2>Findings</h2>
{% if not told.runs %}
<p><strong>{{ nothing }}</strong>{% if told.is_running %} So far.{% endif %}
 Looked for: {{ told.looked_for | join("; ") }}. <span class="soft">{{ quiet_note }}</span></p>
{% endif %}
{% if told.matrix %}{{ show(told.matrix, true) }}{% endif %}
{% if told.together %}<h3>{{ together_title }}</h3>
{% for one in told.together %}{{ together(one) }}{% endfor %}
<h3>Each run by itself</h3>{% endif %}
{% for run in told.runs %}
{% if told.folded %}<details><summary>{{ run.name }}: {{ run.findings | length }}</summary>
<h3>{{ run.name }}</h3>{% else %}<h3>{{ run.name }}</h3>{% endif %}
{% for one in run.findings %}{{ finding(one) }}{% endfor %}
{% if told.folded %}</details>{% endif %}
{% endfor %}
{% if told.runs %}
{% if told.quiet and not told.folded %}<p>Nothing stood out in {{ told.quiet | join(", ") }}.</p>{% endif %}
{% if told.looked_for %}<details><summary>Looked for and not found</summary>
<ul>{% for line in told.looked_for %}<li>{{ line }}</li>{% endfor %}</ul><p class="soft">{{ quiet_note }}</p></details>{% endif %}
{% endif %}
{% if told.suspects %}<h3>{{ suspects_title }}</h3><ul>
{% for name, lines in told.suspects %}{% for line in lines %}<li>{{ name }}. {{ line }}</li>{% endfor %}{% endfor %}
</ul>{% endif %}
{% if told.reading %}<details><summary>{{ reading_title }}</summary>
<ul>{% for line in told.reading %}<li>{{ line }}</li>{% endfor %}</ul></details>{% endif %}
</section>
{% if report.figures %}
<section><h2>In figures</h2><ul>{% for line in report.figures %}<li>{{ line }}</li>{% endfor %}</ul></section>
{% endif %}
<section id="runs"><h2>Runs</h2>{{ show(report.runs) }}</section>
{% if report.groups %}
<section id="groups"><h2>Groups of runs</h2>{% for note in report.group_notes %}<p class="soft">{{ note }}</p>{% endfor %}
{% for table in report.groups %}<h3>{{ table.title }}</h3>{{ show(table) }}{% endfor %}</section>
{% endif %}
{% for group in report.plots %}
<h2 class="free" id="plots-{{ loop.index0 }}">{{ group.title }}</h2>
<div class="plots">
{% for plot in group.plots %}
<figure{% if plot.wide %} class="wide"{% endif %}><figcaption>
<h3>{{ plot.title }}</h3><p class="soft">{{ plot.caption }}</p></figcaption>
<div class="plot" id="plot-{{ plot.key }}" role="img" aria-label="Plot: {{ plot.title }}. {{ plot.caption }}"
 style="height: {{ plot.figure.layout.height }}px"></div></figure>
{% endfor %}
</div>
{% for note in group.notes %}<p class="soft">{{ note }}</p>{% endfor %}
{% endfor %}
{% if report.comparisons %}
<section id="comparisons"><h2>Comparisons</h2>
{% for note in report.comparison_notes %}<p class="soft">{{ note }}</p>{% endfor %}
{% for table in report.comparisons %}<h3>{{ table.title }}</h3>{{ show(table) }}{% endfor %}</section>
{% endif %}
<section id="buckets"><h2>Buckets</h2>{{ show(report.buckets) }}</section>
</main>
<script>{{ plotly_js }}</script>
<script>
const figures = {{ figures }};
{{ script }}
</script>
</body>
</html>
"""
