"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const select = document.getElementById("network");
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
  const asked = new URLSearchParams(location.search).get("network"); // the choice is kept in the address
  let network = data.networks.indexOf(data.networks.includes(asked) ? asked : data.network);
  if (select) select.value = data.networks[network];

  // Plotly reads its texts as markup; ours are texts.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const labelOf = (labels, i) => data.strings[labels.length > 1 ? labels[i] : labels[0]];

  /** A list on the chosen network: unchanged, one of several, or scaled by a factor per network. */
  function on(values) {
    if (!values || !Array.isArray(values.by)) return values;
    if (!values.times) return values.by[network];
    const factor = values.by[network];
    return values.times.map((value) => (value === null ? null : value * factor));
  }

  // --- figures ---------------------------------------------------------------------------------------------------------------

  const FONT = { family: getComputedStyle(document.body).fontFamily, size: 12, color: "#1b1f24" };
  const REACH = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const touched = matchMedia("(pointer: coarse)").matches;
  const hidden = new Map(); // figure -> names of series that its legend has switched off

  const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"], [1e-9, "n"]];

  /** A number for a person to read, in its unit: 12.3 ms, 4.56 MB, 91.3 %. */
  function write(value, unit = "", digits = 4) {
    if (typeof value !== "number") return String(value);
    if (unit === "%") return `${Number((100 * value).toPrecision(digits))} %`;
    const size = Math.abs(value);
    if (!unit || !size) return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(3) : `${Number(value.toPrecision(digits + 1))}${unit && ` ${unit}`}`;
    const [scale, prefix] = PREFIXES.find(([least]) => size >= least * 0.99995) || PREFIXES.at(-1);
    return `${Number((value / scale).toPrecision(digits))} ${unit === "B" && scale < 1 ? "" : prefix}${unit}`;
  }

  const SIDES = ["middle right", "top right", "middle left", "bottom right"]; // of a point, clear of its bar: neighbours take turns

  function trace(series, panel, shown) {
    const [x, y, labels, widths] = [on(series.x), on(series.y), on(series.labels), on(series.widths)];
    const text = x.map((value, i) => {
      const parts = labels ? [plain(labelOf(labels, i))] : [plain(series.name)];
      const spread = series.errors && series.errors[i] ? ` ± ${write(series.errors[i], panel.y.unit, 2)}` : "";
      if (widths) parts.push(`${write(value, "s")} to ${write(value + widths[i], "s")}, ${write(widths[i], "s")} long`);
      else if (!Object.keys(panel.y.ticks).length) parts.push(`${plain(panel.x.text)}: ${plain(write(value, panel.x.unit))}`, `${plain(panel.y.text)}: ${plain(write(y[i], panel.y.unit))}${spread}`);
      return parts.join("<br>");
    });
    const common = { name: plain(series.name), x, y, hovertext: text, hoverinfo: "text", visible: shown, showlegend: false };
    const line = { color: series.colour, dash: series.dash, width: series.faint ? 1 : 2 };
    const pattern = { shape: series.pattern, fgcolor: "#fff", bgcolor: series.colour, fillmode: "replace", size: 6, solidity: 0.2 };
    if (series.kind === "bars") return { ...common, type: "bar", marker: { color: series.colour, pattern } };
    if (series.kind === "spans") {
      const marker = { color: series.colour, pattern, line: { color: "#fff", width: 0.5 } };
      return { ...common, type: "bar", orientation: "h", base: x, x: widths, y, marker, width: 0.7 };
    }
    const marker = { color: series.colour, symbol: series.symbol, size: series.faint ? 6 : series.symbol === "star" ? 13 : 9 };
    marker.line = { color: "#fff", width: series.faint ? 0 : 0.8 };
    common.cliponaxis = false;
    if (series.errors) common.error_y = { type: "data", array: series.errors, color: series.colour, thickness: 1, width: 0 };
    let mode = { points: "markers", marked: "lines+markers" }[series.kind] || "lines";
    if (series.texts) {
      mode += "+text";
      common.text = series.texts.map((text) => ` ${plain(text)} `);
      common.textfont = { size: 11, color: series.colour };
      common.textposition = series.texts.map((text) => SIDES[Number(text) % SIDES.length]);
    }
    if (series.kind === "steps") line.shape = "hv";
    return { ...common, type: "scatter", mode, marker, line, opacity: series.faint ? 0.45 : 1, connectgaps: false };
  }

  /** Digits after the point that tell five ticks over these shares apart: "96.2 %, 96.4 %", not "96 %, 96 %". */
  function percentDigits(values) {
    const known = values.filter((value) => typeof value === "number");
    const step = (100 * (Math.max(...known) - Math.min(...known))) / 5;
    return step > 0 && Number.isFinite(step) ? Math.min(Math.max(Math.ceil(-Math.log10(step)), 0), 3) : 0;
  }

  function axis(of, values) {
    const common = { title: { text: plain(of.text), standoff: 8 }, automargin: true, gridcolor: "#e8eaee", zeroline: false, linecolor: "#9aa1ab" };
    const ticks = on(of.ticks);
    const texts = Object.keys(ticks).map((text) => plain(text).replaceAll("\n", "<br>"));
    if (texts.length) return { ...common, tickvals: Object.values(ticks), ticktext: texts };
    if (of.order.length) return { ...common, type: "category", categoryorder: "array", categoryarray: of.order };
    if (values.some((value) => typeof value === "string")) return { ...common, type: "category" };
    if (of.high !== null) common.range = [0, on(of.high)];
    if (of.unit === "%") common.tickformat = `.${percentDigits(values)}%`;
    else if (of.unit) Object.assign(common, { tickformat: "~s", ticksuffix: of.unit });
    if (!of.log) return { ...common, nticks: 6 };
    const known = values.filter((value) => value > 0);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    if (!(high > 2 * low)) return { ...common, nticks: 6 };
    const decades = Math.log10(high / low);
    const steps = decades < 0.9 ? [1, 1.5, 2, 3, 5, 7] : decades < 2.2 ? [1, 2, 5] : [1];
    const positions = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)); power += 1)
      for (const step of steps) positions.push(Number(`${step}e${power}`));
    return { ...common, type: "log", tickvals: positions, ticktext: positions.map((value) => write(value, of.unit)) };
  }

  function draw(figure) {
    const spec = data.figures[figure.id];
    all(".plot", figure).forEach((element, i) => {
      const panel = spec.panels[i];
      const traces = panel.series.map((series) => trace(series, panel, !hidden.get(figure.id).has(series.name)));
      const spread = (name) => panel.series.flatMap((series) => on(series[name]));
      const layout = {
        font: FONT, height: panel.height, margin: { l: 56, r: 12, t: 8, b: 44 }, paper_bgcolor: "#fff", plot_bgcolor: "#fff",
        xaxis: axis(panel.x, spread("x")), yaxis: axis(panel.y, spread("y")), hovermode: "closest", barmode: "group",
        dragmode: touched ? false : "zoom", hoverlabel: { bgcolor: "#fff", bordercolor: "#9aa1ab", font: { ...FONT, size: 12 }, align: "left" },
      };
      if (panel.level !== null) {
        const line = { color: "#1b1f24", width: 1, dash: "dash" };
        layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: panel.level, y1: panel.level, line, layer: "below" }];
      }
      if (panel.series.some((series) => series.kind === "spans")) {
        Object.assign(layout, { barmode: "overlay" });
        Object.assign(layout.yaxis, { autorange: "reversed", type: "category" });
      }
      Plotly.react(element, traces, layout, REACH);
    });
    all("details.data[open]", figure).forEach(() => showData(figure));
  }

  const SHAPES = {
    circle: "M0-4.2A4.2 4.2 0 1 1 0 4.2 4.2 4.2 0 1 1 0-4.2Z", square: "M-4-4H4V4H-4Z", diamond: "M0-5.4L5.4 0 0 5.4-5.4 0Z",
    "triangle-up": "M0-5L5 4H-5Z", "triangle-down": "M0 5L5-4H-5Z", cross: "M-1.8-5H1.8V-1.8H5V1.8H1.8V5H-1.8V1.8H-5V-1.8H-1.8Z",
    x: "M-5-2.6L-2.6-5 0-2.4 2.6-5 5-2.6 2.4 0 5 2.6 2.6 5 0 2.4-2.6 5-5 2.6-2.4 0Z",
    star: "M0-6.2L1.5-2 5.9-1.9 2.4.8 3.6 5 0 2.5-3.6 5-2.4.8-5.9-1.9-1.5-2Z",
  };
  const BOX = "M-6-5H6V5H-6Z";
  const HATCHES = {
    "/": "M-6 3L2-5M-2 5L6-3", "\\": "M-2-5L6 3M-6-3L2 5", x: "M-5-5L5 5M-5 5L5-5", "-": "M-6-1.8H6M-6 1.8H6", "+": "M-6 0H6M0-5V5",
    ".": "M-3-2H-1.6M2-2H3.4M-.7 2H.7",
  };
  const DASH = { dash: "5 3", dot: "1.5 2.5", dashdot: "5 2 1.5 2", longdash: "8 3", longdashdot: "8 2 1.5 2" };

  function swatch(series) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const line = ["line", "marked", "steps"].includes(series.kind);
    for (const [name, value] of Object.entries({ width: line ? 26 : 14, height: 14, viewBox: line ? "-13 -7 26 14" : "-7 -7 14 14", "aria-hidden": "true" })) svg.setAttribute(name, value);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    if (line) {
      path.setAttribute("d", "M-13 0H13");
      path.setAttribute("stroke", series.colour);
      path.setAttribute("stroke-width", series.faint ? 1 : 2.4);
      path.setAttribute("stroke-dasharray", DASH[series.dash] || "none");
      if (series.kind === "marked") {
        const mark = path.cloneNode();
        mark.setAttribute("d", SHAPES[series.symbol]);
        mark.setAttribute("fill", series.colour);
        mark.removeAttribute("stroke");
        svg.append(mark);
      }
    } else {
      path.setAttribute("d", series.kind === "points" ? SHAPES[series.symbol] : BOX);
      path.setAttribute("fill", series.colour);
      if (series.pattern) {
        const hatch = path.cloneNode();
        hatch.setAttribute("d", HATCHES[series.pattern]);
        hatch.setAttribute("stroke", "#fff");
        hatch.setAttribute("stroke-width", 1.4);
        svg.append(hatch);
        svg.prepend(path);
        return svg;
      }
    }
    svg.append(path);
    return svg;
  }

  function legend(figure) {
    const list = figure.querySelector(".legend");
    const named = new Map(data.figures[figure.id].panels.flatMap((panel) => panel.series).map((series) => [series.name, series]));
    if (!list || named.size < 2) return;
    for (const [name, series] of named) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(swatch(series), name);
      button.addEventListener("click", () => {
        const off = hidden.get(figure.id);
        if (!off.delete(name)) off.add(name);
        button.setAttribute("aria-pressed", String(!off.has(name)));
        draw(figure);
      });
      list.append(button);
    }
  }

  // --- a figure's data -------------------------------------------------------------------------------------------------------

  /** The rows of a figure, as `Figure.table(network)` gives them in Python. */
  function rowsOf(figure) {
    const rows = [];
    for (const panel of data.figures[figure.id].panels)
      for (const series of panel.series) {
        const [x, y, labels, widths] = [on(series.x), on(series.y), on(series.labels), on(series.widths)];
        x.forEach((value, i) => {
          if (value === null || y[i] === null) return;
          const row = { panel: panel.title, series: series.name };
          if (labels) row.label = labelOf(labels, i);
          if (depends(series)) row.network = data.networks[network];
          row[panel.x.name] = value;
          row[panel.y.name] = y[i];
          if (widths) row.duration_s = widths[i];
          if (series.errors) row[`${panel.y.name}_sd`] = series.errors[i];
          rows.push(row);
        });
      }
    return rows;
  }

  const depends = (series) => [series.x, series.y, series.widths].some((part) => part && part.by);
  const changes = (figure) => data.figures[figure.id].panels.some((panel) => panel.series.some(depends));
  const columnsOf = (rows) => [...new Set(rows.flatMap((row) => Object.keys(row)))];

  function csv(figure) {
    const rows = rowsOf(figure);
    const columns = columnsOf(rows);
    const quoted = (value) => {
      const text = value === undefined || value === null ? "" : String(value);
      return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    return [columns, ...rows.map((row) => columns.map((name) => row[name]))].map((line) => line.map(quoted).join(",")).join("\n") + "\n";
  }

  const MOST = 200;

  function showData(figure) {
    const rows = rowsOf(figure);
    const columns = columnsOf(rows);
    const table = document.createElement("table");
    const caption = table.createCaption();
    caption.textContent = rows.length > MOST ? `The first ${MOST} of ${rows.length} rows; the file has all.` : `${rows.length} rows`;
    const head = table.createTHead().insertRow();
    for (const name of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = name;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of rows.slice(0, MOST)) {
      const line = body.insertRow();
      for (const name of columns) line.insertCell().textContent = row[name] === undefined || row[name] === null ? "" : write(row[name]);
    }
    figure.querySelector(".data .scroll").replaceChildren(table);
  }

  function save(name, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // --- tables ----------------------------------------------------------------------------------------------------------------

  function sortValue(cell) {
    if (cell.dataset.values !== undefined) return data.values[cell.dataset.values][network];
    if (cell.dataset.value === undefined || cell.dataset.value === "None") return null;
    const value = Number(cell.dataset.value);
    return Number.isNaN(value) ? cell.dataset.value : value;
  }

  /** Order the rows by the column that says so, if any; what is missing comes last either way. */
  function sort(table) {
    const heads = all("thead th", table);
    const column = heads.findIndex((head) => head.hasAttribute("aria-sort"));
    if (column < 0) return;
    const sign = heads[column].getAttribute("aria-sort") === "ascending" ? 1 : -1;
    const keyed = [...table.tBodies[0].rows].map((row) => {
      const value = sortValue(row.cells[column]);
      return [value === null && !heads[column].classList.contains("number") ? row.cells[column].textContent : value, row];
    });
    const missing = (value) => value === null || value === "";
    keyed.sort(([a], [b]) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b);
      const both = typeof a === "number" && typeof b === "number";
      return sign * (both ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
    });
    table.tBodies[0].append(...keyed.map(([, row]) => row));
  }

  function filter(input) {
    const table = document.getElementById(input.dataset.filter);
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    document.querySelector(`[data-count="${CSS.escape(table.id)}"]`).textContent = `${shown} of ${table.tBodies[0].rows.length}`;
  }

  // --- the page --------------------------------------------------------------------------------------------------------------

  function choose() {
    network = select ? data.networks.indexOf(select.value) : 0;
    for (const span of all("[data-text]")) span.innerHTML = data.texts[span.dataset.text][network]; // escaped where it was written
    for (const row of all("tr[data-network]")) row.classList.toggle("current", row.dataset.network === data.networks[network]);
    for (const table of all("table[data-live]")) sort(table);
    for (const input of all("input[data-filter]")) filter(input);
    for (const figure of all("figure[id]")) if (!figure.dataset.drawn || changes(figure)) drawSoon(figure);
  }

  /** Keep the chosen network in the address, so that a link to the page, or loading it again, shows the same. */
  function keep(name) {
    const address = new URL(location.href);
    address.searchParams.set("network", name);
    history.replaceState(null, "", address);
  }

  const say = (sentence) => (document.getElementById("said").textContent = sentence);

  // Figures far down the page are drawn when they come near, when the browser is idle, or before printing.
  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && entry.target.dataset.stale) drawNow(entry.target);
  }, { rootMargin: "800px" });

  function drawNow(figure) {
    delete figure.dataset.stale;
    figure.dataset.drawn = "yes";
    draw(figure);
  }

  function drawSoon(figure) {
    figure.dataset.stale = "yes";
    near.unobserve(figure);
    near.observe(figure);
    drawWhenIdle();
  }

  let waiting = false;

  function drawWhenIdle() {
    if (waiting) return;
    waiting = true;
    (globalThis.requestIdleCallback || setTimeout)(() => {
      waiting = false;
      const figure = all("figure[data-stale]")[0];
      if (!figure) return;
      drawNow(figure);
      drawWhenIdle();
    });
  }

  for (const figure of all("figure[id]")) {
    hidden.set(figure.id, new Set());
    figure.querySelector(".panels").style.setProperty("--columns", figure.dataset.columns);
    legend(figure);
    figure.querySelector("details.data").addEventListener("toggle", (event) => event.target.open && showData(figure));
    figure.querySelector("[data-csv]").addEventListener("click", () => save(`${figure.id}.csv`, csv(figure)));
  }
  for (const table of all("table[data-live]"))
    all("thead button", table).forEach((button) =>
      button.addEventListener("click", () => {
        const head = button.parentElement;
        const next = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
        all("th[aria-sort]", table).forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", next);
        sort(table);
      }),
    );
  for (const input of all("input[data-filter]")) input.addEventListener("input", () => filter(input));
  if (select)
    select.addEventListener("change", () => {
      choose();
      keep(select.value);
      say(`Times are now for ${select.value}.`);
    });
  if (matchMedia("(max-width: 60rem)").matches) document.querySelector("nav details").open = false;

  function drawAll() {
    for (const figure of all("figure[id]")) if (figure.dataset.stale) drawNow(figure);
    for (const plot of all(".plot")) Plotly.Plots.resize(plot);
  }
  addEventListener("beforeprint", () => {
    document.body.classList.add("on-paper"); // figures take the width of the paper before it is laid out
    drawAll();
    for (const plot of all(".plot")) Plotly.relayout(plot, { width: plot.clientWidth }); // at once, unlike resize
  });
  addEventListener("afterprint", () => {
    document.body.classList.remove("on-paper");
    for (const plot of all(".plot")) Plotly.relayout(plot, { width: null, autosize: true });
  });

  globalThis.raysimReport = { drawAll, csv: (key) => csv(document.getElementById(key)) };
  choose();
})();
