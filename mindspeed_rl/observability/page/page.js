"use strict";
// Everything that comes from the run is put into the document as text (textContent), never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
// Okabe and Ito's colours, which the colour-blind tell apart, then darker ones for many series
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7b5ea7", "#8c8c8c", "#a6761d", "#1b4f72", "#7a2e00"];
const DASHES = ["none", "7 4", "2 3", "7 3 2 3"];
const many = data.runs.length > 1;
const drawn = [];

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else node.setAttribute(name, value);
  }
  for (const child of children) if (child !== null && child !== undefined) node.append(child);
  return node;
}

function clock(seconds) {
  const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60, two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

const dark = () => document.documentElement.dataset.theme === "dark";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// the lines of a chart with their colours and names; runs have colours where there are several, else metrics
function namedLines(chart) {
  const names = [...new Set(chart.lines.map((line) => line.name))];
  return chart.lines.map((line) => {
    const which = names.indexOf(line.name), run = data.runs[line.run].name;
    const label = many ? (names.length > 1 ? `${run} · ${line.label}` : run) : line.label;
    return { ...line, label, color: COLORS[(many ? line.run : which) % COLORS.length], dash: many ? DASHES[which % DASHES.length] : "none" };
  });
}

function draw(node, chart) {
  const shown = node.chart || (node.chart = { node });
  const kind = chart.kind === "stacked" && many ? "lines" : chart.kind;
  Object.assign(shown, { lines: namedLines(chart), kind, unit: chart.unit, log: chart.log });
  drawChart(shown);
}

function chartCard(chart, wide) {
  const node = el("div", { class: "chart" });
  const save = el("button", { class: "save", title: "this chart as a picture", onclick: () => savePicture(node.chart, chart.title, { ink: css("--ink"), line: css("--line"), card: css("--card") }) }, "PNG");
  drawn.push(() => draw(node, chart));
  return el("div", { class: wide ? "card wide" : "card" }, save, el("h3", {}, chart.title), chart.note ? el("div", { class: "dim small" }, chart.note) : null, node);
}

// ---------------------------------------------------------------- the top

function header() {
  const top = document.getElementById("top");
  top.replaceChildren();
  for (const [index, run] of data.runs.entries()) {
    const kind = run.outcome.startsWith("failed") || run.outcome === "interrupted" ? "failed" : run.outcome === "finished" ? "finished" : "running";
    const planned = run.planned ? ` of ${run.planned}` : "";
    top.append(
      el("h1", {}, many ? el("span", { class: "swatch", style: `background:${COLORS[index % COLORS.length]}` }) : null, run.name),
      el("div", {}, el("span", { class: `outcome ${kind}` }, run.outcome), ` ${run.iterations}${planned} iterations in ${clock(run.seconds)}`,
        el("span", { class: "dim" }, run.package ? `  ·  ${run.title}, mindspeed_rl ${run.package}` : "")),
      el("div", { class: "learnt" }, ...run.learnt.map((line, at) => el("div", at ? { class: "small" } : {}, line))),
      el("div", { class: "tiles" }, ...run.tiles.map((tile) => el("div", { class: "tile", title: tile.metric }, el("b", {}, tile.value), el("span", { class: "dim small" }, tile.label)))),
    );
    for (const alert of run.alerts) {
      top.append(el("div", { class: `alert ${alert.severity}` }, el("b", {}, alert.text), el("div", { class: "dim small" }, alert.advice)));
    }
  }
}

function section(title, id) {
  document.getElementById("nav").append(el("a", { href: `#${id}` }, title));
  const node = el("section", {}, el("h2", { id }, title));
  document.getElementById("main").append(node);
  return node;
}

function charts() {
  for (const title of data.sections) {
    const grid = el("div", { class: "charts" });
    section(title, title.toLowerCase()).append(grid);
    for (const chart of data.charts.filter((c) => c.section === title)) grid.append(chartCard(chart, chart.kind === "stacked"));
    const constants = data.constants.filter((item) => item.section === title);
    if (constants.length) grid.after(el("div", { class: "dim small constants" }, `constant: ${constants.map((item) => item.text).join(" · ")}`));
    if (title === "Learning") examples();
  }
}

// ---------------------------------------------------------------- the timeline

function timeline() {
  const { rows, tids, bars } = data.timeline;
  if (!bars.length) return;
  const node = el("div", { class: "chart timeline" });
  section("Timeline", "timeline").append(el("div", { class: "card" }, el("div", { class: "dim small" }, "the last iterations, a row for each process; the whole is timeline.json for ui.perfetto.dev"), node));
  const names = [...new Set(bars.map((bar) => bar[1]))].filter((name) => name !== "all");
  const color = (name) => COLORS[names.indexOf(name) % COLORS.length];
  const shown = bars.filter((bar) => bar[1] !== "all").map(([tid, name, iteration, start, length]) => ({ row: tids.indexOf(tid), start, length, color: color(name), text: `${name}, iteration ${iteration}: ${length.toFixed(3)} s` }));
  drawn.push(() => drawBars(node, rows, shown, names.map((name) => ({ label: name, color: color(name) }))));
}

// ---------------------------------------------------------------- before and after

function examples() {
  if (!data.examples.length) return;
  const side = (name, row) => el("div", { class: "response" }, el("b", {}, `${name}, ${row.iteration ? `iteration ${row.iteration}` : "before training"}`),
    `  ${row.reward === null ? "no score" : `reward ${Number(row.reward).toPrecision(3)}`}`, el("div", { class: "text" }, row.response));
  section("Before and after", "examples").append(...data.examples.map((pair) => el("div", { class: "card pair" },
    el("div", { class: "prompt" }, pair.prompt), pair.label ? el("div", { class: "small" }, el("b", {}, "label "), String(pair.label)) : null,
    el("div", { class: "responses" }, side("first", pair.before), ...(pair.before.iteration === pair.after.iteration ? [] : [side("last", pair.after)])))));
}

// ---------------------------------------------------------------- samples

const MODES = {
  "plain text": null,
  "log-prob": { key: "log_probs", low: -4, high: 0, colors: ["#d1242f", "#eac54f", "#2da44e"], text: "chosen against the odds (-4 and less) to certain (0)" },
  "advantage": { key: "advantages", around: true, colors: ["#d1242f", "#888888", "#2da44e"], text: "pushed down to pushed up" },
  "importance weight": { key: "weights", low: 0.5, high: 1.5, colors: ["#1f6feb", "#888888", "#d1242f"], text: "trainer against rollout: half as likely to half as likely again" },
  "update ratio": { key: "ratios", low: 0.5, high: 1.5, colors: ["#1f6feb", "#888888", "#d1242f"], text: "the last step of the update against before: half as likely to half as likely again" },
  "clipped": { key: "clipped", low: 0, high: 1, colors: ["#888888", "#eac54f", "#d1242f"], text: "red: the loss cut the token's gradient in the last step of the update" },
  "weight version": { key: "versions", spread: true, colors: ["#d1242f", "#eac54f", "#1f6feb"], text: "older to newer weights" },
};

function mix(colors, at) {
  const spot = Math.min(Math.max(at, 0), 1) * (colors.length - 1), index = Math.min(Math.floor(spot), colors.length - 2), part = spot - index;
  const [a, b] = [colors[index], colors[index + 1]].map((color) => parseInt(color.slice(1), 16));
  const channel = (shift) => Math.round(((a >> shift) & 255) * (1 - part) + ((b >> shift) & 255) * part);
  return `rgba(${channel(16)},${channel(8)},${channel(0)},0.38)`;
}

function place(mode, values) {
  const known = values.filter((v) => v !== null && v !== undefined);
  let low = mode.low, high = mode.high;
  if (mode.around) { high = Math.max(1e-9, ...known.map(Math.abs)); low = -high; }
  if (mode.spread) { low = Math.min(...known); high = Math.max(...known, low + 1e-9); }
  return (value) => (value - low) / (high - low);
}

function tokenText(sample, mode) {
  const box = el("div", { class: "text" }), tokens = sample.tokens;
  if (!tokens) { box.append(sample.response); return box; }
  const values = mode ? tokens[mode.key] : null, where = values ? place(mode, values) : null;
  let tool = null, label = null, count = 0;
  tokens.texts.forEach((text, index) => {
    const sampled = !tokens.sampled || tokens.sampled[index];
    if (!sampled && !tool) {
      label = el("summary", {}, ""); count = 0;
      tool = el("details", { class: "tool" }, label); box.append(tool);
    } else if (sampled) tool = null;
    const span = el("span", {}, text);
    if (tokens.loss_mask && sampled && !tokens.loss_mask[index]) span.className = "masked";
    if (values && values[index] !== null && values[index] !== undefined) span.style.background = mix(mode.colors, where(values[index]));
    const facts = [`token ${index}, id ${tokens.ids[index]}`];
    for (const [key, name] of [["log_probs", "rollout log-prob"], ["trainer_log_probs", "trainer log-prob"], ["weights", "importance weight"], ["ratios", "update ratio"], ["clipped", "clipped"], ["advantages", "advantage"], ["versions", "weights of version"]]) {
      if (tokens[key]) facts.push(`${name} ${Number(tokens[key][index]).toPrecision(4).replace(/\.?0+$/, "")}`);
    }
    span.title = facts.join("\n");
    if (tool) { tool.append(span); label.textContent = `not sampled: ${++count} tokens (tool, environment)`; } else box.append(span);
  });
  return box;
}

function samples() {
  if (!data.samples.length) return;
  const host = section("Samples", "samples");
  const iterations = [...new Set(data.samples.map((s) => s.iteration))];
  const pick = (options, onchange, labels) => {
    const node = el("select", { onchange });
    node.fill = (values, texts) => { node.replaceChildren(...values.map((v, i) => el("option", { value: String(v) }, texts ? texts[i] : String(v)))); };
    node.fill(options, labels);
    return node;
  };
  const which = pick(iterations, () => fillGroups());
  const group = pick([], () => show());
  const color = pick(Object.keys(MODES), () => show());
  const legend = el("span", { class: "legend" }), body = el("div", {});
  which.value = String(iterations[iterations.length - 1]);
  if (data.samples.some((s) => s.tokens)) color.value = "log-prob";
  const current = () => data.samples.filter((s) => String(s.iteration) === which.value);
  const keyOf = (s) => String(s.group ?? s.prompt);
  const step = (by) => { const at = group.selectedIndex + by; if (at >= 0 && at < group.options.length) { group.selectedIndex = at; show(); } };
  host.append(el("div", { class: "bar" }, "iteration ", which, el("button", { onclick: () => step(-1) }, "‹"), group, el("button", { onclick: () => step(1) }, "›"), "colour ", color, legend), body);

  function fillGroups() {
    const keys = [...new Set(current().map(keyOf))];
    group.fill(keys, keys.map((key, i) => {
      const own = current().filter((s) => keyOf(s) === key).map((s) => s.reward ?? 0);
      return `prompt ${i + 1} of ${keys.length}, mean reward ${(own.reduce((a, b) => a + b, 0) / own.length).toFixed(2)}`;
    }));
    show();
  }

  function show() {
    const own = current().filter((s) => keyOf(s) === group.value), mode = MODES[color.value];
    if (!own.length) return;
    const best = Math.max(...own.map((s) => s.reward ?? -Infinity));
    legend.replaceChildren();
    if (mode) legend.append(el("span", { class: "ramp", style: `background:linear-gradient(90deg,${[0, 0.5, 1].map((at) => mix(mode.colors, at)).join(",")})` }), mode.text);
    const label = own[0].extra && own[0].extra.label !== undefined && own[0].extra.label !== "" ? el("div", { class: "small" }, el("b", {}, "label "), String(own[0].extra.label)) : null;
    body.replaceChildren(
      el("div", { class: "card" }, el("div", { class: "prompt" }, own[0].prompt), label,
        ...own.flatMap((s) => s.extra && s.extra.images || []).map((src) => el("img", { src, alt: "image of the prompt", style: "margin:.4em .4em 0 0" }))),
      el("div", { class: "responses" }, ...own.map((s) => {
        const parts = Object.entries(s.parts || {}).map(([name, value]) => `${name} ${Number(value).toPrecision(3)}`).join(" · ");
        const extra = Object.entries(s.extra || {}).filter(([name, value]) => name !== "label" && name !== "images" && value !== false && value !== "scored" && value !== "ok").map(([name, value]) => value === true ? name : `${name} ${value}`).join(" · ");
        return el("div", { class: s.reward === best && own.some((o) => o.reward !== best) ? "response best" : "response" },
          el("b", {}, s.reward === null ? "no score" : `reward ${Number(s.reward).toPrecision(3)}`), s.advantage === null ? "" : `  advantage ${Number(s.advantage).toPrecision(3)}`,
          el("div", { class: "dim small" }, [parts, extra, s.sample === undefined || s.sample === null ? "" : `sample ${s.sample}`].filter(Boolean).join(" · ")),
          ...(s.turns || []).map(([depth, line]) => el("div", { class: "dim small", style: `padding-left:${depth}em` }, line)), tokenText(s, mode));
      })),
    );
  }
  fillGroups();
}

// ---------------------------------------------------------------- the rest

function others() {
  if (!data.others.length) return;
  const node = el("div", { class: "chart" });
  const select = el("select", { onchange: () => draw(node, data.others[select.selectedIndex]) }, ...data.others.map((chart) => el("option", {}, chart.title)));
  section("Other metrics", "others").append(el("div", { class: "card" }, select, node));
  drawn.push(() => draw(node, data.others[select.selectedIndex]));
}

function flat(tree, path) {
  return Object.entries(tree).flatMap(([name, value]) => value && typeof value === "object" && !Array.isArray(value) ? flat(value, [...path, name]) : [[[...path, name].join("."), JSON.stringify(value)]]);
}

function configuration() {
  const rows = new Map();
  data.runs.forEach((run, index) => { for (const [key, value] of flat(run.config, [])) { if (!rows.has(key)) rows.set(key, []); rows.get(key)[index] = value; } });
  if (!rows.size) return;
  const body = [...rows].sort().map(([key, values]) => {
    const same = data.runs.every((_, index) => values[index] === values[0]);
    return el("tr", {}, el("td", {}, key), ...data.runs.map((_, index) => el("td", same ? {} : { style: "font-weight:600" }, values[index] ?? "")));
  });
  section("Configuration", "configuration").append(el("details", { class: "card" }, el("summary", {}, `${rows.size} keys`), el("div", { class: "dim small" }, many ? "what the run files set; bold where they differ" : "what the run file sets; every other key has its default"),
    el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "key"), ...data.runs.map((run) => el("th", {}, many ? run.name : "value")))), el("tbody", {}, ...body))));
}

