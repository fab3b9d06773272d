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
