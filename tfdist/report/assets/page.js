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

// Without a pointer on the picture, the legend shows the last values. A curve that ended earlier
// says where its value is.
function show(u, value, series, index) {
  const wanted = index == null ? u.data[0].length - 1 : (u.cursor.idx ?? index);
  const at = nearest(u, series, wanted);
  const text = write(u.data[series][at]);
  return series === 0 || at === wanted ? text : `${text} (${u.series[0].label} ${u.data[0][at]})`;
}

// Both axes begin at zero, unless the picture is zoomed or has negative values.
const fromZero = (first) => (u, min, max) => [min === first ? Math.min(0, min) : min, max];
function upToZero(u, min, max) {
  if (min == null) return [0, 1];
  const low = Math.min(0, min);
  return [low, max + 0.06 * (max - low) || 1];
}

// A dotted line ends an epoch, with its number above.
function mark(marks) {
  return (u) => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = themed("--soft")();
    ctx.setLineDash([2, 4]);
    ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    let free = -Infinity;
    for (const [text, place] of marks) {
      const x = Math.round(u.valToPos(place, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (x - ctx.measureText(text).width < free) continue;
      ctx.fillText(text, x - 3 * devicePixelRatio, bbox.top + 10 * devicePixelRatio);
      free = x;
    }
    ctx.restore();
  };
}

function draw(box, x, label, marks, { names, curves }) {
  const axis = { stroke: themed("--text"), grid: { stroke: themed("--line"), width: 1 } };
  const series = names.map((name, index) => ({
    label: name,
    stroke: COLORS[index % COLORS.length],
    dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length],
    width: 2,
    spanGaps: true,
    points: { show: curves[index].filter((value) => value != null).length <= 60, size: 5 },
    value: show,
  }));
  const u = new uPlot(
    {
      width: box.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false, range: fromZero(x[0]) }, y: { range: upToZero } },
      hooks: { drawClear: [mark(marks)] },
      axes: [
        { ...axis, label: marks.length ? `${label}; dotted: ends of epochs` : label, labelSize: 18, size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500,
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
  const { x, label, marks, charts: found } = JSON.parse(charts.querySelector("script").textContent);
  charts.querySelectorAll("figure > div").forEach((box, i) => draw(box, x, label, marks, found[i]));
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
