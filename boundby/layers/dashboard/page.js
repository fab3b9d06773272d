const $ = (id) => document.getElementById(id);
const { total, layers, outliers, roofs } = JSON.parse($("data").textContent);
const count = (layers.path || []).length;

const significant = (value, digits) => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e12) return value.toExponential(digits - 1);
  const behind = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en", { minimumFractionDigits: behind, maximumFractionDigits: behind });
};
const scaled = (value, units) => {
  const [size, unit] = units.find(([each]) => Math.abs(value) >= each) || units[units.length - 1];
  return `${significant(value / size, 3)} ${unit}`.trim();
};
const duration = (seconds) => scaled(seconds, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
const bytes = (size) => scaled(size, [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const quantity = (number) => scaled(number, [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"], [1, ""]]);
const whole = (number) => number.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(1)} %`;

const children = Array.from({ length: count }, () => []);
for (let i = 0; i < count; i++) if (layers.parent[i] >= 0) children[layers.parent[i]].push(i);
const isLeaf = (i) => children[i].length === 0;
const called = [...Array(count).keys()].sort((a, b) => layers.order[a] - layers.order[b]);
const timed = called.filter((i) => layers.counted[i]);  // those whose times add up to the whole model's
const PRINT_WIDTH = 680, ROW = 22, CONFIG = { displayModeBar: false, displaylogo: false, showTips: false };
const LONGEST_HOVER = 60;

// Plotly reads <b>, <a>, entities and $formulas$ in every text; all that comes from the model passes here.
const inert = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("$", "&#36;");
const tail = (text, room) => {  // the end of a path tells layers apart, and the number of its block
  const letters = [...text], parts = text.split(".");
  if (letters.length <= room) return text;
  const at = parts.slice(0, -1).findLastIndex((part) => /^\d{1,4}$/.test(part));
  const isInside = at < 0 || [...parts.slice(at).join(".")].length < room;
  const start = isInside ? "…" : `…${parts[at]}…`;
  return start + letters.slice(start.length - room).join("");
};
const lines = (text) => {
  const letters = [...text], parts = [];
  for (let at = 0; at < letters.length; at += LONGEST_HOVER) parts.push(inert(letters.slice(at, at + LONGEST_HOVER).join("")));
  return parts.join("<br>");
};
const hover = (title, facts) => [`<b>${lines(title)}</b>`, ...facts.map(inert)].join("<br>");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const isPrinting = () => document.documentElement.classList.contains("printing");
const widthOf = (plot) => isPrinting() ? PRINT_WIDTH : plot.clientWidth;

const plot = (id, traces, { height, xaxis = {}, yaxis = {}, ...layout }) => {
  const place = $(id);
  if (!place) return;
  const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, fixedrange: true, automargin: true };
  Plotly.react(place, traces, {
    width: widthOf(place), height, margin: { l: 8, r: 14, t: 8, b: 8 }, dragmode: false, hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("ink") },
    hoverlabel: { align: "left", bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink") } },
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom" },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...layout,
  }, CONFIG);
};

// Latency: rows are layers, layers down to a depth, or classes; values add up in self time, whichever they are.
const chosen = () => ({
  time: document.querySelector("[name=time]:checked").value,
  collapse: $("collapse").value,
  most: Number($("most").value),
  arrangement: $("arrangement").value,
});
const ownRows = (time) => timed.map((i) => ({
  label: layers.path[i] + (time === "self" && !isLeaf(i) ? " (self)" : ""), type: layers.type[i],
  value: layers[time + "Mean"][i], p95: layers[time + "P95"][i], highest: layers[time + "Max"][i],
  runs: layers.runs[i], calls: layers.calls[i],
}));
const gathered = (members, time, keyOf, labelOf) => {
  const rows = new Map();
  for (const i of members) {
    const key = keyOf(i), row = rows.get(key) || { label: labelOf(key), value: 0, layers: 0 };
    row.value += layers[time + "Mean"][i];
    row.layers += 1;
    rows.set(key, row);
  }
  return [...rows.values()];
};
const above = (i, depth) => {
  while (layers.depth[i] > depth && layers.parent[i] >= 0) i = layers.parent[i];
  return i;
};
const insideOfItsClass = (i) => {
  for (let at = layers.parent[i]; at >= 0; at = layers.parent[at]) if (layers.type[at] === layers.type[i]) return true;
  return false;
};
const rowsOf = ({ time, collapse }) => {
  if (collapse === "layers") return ownRows(time);
  if (collapse === "types") {
    const members = time === "self" ? timed : timed.filter((i) => !insideOfItsClass(i));
    return gathered(members, time, (i) => layers.type[i], (type) => type);
  }
  const depth = Number(collapse);
  if (time === "inclusive") return gathered(timed.filter((i) => layers.depth[i] <= depth), time, (i) => i, (i) => layers.path[i]);
  return gathered(timed, time, (i) => above(i, depth), (i) => layers.path[i] + (layers.depth[i] < depth && !isLeaf(i) ? " (self)" : ""));
};
const factsOf = (row, time) => {
  const facts = [`mean ${duration(row.value)}, ${percent(row.value / total[time])} of all layers`];
  if (row.layers) return [facts[0].replace("mean", "together"), `${whole(row.layers)} layer${row.layers > 1 ? "s" : ""}`];
  facts.push(row.p95 === null ? `max ${duration(row.highest)} (too few runs for p95)` : `p95 ${duration(row.p95)}`);
  return [row.type, ...facts, `${whole(row.runs)} runs, ${significant(row.calls, 3)} call${row.calls === 1 ? "" : "s"} in each`];
};
const drawBars = (id, rows, { time, shade, room, marks = [], xaxis = {} }) => {
  const at = rows.map((_, place) => place), narrow = widthOf($(id)) < 600;
  plot(id, [{
    type: "bar", orientation: "h", name: "mean", x: rows.map((row) => 1e3 * row.value), y: at, marker: { color: colour(shade) },
    hoverinfo: "text", hovertext: rows.map((row) => hover(row.label, factsOf(row, time))), textposition: "none",
  }, ...marks], {
    height: rows.length * ROW + room, showlegend: false, bargap: 0.25,
    xaxis: { title: { text: `${time} time (ms)`, standoff: 6 }, rangemode: "tozero", ...xaxis },
    yaxis: {
      showgrid: false, tickmode: "array", tickvals: at, range: [rows.length - 0.5, -0.5],
      ticktext: rows.map((row) => inert(tail(row.label, narrow ? 18 : 44)) + " "),
    },
  });
};
const drawLatency = () => {
  const choice = chosen(), all = rowsOf(choice);
  const longest = [...all].sort((a, b) => b.value - a.value).slice(0, choice.most);
  const kept = new Set(longest), rows = choice.arrangement === "time" ? longest : all.filter((row) => kept.has(row));
  const slowest = {
    type: "scatter", mode: "markers", name: "p95 or maximum", x: rows.map((row) => 1e3 * (row.p95 ?? row.highest)),
    y: rows.map((_, place) => place), hoverinfo: "skip",
    marker: { symbol: "line-ns-open", size: 11, color: colour("series-2"), line: { width: 2 } },
  };
  const marks = rows.every((row) => !row.layers) ? [slowest] : [];
  drawBars("plot-latency", rows, { time: choice.time, shade: "series-1", room: 70, marks, xaxis: { side: "top" } });
  const shown = longest.reduce((sum, row) => sum + row.value, 0);
  const what = choice.collapse === "types" ? "classes" : choice.collapse === "layers" ? "layers" : "blocks";
  const first = longest.slice(0, 3).map((row) => `${row.label} ${duration(row.value)} (${percent(row.value / total[choice.time])})`);
  $("summary-latency").textContent = `${whole(rows.length)} of ${whole(all.length)} ${what} by ${choice.time} time` +
    (choice.time === "self" ? `, ${percent(shown / total.self)} of the time of all layers` : "") +
    (first.length ? `. Longest: ${first.join(", ")}.` : ".");
};
const startLatency = () => {
  const option = (value, text) => Object.assign(document.createElement("option"), { value, textContent: text });
  const deepest = Math.max(...layers.depth);
  $("collapse").append(option("layers", "every layer"), option("types", "by class"));
  for (let depth = 1; depth < deepest; depth++) $("collapse").append(option(String(depth), `down to depth ${depth}`));
  $("latency-controls").hidden = false;
  $("latency-controls").addEventListener("change", drawLatency);
};

const TYPES = 15;
const drawTypes = () => {
  const all = gathered(timed, "self", (i) => layers.type[i], (type) => type).sort((a, b) => b.value - a.value);
  const rows = all.slice(0, TYPES), rest = all.slice(TYPES);
  if (rest.length) rows.push({
    label: `${rest.length} other classes`, value: rest.reduce((sum, row) => sum + row.value, 0), layers: rest.reduce((sum, row) => sum + row.layers, 0),
  });
  drawBars("plot-types", rows, { time: "self", shade: "series-4", room: 60 });
};

const drawMemory = () => {
  const drawn = called.filter((i) => isLeaf(i) && layers.before[i] !== null), at = drawn.map((_, place) => place + 1);
  const peak = (i) => layers.activationPeak[i] === null ? null : layers.before[i] + layers.activationPeak[i];
  const line = (name, value, style, facts) => ({
    type: "scatter", mode: drawn.length > 150 ? "lines" : "lines+markers", name, x: at,
    y: drawn.map((i) => value(i) === null ? null : value(i) / 1e6),
    line: { width: 1.6, ...style }, marker: { size: 4 }, hoverinfo: facts ? "text" : "skip",
    hovertext: facts && drawn.map((i) => hover(layers.path[i], facts(i))),
  });
  const facts = (i) => [
    ["before", layers.before[i]], ["peak", peak(i)], ["after", layers.after[i]],
  ].map(([name, value]) => `${name} ${value === null ? "not known" : bytes(value)}`);
  plot("plot-memory", [
    line("peak", peak, { color: colour("series-2"), shape: "hv" }, facts),
    line("after", (i) => layers.after[i], { color: colour("series-1"), dash: "dash" }, facts),
    line("before", (i) => layers.before[i], { color: colour("series-5"), dash: "dot" }, facts),
  ], {
    height: 320, showlegend: true, hovermode: "closest",
    xaxis: { title: { text: "call", standoff: 6 } }, yaxis: { title: { text: "memory (MB)", standoff: 6 } },
  });
};

const logarithmic = (title, values) => {
  const decades = Math.log10(Math.max(...values) / Math.min(...values));
  return { type: "log", exponentformat: "power", dtick: decades > 3 ? 1 : "D2", title: { text: title, standoff: 6 } };
};
const drawParameters = () => {
  const odd = new Set(outliers.outliers), named = outliers.outliers.slice(0, widthOf($("plot-parameters")) < 600 ? 3 : 8);
  const group = (members, name, marker) => ({
    type: "scatter", mode: "markers", name, x: members.map((i) => layers.parameters[i]), y: members.map((i) => 1e3 * layers.selfMean[i]), marker,
    hoverinfo: "text", hovertext: members.map((i) => hover(layers.path[i], [
      layers.type[i], `${quantity(layers.parameters[i])} parameters`, `mean ${duration(layers.selfMean[i])}`,
    ])),
  });
  plot("plot-parameters", [
    group(outliers.drawn.filter((i) => !odd.has(i)), "layers", { color: colour("series-1"), size: 7, opacity: 0.65 }),
    group(outliers.outliers, "outliers", { color: colour("series-2"), size: 10, symbol: "diamond" }),
  ], {
    height: 400, showlegend: true,
    xaxis: logarithmic("parameters", outliers.drawn.map((i) => layers.parameters[i])),
    yaxis: logarithmic("self time (ms)", outliers.drawn.map((i) => layers.selfMean[i])),
    annotations: named.map((i, place) => ({
      x: Math.log10(layers.parameters[i]), y: Math.log10(1e3 * layers.selfMean[i]), text: inert(tail(layers.path[i], 26)),
      showarrow: true, arrowhead: 0, arrowwidth: 1, arrowcolor: colour("muted"), ax: -30, ay: place % 2 ? 24 : -24, xanchor: "right", font: { size: 11 },
    })),
  });
};

const MARKS = {
  compute: ["series-2", "square"], memory: ["series-1", "circle"], launch: ["series-3", "triangle-up"],
  under_utilised: ["series-4", "diamond"], mixed: ["series-5", "cross"],
};
const drawRoofline = () => {
  const drawn = called.filter((i) => layers.flops[i] > 0 && layers.bytes[i] > 0 && layers.selfMean[i] > 0);
  const x = (i) => layers.flops[i] / layers.bytes[i], y = (i) => layers.flops[i] / layers.selfMean[i];
  const ends = [Math.min(...drawn.map(x)) / 2, Math.max(...drawn.map(x)) * 2];
  const traces = [...new Set(drawn.map((i) => layers.bound[i]))].map((bound) => {
    const members = drawn.filter((i) => layers.bound[i] === bound), [name, symbol] = MARKS[bound] || ["series-5", "x"];
    return {
      type: "scatter", mode: "markers", name: inert(bound === null ? "limit not known" : bound.replaceAll("_", " ")), x: members.map(x), y: members.map(y),
      marker: { color: colour(name), symbol, size: 8, opacity: 0.75 }, hoverinfo: "text",
      hovertext: members.map((i) => hover(layers.path[i], [
        layers.type[i], `${quantity(y(i))}FLOP/s at ${significant(x(i), 3)} FLOP/byte`, `mean ${duration(layers.selfMean[i])}`,
        layers.shareOfLimit[i] === null ? "share of its limit not known" : `${percent(layers.shareOfLimit[i])} of its limit`,
      ])),
    };
  });
  const roof = (name, dash, rate, from) => {
    const corner = roofs.flops / rate;
    return {
      type: "scatter", mode: "lines", name: inert(name), x: [from, corner, Math.max(ends[1], 2 * corner)],
      y: [from * rate, roofs.flops, roofs.flops], hoverinfo: "skip", line: { color: colour("ink"), width: 1.3, dash },
    };
  };
  if (roofs) {
    const from = Math.min(ends[0], ...roofs.bytes.map(([, rate]) => roofs.flops / rate / 4));  // so that slopes are seen
    roofs.bytes.forEach(([name, rate], at) => traces.push(roof(name, ["solid", "dot"][at], rate, from)));
  }
  plot("plot-roofline", traces, {
    height: 420, showlegend: true,
    xaxis: logarithmic("FLOP/byte", ends), yaxis: logarithmic("FLOP/s", drawn.map(y)),
  });
};
const PAGE = 50;
const milliseconds = (seconds) => significant(1e3 * seconds, 3);
const megabytes = (size) => significant(size / 1e6, 3);
const COLUMNS = [  // `screen`: not on paper; `trusted`: not where the profile is not representative
  { title: "Layer", key: "path", left: true },
  { title: "Self mean (ms)", key: "selfMean", show: milliseconds },
  { title: "Self (%)", key: "share", show: (value) => (100 * value).toFixed(1) },
  { title: "Inclusive mean (ms)", key: "inclusiveMean", show: milliseconds },
  { title: "Class", key: "type", left: true, wrap: true },
  { title: "Parameters", key: "parameters", show: whole },
  { title: "Bound", key: "bound", left: true, show: (value) => value.replaceAll("_", " ") },
  { title: "Of limit (%)", key: "shareOfLimit", show: (value) => (100 * value).toFixed(0) },
  { title: "Gain (ms)", key: "gain", show: milliseconds, trusted: true },
  { title: "Call", key: "order", show: (value) => whole(value + 1), screen: true },
  { title: "Calls", key: "calls", show: (value) => significant(value, 3), screen: true },
  { title: "Self p95 (ms)", key: "selfP95", show: milliseconds, screen: true },
  { title: "Self max (ms)", key: "selfMax", show: milliseconds, screen: true },
  { title: "Inclusive p95 (ms)", key: "inclusiveP95", show: milliseconds, screen: true },
  { title: "n", key: "runs", show: whole, screen: true },
  { title: "FLOP", key: "flops", show: quantity, screen: true },
  { title: "FLOP/byte", key: "intensity", show: (value) => significant(value, 3), screen: true },
  { title: "Output (MB)", key: "outputBytes", show: megabytes, screen: true },
  { title: "Before (MB)", key: "before", show: megabytes, screen: true },
  { title: "Peak (MB)", key: "activationPeak", show: megabytes, screen: true },
  { title: "After (MB)", key: "after", show: megabytes, screen: true },
  { title: "Inputs", key: "inputs", left: true, wrap: true, screen: true },
  { title: "Outputs", key: "outputs", left: true, wrap: true, screen: true },
  { title: "Doubts", key: "doubts", left: true, wrap: true, screen: true },
];

const element = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};
const named = (text) => {
  const made = element("span", undefined, "name");
  made.append(...text.split(/(?<=\.)/).flatMap((part, at) => at ? [element("wbr"), part] : [part]));  // a path breaks at its dots
  return made;
};
const classes = ({ left, wrap, screen }) => [left && "left", wrap && "wrap", screen && "screen"].filter(Boolean).join(" ");

const startTable = () => {
  layers.share = layers.selfMean.map((value) => value === null ? null : value / total.self);
  layers.intensity = layers.flops.map((value, i) => value === null || !layers.bytes[i] ? null : value / layers.bytes[i]);
  const trusted = !document.documentElement.classList.contains("untrusted");
  const columns = COLUMNS.filter(({ key, trusted: needed }) => (trusted || !needed) && layers[key].some((value) => value !== null));
  const words = called.map((i) => [layers.path[i], layers.name[i], layers.type[i], layers.bound[i]].join("\n").toLowerCase());
  const text = new Map(called.map((i, at) => [i, words[at]]));
  const natural = new Intl.Collator("en", { numeric: true });
  let sorting = { key: "order", falling: false }, matching = called, from = 0;

  const mark = (head, key) => {
    head.setAttribute("aria-sort", key !== sorting.key ? "none" : sorting.falling ? "descending" : "ascending");
  };
  const compare = (a, b) => {
    const [left, right] = [layers[sorting.key][a], layers[sorting.key][b]];
    if (left === null || right === null) return (left === null) - (right === null) || layers.order[a] - layers.order[b];
    const difference = typeof left === "string" ? natural.compare(left, right) : left - right;
    return (sorting.falling ? -difference : difference) || layers.order[a] - layers.order[b];
  };
  const cell = (column, i) => {
    const value = layers[column.key][i];
    if (column.key === "path") {
      const head = element("th", undefined, "left wrap");
      head.scope = "row";
      head.append(named(value));
      if (layers.name[i]) head.append(element("span", " module ", "note"), named(layers.name[i]));
      return head;
    }
    const made = element("td", undefined, classes(column));
    made.append(value === null ? "–" : column.left ? named(column.show ? column.show(value) : value) : column.show(value));
    return made;
  };
  const draw = () => {
    const rows = matching.slice(from, from + PAGE).map((i) => {
      const row = element("tr");
      row.append(...columns.map((column) => cell(column, i)));
      return row;
    });
    $("table").tBodies[0].replaceChildren(...rows);
    const place = rows.length ? `, rows ${whole(from + 1)} to ${whole(from + rows.length)}` : "";
    $("found").textContent = `${whole(matching.length)} of ${whole(count)} layers${place}`;
    $("previous").disabled = from === 0;
    $("next").disabled = from + PAGE >= matching.length;
  };
  const search = () => {
    const wanted = $("query").value.toLowerCase().split(/\s+/).filter(Boolean);
    matching = called.filter((i) => wanted.every((word) => text.get(i).includes(word))).sort(compare);
    from = 0;
    draw();
  };
  const heads = columns.map((column) => {
    const { title, key } = column, head = element("th", undefined, classes({ ...column, wrap: false })), button = element("button", title);
    head.scope = "col";
    button.type = "button";
    button.addEventListener("click", () => {
      const first = key === "order" || typeof layers[key].find((value) => value !== null) === "string";
      sorting = { key, falling: sorting.key === key ? !sorting.falling : !first };
      for (const [at, each] of heads.entries()) mark(each, columns[at].key);
      search();
    });
    head.append(button);
    mark(head, key);
    return head;
  });
  const turn = (pages) => () => {
    from += pages * PAGE;
    draw();
  };
  $("table").tHead.rows[0].append(...heads);
  $("query").addEventListener("input", search);
  $("previous").addEventListener("click", turn(-1));
  $("next").addEventListener("click", turn(1));
  $("table-area").hidden = false;
  search();  // a browser that goes back restores what was typed
};
const charts = [["latency", drawLatency], ["types", drawTypes], ["memory", drawMemory], ["parameters", drawParameters], ["roofline", drawRoofline]];
const drawn = charts.filter(([key]) => $(`plot-${key}`));
const redraw = () => drawn.forEach(([, draw]) => draw());
if (count) {
  if ($("plot-latency")) startLatency();
  startTable();
  redraw();
  const main = document.querySelector("main"), printing = (on) => () => {
    document.documentElement.classList.toggle("printing", on);
    redraw();
  };
  let width = main.clientWidth;
  new ResizeObserver(() => {
    if (main.clientWidth === width) return;
    width = main.clientWidth;
    redraw();
  }).observe(main);
  addEventListener("beforeprint", printing(true));
  addEventListener("afterprint", printing(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
