"use strict";
const COLORS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"];
const DASHES = [[], [6, 4], [2, 3]];
const HEIGHT = 240;
const all = [];

const themed = (name) => () =>
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const write = (value) => (value == null ? "-" : String(Number(value.toPrecision(5))));

// Where a curve has no value, its nearest one is shown.
function nearest(u, series, index) {
  const values = u.data[series];
  for (let away = 0; away < values.length; away++) {
    for (const at of [index - away, index + away]) {
      if (values[at] != null) return at;
    }
  }
  return index;
}

// Without a pointer on the picture, the legend shows the last values.
function show(u, value, series, index) {
  const last = u.data[0].length - 1;
  return write(index == null ? u.data[series][nearest(u, series, last)] : value);
}

function draw(box, x, label, { names, curves }) {
  const axis = { stroke: themed("--text"), grid: { stroke: themed("--line"), width: 1 } };
  const series = names.map((name, index) => ({
    label: name,
    stroke: COLORS[index % COLORS.length],
    dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length],
    width: 2,
    spanGaps: true,
    points: { show: x.length <= 60, size: 5 },
    value: show,
  }));
  const u = new uPlot(
    {
      width: box.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false } },
      axes: [
        { ...axis, label, labelSize: 18, size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500,
          1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8, 1e9] },
        { ...axis, size: 64, values: (u, ticks) => ticks.map(write) },
      ],
      series: [{ label, value: show }, ...series],
      cursor: { dataIdx: nearest, drag: { x: true, y: false }, sync: { key: "page" } },
    },
    [x, ...curves],
    box,
  );
  new ResizeObserver(() => u.setSize({ width: box.clientWidth, height: HEIGHT })).observe(box);
  all.push(u);
}

function sort(head, column) {
  const body = head.closest("table").tBodies[0];
  const read = (row) => {
    const cell = row.cells[column];
    return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  };
  const sign = head.ariaSort === "ascending" ? -1 : 1;
  const compare = (a, b) =>
    typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
  const rows = [...body.rows].sort((a, b) => sign * compare(read(a), read(b)));
  for (const other of head.parentNode.cells) other.ariaSort = null;
  head.ariaSort = sign === 1 ? "ascending" : "descending";
  body.append(...rows);
}

for (const charts of document.querySelectorAll(".charts")) {
  const { x, label, charts: found } = JSON.parse(charts.querySelector("script").textContent);
  charts.querySelectorAll("figure > div").forEach((box, i) => draw(box, x, label, found[i]));
}
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, column));
    head.append(button);
  });
}
for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => all.forEach((u) => u.redraw(false, true)));
}