function planned() {
  const rows = data.runs.flatMap((run) => (run.plan.rows || []).filter((row) => row.measured !== null).map((row) => [run, row]));
  if (!rows.length) return;
  const digits = (value) => Number(value.toPrecision(3)).toString();
  const body = rows.map(([run, row]) => el("tr", {}, el("td", {}, many ? `${run.name}: ${row.name}` : row.name), el("td", {}, row.unit),
    ...[row.predicted, row.with_lengths, row.low, row.high].map((value) => el("td", {}, value === null ? "" : digits(value))),
    el("td", row.measured < row.low || row.measured > row.high ? { style: "font-weight:600" } : {}, digits(row.measured))));
  section("Plan", "plan").append(el("details", { class: "card" }, el("summary", {}, "predicted and measured"), el("div", { class: "dim small" }, "what was predicted before the run, and what it measured (median of the later half); bold outside of what was expected"),
    el("table", {}, el("thead", {}, el("tr", {}, ...["", "unit", "predicted", "with the lengths that came", "from", "to", "measured"].map((head) => el("th", {}, head)))), el("tbody", {}, ...body))));
}

function promised() {
  const rows = data.runs.flatMap((run) => (run.plan.kept || []).map((row) => [run, row]));
  if (!rows.length) return;
  const digits = (value) => Number(value.toPrecision(3)).toString();
  const body = rows.map(([run, row]) => el("tr", {}, el("td", {}, many ? `${run.name}: ${row.name}` : row.name), el("td", {}, row.unit),
    el("td", {}, `${digits(row.low)} to ${digits(row.high)}`), el("td", row.broken ? { style: "font-weight:600" } : {}, digits(row.measured)), el("td", {}, row.cause)));
  const broken = rows.filter(([, row]) => row.broken).length;
  section("Promise", "promise").append(el("details", { class: "card" }, el("summary", {}, `promised, measured, cause: ${broken ? `${broken} of ${rows.length} above` : `all ${rows.length} kept`}`),
    el("div", { class: "dim small" }, "what was promised before the run, the median of the later half of its iterations, and what explains a figure above its range (bold)"),
    el("table", {}, el("thead", {}, el("tr", {}, ...["", "unit", "promised", "measured", "cause"].map((head) => el("th", {}, head)))), el("tbody", {}, ...body))));
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  drawn.forEach((again) => again());
}

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
header();
charts();
samples();
timeline();
others();
promised();
planned();
configuration();
document.getElementById("nav").append(el("button", { onclick: () => theme(dark() ? "light" : "dark") }, "light / dark"));
const versions = data.runs[0].versions;
document.body.append(el("footer", {}, Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(" · ")));
drawn.forEach((again) => again());
// a phone settles its width after the page was laid out
let width = document.getElementById("main").clientWidth;
new ResizeObserver(() => {
  const now = document.getElementById("main").clientWidth;
  if (now !== width) { width = now; drawn.forEach((again) => again()); }
}).observe(document.getElementById("main"));

// ---------------------------------------------------------------- a page that follows its runs

// what the layout was made for: other charts or examples need another one
const shape = (figures) => JSON.stringify([figures.charts, figures.others].map((list) => list.map((chart) => [chart.title, chart.lines.length])).concat(figures.examples.map((pair) => pair.after.iteration)));

function refresh(figures) {
  if (shape(figures) !== shape(data)) { location.reload(); return; }
  for (const list of ["charts", "others"]) data[list].forEach((chart, at) => { chart.lines = figures[list][at].lines; });
  data.runs = figures.runs;
  header();
  drawn.forEach((again) => again());
}

if (data.live) new EventSource("/events").onmessage = (event) => refresh(JSON.parse(event.data));
