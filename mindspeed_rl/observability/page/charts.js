"use strict";
// Curves, stacked areas and bars as SVG. A chart is {node, lines, kind, unit, log, xLabel}; it is drawn at the size of its node.
const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 58, right: 12, top: 8, bottom: 30 };

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// round values between two bounds, a step of 1, 2 or 5 times a power of ten apart
function linearTicks(low, high, count) {
  const raw = (high - low) / count, unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= raw * 0.999);
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) ticks.push(Number((index * step).toPrecision(12)));
  return ticks;
}

// powers of ten; over less than two of them 2 and 5 times each as well, over less than one round values
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1) return linearTicks(low, high, count).filter((value) => value > 0);
  const factors = decades < 2 ? [1, 2, 5] : [1], every = Math.max(1, Math.ceil(decades / (2 * count)));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    if (power % every) continue;
    for (const factor of factors) {
      const value = Number(`${factor}e${power}`);
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  }
  return ticks;
}

function tickText(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  return size >= 1e5 || size < 1e-3 ? value.toExponential().replace("e+", "e") : String(Number(value.toPrecision(6)));
}

// bounds of an axis with a little room; a constant has 0 and its double around it
function axisBounds(values, isLog, fromZero) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  if (low > high) return [0, 1];
  if (isLog) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  if (fromZero) return [0, high * 1.04 || 1];
  if (low === high) return low ? [Math.min(0, 2 * low), Math.max(0, 2 * low)] : [-1, 1];
  const room = 0.04 * (high - low);
  return [low - room, high + room];
}

function makeAxes(chart, xs, ys) {
  const width = Math.max(160, chart.node.clientWidth), height = chart.plot.clientHeight || 220;
  const area = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const positive = ys.filter((value) => value > 0), isLog = chart.log && positive.length > 0;
  const [low, high] = axisBounds(isLog ? positive : ys, isLog, chart.kind === "stacked");
  let [first, last] = [Infinity, -Infinity];
  for (const x of xs) { if (x < first) first = x; if (x > last) last = x; }
  if (!(first < last)) { first -= 0.5; last = first + 1; }
  const at = isLog ? (value) => Math.log(value) : (value) => value, span = at(high) - at(low);
  return {
    width, height, area, isLog, low, high, first, last,
    x: (value) => area.left + ((value - first) / (last - first)) * (area.right - area.left),
    y: (value) => area.bottom - ((at(value) - at(low)) / span) * (area.bottom - area.top),
  };
}

function drawAxes(root, axes, chart) {
  const { area } = axes, lines = svg("g", { class: "grid" }), texts = svg("g", { class: "ticks" });
  const count = Math.max(2, Math.floor((area.bottom - area.top) / 45));
  for (const value of (axes.isLog ? logTicks : linearTicks)(axes.low, axes.high, count)) {
    lines.append(svg("line", { x1: area.left, x2: area.right, y1: axes.y(value), y2: axes.y(value) }));
    texts.append(svg("text", { x: area.left - 6, y: axes.y(value) + 4, "text-anchor": "end" }, tickText(value)));
  }
  const wide = Math.max(2, Math.floor((area.right - area.left) / 80));
  for (const value of linearTicks(axes.first, axes.last, wide)) {
    if (chart.xLabel === "iteration" && value % 1) continue;
    texts.append(svg("text", { x: axes.x(value), y: area.bottom + 15, "text-anchor": "middle" }, tickText(value)));
  }
  texts.append(svg("text", { x: area.right, y: area.bottom + 28, "text-anchor": "end" }, chart.xLabel));
  root.append(lines, texts);
}

function pathOf(xs, ys, axes) {
  let text = "", pen = "M";
  xs.forEach((x, index) => {
    const y = ys[index];
    if (y === null || y === undefined || (axes.isLog && y <= 0)) { pen = "M"; return; }
    text += `${pen}${axes.x(x).toFixed(1)} ${axes.y(y).toFixed(1)}`; pen = "L";
  });
  return text;
}

function bandOf(xs, lows, highs, axes) {
  const floor = axes.isLog ? axes.low : -Infinity;
  const up = xs.map((x, i) => `${axes.x(x).toFixed(1)} ${axes.y(Math.max(highs[i], floor)).toFixed(1)}`);
  const down = xs.map((x, i) => `${axes.x(x).toFixed(1)} ${axes.y(Math.max(lows[i], floor)).toFixed(1)}`).reverse();
  return `M${[...up, ...down].join("L")}Z`;
}

