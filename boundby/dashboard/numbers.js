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
