"use strict";
(() => {
  const { data, all, asked, keep, say } = globalThis.raysimReport;
  const [input, select, wrong] = ["typed", "network", "wrong"].map((id) => document.getElementById(id));
  const tables = all("table[data-typed]");
  if (!input) return;

  const UNITS = { kbps: 1e3, mbps: 1e6, gbps: 1e9, us: 1e-6, ms: 1e-3, s: 1 };
  const NETWORK = /^(\d+(?:\.\d+)?)(kbps|mbps|gbps)(?:\+(\d+(?:\.\d+)?)(us|ms|s))?$/;
  const { bandwidths_bps: BANDWIDTHS, latencies_s: LATENCIES, worth: WORTH } = data.grid;

  /** The position of a value between increasing nodes: the node below it, and the share of the way to the next. */
  function between(nodes, value) {
    const i = Math.min(Math.max(nodes.findLastIndex((node) => node <= value), 0), nodes.length - 2);
    return [i, (value - nodes[i]) / (nodes[i + 1] - nodes[i])];
  }

  /** Weights of the four nodes around a network, linear in latency and in seconds a bit. */
  function weights(bps, latency) {
    const [row] = between(BANDWIDTHS, bps);
    const [low, high] = [1 / BANDWIDTHS[row], 1 / BANDWIDTHS[row + 1]];
    const down = (low - 1 / bps) / (low - high);
    const [column, across] = between(LATENCIES, latency);
    return [[0, 0], [0, 1], [1, 0], [1, 1]].map(([r, c]) => [
      (row + r) * LATENCIES.length + column + c,
      (r ? down : 1 - down) * (c ? across : 1 - across),
    ]);
  }

  const at = (around, values) => around.reduce((sum, [i, weight]) => sum + weight * values[i], 0);

  /** The step and the speed-up of a setting, each with the ends of its interval. */
  function price(nodes, around) {
    const step = nodes.step.map((values) => at(around, values));
    const dense = nodes.dense.length ? at(around, nodes.dense) : NaN;
    const ratio = dense / step[0];
    return { step, dense, speedup: [ratio, ...nodes.shares.map((values) => (values.length ? ratio * at(around, values) : NaN))] };
  }

  const SIZES = [[1e-3, "µs", 1e-6], [1, "ms", 1e-3], [100, "s", 1], [3600, "min", 60], [Infinity, "h", 3600]];

  /** A duration with three digits, as the rest of the page has it. */
  function seconds(value) {
    const [, unit, size] = SIZES.find(([limit]) => value < limit * 0.9995);
    return [String(Number((value / size).toPrecision(3))), unit];
  }

  function write(part, [value, low, high]) {
    if (part === "speedup") {
      const alike = low > 1 || high < 1 ? "" : ", not distinguishable";
      return `${value.toFixed(2)}x (${low.toFixed(2)} to ${high.toFixed(2)})${alike}`;
    }
    const [number, unit] = seconds(value);
    const ends = [low, high].map((end) => seconds(end)).map(([text, its]) => (its === unit ? text : `${text} ${its}`));
    return `${number} ${unit} (${ends.join(" to ")})`;
  }

  /** The sentence of a table: the fastest setting shown to be safe, or dense if that is not worth it. */
  function lead(name, rows) {
    const dense = rows.find((row) => row.baseline);
    if (!dense) return `On ${name} ${data.over}, nothing is recommended: there is no dense run to compare with.`;
    const safe = rows.filter((row) => row.safe && row.speedup[1] > 1 && row.speedup[0] >= WORTH);
    if (!safe.length) return `On ${name} ${data.over}, stay dense: ${seconds(dense.step[0]).join(" ")} a step. No setting shown to be safe is at least ${Math.round(100 * (WORTH - 1))} % faster.`;
    const best = safe.reduce((leader, row) => (row.speedup[0] > leader.speedup[0] ? row : leader));
    const [value, low, high] = best.speedup.map((ratio) => ratio.toFixed(2));
    return `On ${name} ${data.over}, use ${best.name}: ${value} times as fast as dense (${low} to ${high}; dense takes ${seconds(best.dense).join(" ")}).`;
  }

  function fill(name, bps, latency) {
    const around = weights(bps, latency);
    for (const table of tables) {
      const rows = [...table.tBodies[0].rows].map((row) => {
        let priced = {};
        for (const span of all("[data-nodes]", row)) {
          priced = price(data.nodes[span.dataset.nodes], around);
          span.textContent = write(span.dataset.part, priced[span.dataset.part]);
        }
        const verdict = row.querySelector("[data-head=verdict]").textContent;
        return { name: row.cells[0].textContent, ...priced, safe: verdict === "safe", baseline: verdict === "baseline" };
      });
      const sentence = document.getElementById(`${table.id}-lead`);
      sentence.textContent = lead(name, rows);
      sentence.hidden = table.parentElement.hidden = false;
    }
  }

  function clear() {
    for (const table of tables) document.getElementById(`${table.id}-lead`).hidden = table.parentElement.hidden = true;
  }

  /** Price the typed network; returns whether there is one. */
  function take() {
    const name = input.value.trim().toLowerCase().replaceAll(" ", "");
    const [, number, unit, delay = "0", its = "s"] = NETWORK.exec(name) || [];
    const [bps, latency] = [Number(number) * UNITS[unit], Number(delay) * UNITS[its]];
    wrong.textContent = "";
    clear();
    if (!name) return false;
    if (!number) wrong.textContent = "Type a bandwidth and a latency, such as 300mbps+8ms.";
    else if (!(bps >= BANDWIDTHS[0] && bps <= BANDWIDTHS.at(-1) && latency <= LATENCIES.at(-1))) wrong.textContent = "Prices reach from 1mbps to 100gbps, and to 300ms.";
    else fill(name, bps, latency);
    return !wrong.textContent;
  }

  input.addEventListener("change", () => {
    const name = input.value.trim();
    if (data.networks.includes(name)) {
      select.value = name;
      select.dispatchEvent(new Event("change"));
    } else if (take()) {
      keep(input.value.trim());
      say(`The section A network of your own has the prices on ${name}; other sections are for ${select.value}.`);
      document.getElementById("typed-network").scrollIntoView();
    } else if (!name) keep(select.value);
  });
  select.addEventListener("change", () => {
    input.value = wrong.textContent = "";
    clear();
  });
  if (asked && !data.networks.includes(asked)) {
    input.value = asked.replaceAll(" ", "+"); // a plus sign in an address may stand for a space
    take();
  }
})();
