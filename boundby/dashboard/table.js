const PAGE = 50;
const milliseconds = (seconds) => significant(1e3 * seconds, 3);
const megabytes = (size) => significant(size / 1e6, 3);
const COLUMNS = [  // `screen`: not on paper; `trusted`: not where the profile is not representative
  { title: "Layer", key: "path", left: true },
  { title: "Self p50 (ms)", key: "selfP50", show: milliseconds },
  { title: "Self (%)", key: "share", show: (value) => (100 * value).toFixed(1) },
  { title: "Inclusive p50 (ms)", key: "inclusiveP50", show: milliseconds },
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
  layers.share = layers.selfP50.map((value) => value === null ? null : value / total.self);
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
