"""The look of `report.html`: one file, nothing loaded from anywhere, which its content security policy enforces."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<style>
:root { --page: #f6f7f9; --card: #ffffff; --text: #1c2330; --soft: #5b6676; --line: #dfe3e9; --grid: #e8ebf0; --accent: #2f7fd8; }
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1a2029; --text: #e4e8ee; --soft: #9aa6b5; --line: #2d3643; --grid: #29313d; --accent: #6aa9f0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 8px; overflow-wrap: anywhere; }
.soft { color: var(--soft); font-size: .9rem; margin: 0 0 12px; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px; margin: 16px 0; }
.plots { display: grid; grid-template-columns: 1fr; gap: 16px; margin: 16px 0; }
.plots section { margin: 0; min-width: 0; }
@media (min-width: 900px) { .plots { grid-template-columns: 1fr 1fr; } .plots .wide { grid-column: 1 / -1; } }
ul { margin: 0; padding-left: 1.2em; } li { margin: 4px 0; overflow-wrap: anywhere; }
.warning { border-left: 4px solid #d1495b; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td { white-space: nowrap; } td:first-child { white-space: normal; min-width: 9.5em; max-width: 26em; }
thead th { color: var(--soft); font-weight: 600; }
tr.bold td { font-weight: 650; }
tbody tr:last-child td { border-bottom: 0; }
.plot { width: 100%; }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p class="soft">{{ subtitle }}</p>
{% if differences %}
<section class="warning"><h2>Not comparable as they are</h2>
<ul>{% for line in differences %}<li>{{ line }}</li>{% endfor %}</ul></section>
{% endif %}
<section><h2>Summary</h2><ul>{% for line in summary %}<li>{{ line }}</li>{% endfor %}</ul></section>
{% macro show(table) %}
<div class="scroll"><table>
<thead><tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr{% if loop.index0 in table.bold %} class="bold"{% endif %}>
{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</tbody>
</table></div>
{% endmacro %}
<section><h2>Runs</h2>{{ show(runs) }}</section>
<div class="plots">
{% for plot in plots %}
<section{% if plot.key in wide %} class="wide"{% endif %}><h2>{{ plot.title }}</h2><p class="soft">{{ plot.caption }}</p>
<div class="plot" id="plot-{{ plot.key }}" style="height: {{ plot.figure.layout.height }}px"></div></section>
{% endfor %}
</div>
{% for note in notes %}<p class="soft">{{ note }}</p>{% endfor %}
{% for table in comparisons %}
<section><h2>{{ table.title }}</h2>
<p class="soft">Bold: the interval of the difference excludes zero. Intervals cover the noise between the steps of these runs
(circular block bootstrap), not the choice of the seed. Effect: the difference in standard deviations of the step noise (sd), or
the ratio of the two values (×).</p>
{{ show(table) }}</section>
{% endfor %}
<section><h2>Buckets</h2>{{ show(buckets) }}</section>
</main>
<script>{{ plotly_js }}</script>
<script>
const figures = {{ figures }};
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
async function draw() {
  for (const [key, figure] of Object.entries(figures)) {
    const box = document.getElementById("plot-" + key);
    await Plotly.newPlot(box, figure.data, figure.layout, { responsive: true, displaylogo: false, displayModeBar: false });
    await Plotly.relayout(box, themed(figure.layout));
  }
  document.documentElement.dataset.drawn = "yes";
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [key, figure] of Object.entries(figures)) Plotly.relayout("plot-" + key, themed(figure.layout));
});
draw();
</script>
</body>
</html>
"""