// mean of the values around each, a twentieth of them
function average(values) {
  const half = Math.max(2, Math.round(values.length / 40));
  return values.map((_, i) => { const near = values.slice(Math.max(0, i - half), i + half + 1); return near.reduce((a, b) => a + b, 0) / near.length; });
}

function drawLine(root, line, axes) {
  const stroke = { stroke: line.color, fill: "none" };
  if (line.low && line.low.length) root.append(svg("path", { d: bandOf(line.x, line.low, line.high, axes), fill: line.color, "fill-opacity": 0.18 }));
  const smooth = line.x.length >= 30 && !(line.low && line.low.length) && !axes.isLog ? average(line.y) : null;
  if (smooth) root.append(svg("path", { ...stroke, d: pathOf(line.x, line.y, axes), "stroke-width": 1, "stroke-opacity": 0.3 }));
  root.append(svg("path", { ...stroke, d: pathOf(line.x, smooth || line.y, axes), "stroke-width": 1.8, "stroke-dasharray": line.dash || "none" }));
  if (line.x.length >= 40) return;
  line.x.forEach((x, index) => {
    if (!axes.isLog || line.y[index] > 0) root.append(svg("circle", { cx: axes.x(x), cy: axes.y(line.y[index]), r: 2.5, fill: line.color }));
  });
}

// sums of the lines below each, over the iterations of all
function stack(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let below = xs.map(() => 0);
  return lines.map((line) => {
    const own = new Map(line.x.map((x, index) => [x, line.y[index]])), low = below;
    below = xs.map((x, index) => low[index] + (own.get(x) ?? 0));
    return { ...line, stackX: xs, stackLow: low, stackHigh: below };
  });
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && Math.abs(xs[low - 1] - x) <= Math.abs(xs[low] - x) ? low - 1 : low;
}

function follow(root, chart, axes) {
  const mark = svg("line", { class: "mark", y1: axes.area.top, y2: axes.area.bottom, visibility: "hidden" });
  root.append(mark);
  root.addEventListener("pointerleave", () => { mark.setAttribute("visibility", "hidden"); chart.tip.hidden = true; });
  root.addEventListener("pointermove", (event) => {
    const box = root.getBoundingClientRect(), part = (event.clientX - box.left - axes.area.left) / (axes.area.right - axes.area.left);
    const wanted = axes.first + Math.min(Math.max(part, 0), 1) * (axes.last - axes.first);
    const found = chart.lines.filter((line) => line.x.length).map((line) => [line, nearest(line.x, wanted)]);
    if (!found.length) return;
    const x = found.map(([line, at]) => line.x[at]).reduce((a, b) => (Math.abs(a - wanted) <= Math.abs(b - wanted) ? a : b));
    mark.setAttribute("x1", axes.x(x)); mark.setAttribute("x2", axes.x(x)); mark.setAttribute("visibility", "visible");
    const rows = found.filter(([line, at]) => line.x[at] === x).map(([line, at]) => {
      const row = document.createElement("div"), swatch = document.createElement("i");
      swatch.style.background = line.color;
      row.append(swatch, `${line.label}: ${Number(line.y[at].toPrecision(4))}`);
      return row;
    });
    const head = document.createElement("b");
    head.textContent = `${chart.xLabel} ${x}`;
    chart.tip.replaceChildren(head, ...rows);
    chart.tip.hidden = false;
    chart.tip.style.left = `${Math.min(Math.max(0, axes.x(x) + 10), axes.width - chart.tip.offsetWidth - 4)}px`;
  });
}

function drawLegend(chart) {
  chart.legend.replaceChildren(...(chart.lines.length < 2 ? [] : chart.lines).map((line) => {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.background = line.color;
    item.append(swatch, line.label);
    return item;
  }));
}

// the parts of a chart: unit, plot, legend, and the values under the pointer; the unit and the legend have rows of their own
function prepare(node) {
  const make = (name) => { const part = document.createElement("div"); part.className = name; return part; };
  const parts = { unitNode: make("unit"), plot: make("plot"), legend: make("legend"), tip: make("tip") };
  parts.tip.hidden = true;
  node.replaceChildren(...Object.values(parts));
  return parts;
}

function drawChart(chart) {
  if (!chart.plot) Object.assign(chart, { xLabel: "iteration" }, prepare(chart.node));
  chart.unitNode.textContent = chart.unit || "";
  drawLegend(chart);
  const stacked = chart.kind === "stacked" ? stack(chart.lines) : null;
  const ys = stacked ? stacked.flatMap((line) => line.stackHigh) : chart.lines.flatMap((line) => [...line.y, ...(line.low || []), ...(line.high || [])]);
  const axes = makeAxes(chart, chart.lines.flatMap((line) => line.x), ys);
  const root = svg("svg", { width: axes.width, height: axes.height, viewBox: `0 0 ${axes.width} ${axes.height}`, role: "img" });
  drawAxes(root, axes, chart);
  if (stacked) for (const line of stacked) root.append(svg("path", { d: bandOf(line.stackX, line.stackLow, line.stackHigh, axes), fill: line.color, "fill-opacity": 0.75 }));
  else for (const line of chart.lines) drawLine(root, line, axes);
  follow(root, chart, axes);
  chart.plot.replaceChildren(root);
  chart.axes = axes;
}

// rows of bars over seconds: bars are {row, start, length, color, text}
function drawBars(node, rows, bars, legend) {
  const parts = prepare(node), width = Math.max(160, node.clientWidth), step = 26, top = 4;
  const left = Math.min(160, 12 + 7 * Math.max(...rows.map((row) => row.length))), bottom = top + step * rows.length;
  const last = Math.max(...bars.map((bar) => bar.start + bar.length)) || 1, place = (s) => left + (s / last) * (width - left - 12);
  const root = svg("svg", { width, height: bottom + 32, viewBox: `0 0 ${width} ${bottom + 32}`, role: "img" });
  rows.forEach((row, index) => root.append(svg("g", { class: "ticks" }, svg("text", { x: left - 6, y: top + step * index + 17, "text-anchor": "end" }, row.slice(0, 22)))));
  for (const value of linearTicks(0, last, Math.max(2, Math.floor((width - left) / 80)))) {
    root.append(svg("g", { class: "grid" }, svg("line", { x1: place(value), x2: place(value), y1: top, y2: bottom })),
      svg("g", { class: "ticks" }, svg("text", { x: place(value), y: bottom + 15, "text-anchor": "middle" }, tickText(value))));
  }
  root.append(svg("g", { class: "ticks" }, svg("text", { x: width - 12, y: bottom + 29, "text-anchor": "end" }, "s")));
  for (const bar of bars) {
    const box = svg("rect", { x: place(bar.start), y: top + step * bar.row + 4, width: Math.max(0.5, place(bar.start + bar.length) - place(bar.start)), height: step - 8, fill: bar.color });
    box.append(svg("title", {}, bar.text));
    root.append(box);
  }
  parts.plot.style.height = `${bottom + 32}px`;
  parts.plot.replaceChildren(root);
  drawLegend({ legend: parts.legend, lines: legend });
}

// the chart as a PNG of twice its size, on the colour of its card
function savePicture(chart, title, style) {
  const source = chart.plot.querySelector("svg").cloneNode(true), { width, height } = chart.axes, head = 30 + 18 * chart.lines.length;
  const whole = svg("svg", { xmlns: SVG, width, height: height + head, viewBox: `0 0 ${width} ${height + head}` });
  whole.append(svg("style", {}, `text{font:12px sans-serif;fill:${style.ink}} .grid line{stroke:${style.line}} .mark{display:none}`));
  whole.append(svg("rect", { width, height: height + head, fill: style.card }), svg("text", { x: 10, y: 20, "font-weight": "bold" }, chart.unit ? `${title} (${chart.unit})` : title));
  chart.lines.forEach((line, index) => whole.append(svg("rect", { x: 10, y: 30 + 18 * index, width: 10, height: 10, fill: line.color }), svg("text", { x: 26, y: 40 + 18 * index }, line.label)));
  source.setAttribute("y", head);
  whole.append(source);
  const picture = new Image();
  picture.onload = () => {
    const canvas = document.createElement("canvas"), link = document.createElement("a");
    canvas.width = 2 * width; canvas.height = 2 * (height + head);
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    link.href = canvas.toDataURL("image/png"); link.download = `${title}.png`; link.click();
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(whole))}`;
}

if (typeof module !== "undefined") module.exports = { linearTicks, logTicks, tickText, axisBounds, stack, nearest, average };
