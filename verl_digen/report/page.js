"use strict";
// SPDX-License-Identifier: Apache-2.0
// Draws the page from the JSON in #data. Texts of the run are set as text nodes, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const columns = data.curves ? data.curves.columns : {};  // another page has none
const painters = [];  // drawn again when the colours change

// -- small parts ------------------------------------------------------------------------------------------
function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function change(value) {
  const text = (value > 0 ? "+" : value < 0 ? "−" : "±") + number(Math.abs(value), 2);
  return el("em", { class: value > 0 ? "up" : value < 0 ? "down" : "" }, text);
}

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

const sections = [];
function section(id, short, title, intro, part, fill) {
  const node = el("section", { id }, el("h2", {}, title), el("p", { class: "intro" }, intro));
  sections.push([id, short]);
  document.querySelector("main").append(node);
  const empty = data.missing.empty[part];
  if (empty) node.append(el("p", { class: "empty" }, empty));
  else fill(node);
}

// -- plots ------------------------------------------------------------------------------------------------
function axis(title, more) {
  return { title: { text: title, font: { size: 12 }, standoff: 8 }, gridcolor: colour("grid"), zeroline: false, automargin: true,
    linecolor: colour("line"), tickfont: { size: 11.5 }, ...more };
}

// optimizer steps: whole numbers, also where there are few
function stepAxis(title, more) {
  const steps = columns.step || [0];
  return axis(title, { ...(steps[steps.length - 1] <= 12 ? { dtick: 1 } : {}), ...more });
}

function layout(more) {
  return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily,
    color: colour("soft"), size: 12.5 }, margin: { l: 52, r: 14, t: 10, b: 42 }, hovermode: "x unified", showlegend: false,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"),
    font: { color: colour("ink"), size: 12.5 } }, ...more };
}

function plot(parent, height, draw) {
  const node = el("div", { style: `height:${height}px` });
  parent.append(node);
  const paint = () => {
    const { traces, shape } = draw();
    Plotly.react(node, traces, layout(shape), { displayModeBar: false });
  };
  painters.push(paint);
  paint();
  new ResizeObserver(() => { if (node.isConnected) Plotly.Plots.resize(node); }).observe(node);
  return { node, paint };
}

// points of a column that have a value
function points(name) {
  const found = { x: [], y: [] };
  (columns[name] || []).forEach((value, row) => {
    if (value !== null) { found.x.push(columns.step[row]); found.y.push(value); }
  });
  return found;
}

function smooth(values) {
  const weight = 2 / (1 + Math.max(3, values.length / 15));
  let mean = values[0];
  return values.map((value) => (mean += weight * (value - mean)));
}

// training values, their running mean, and validations on top
function rewardTraces(trained, validated, size) {
  const line = points(trained), marks = points(validated), isLong = line.y.length > 12, traces = [];
  if (line.x.length) traces.push({ ...line, name: "training", mode: line.x.length > 1 ? "lines" : "markers",
    line: { color: colour("accent"), width: isLong ? 1 : 1.8 }, opacity: isLong ? 0.38 : 1, hovertemplate: "%{y:.4g}" });
  if (isLong) traces.push({ x: line.x, y: smooth(line.y), name: "training, running mean", mode: "lines",
    line: { color: colour("accent"), width: 2.2 }, hovertemplate: "%{y:.4g}" });
  if (marks.x.length) traces.push({ ...marks, name: "validation", mode: "lines+markers", line: { color: colour("second"), width: 1.6 },
    marker: { size, color: colour("second"), line: { color: colour("card"), width: 1.5 } }, hovertemplate: "%{y:.4g}" });
  return traces;
}

function bandTraces() {
  const mean = points("reward/mean"), std = points("reward/std");
  if (mean.x.length < 2 || std.x.length !== mean.x.length) return [];
  const low = mean.y.map((value, row) => value - std.y[row]), high = mean.y.map((value, row) => value + std.y[row]);
  return [{ x: [...mean.x, ...mean.x.slice().reverse()], y: [...high, ...low.reverse()], fill: "toself", mode: "lines",
    fillcolor: colour("band"), line: { width: 0 }, hoverinfo: "skip", name: "training, ± one standard deviation" }];
}

function slider(parent, steps, first, show) {
  const said = el("output", {});
  const range = el("input", { type: "range", min: 0, max: steps.length - 1, step: 1, value: first, "aria-label": "step" });
  const move = () => { said.textContent = `step ${steps[range.value]}`; show(Number(range.value)); };
  let timer = null;
  const play = el("button", { "aria-pressed": "false", onclick: () => {
    if (timer) { clearInterval(timer); timer = null; }
    else timer = setInterval(() => { range.value = (Number(range.value) + 1) % steps.length; move(); }, 700);
    play.setAttribute("aria-pressed", String(Boolean(timer)));
    play.textContent = timer ? "Pause" : "Play";
  } }, "Play");
  range.addEventListener("input", move);
  const row = el("div", { class: "controls" }, said, steps.length > 1 ? [range, play] : null);
  parent.append(row);
  return { row, move };
}

function frame(picture, label) {
  if (!picture) return el("div", { class: "frame", title: label }, el("i", {}, "no picture"));
  const image = el("img", { src: picture, alt: label, title: label, loading: "lazy" });
  image.addEventListener("load", () => image.classList.toggle("sharp", Math.max(image.naturalWidth, image.naturalHeight) <= 96));
  return el("div", { class: "frame" }, image);
}

// width of a cell for pictures of any shape: wide ones, as filmstrips, get more
function fitCells(parent, variable, picture, base, factor) {
  if (!picture) return;
  const probe = new Image();
  probe.onload = () => parent.style.setProperty(variable, `${Math.round(Math.min(base * Math.max(1, 0.85 * probe.naturalWidth / probe.naturalHeight), 560) * factor)}px`);
  probe.src = picture;
}

function sparkline(values, at, width = 58, height = 20) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (index) => 3 + (width - 6) * index / (values.length - 1), y = (value) => height - 3 - (height - 6) * (high > low ? (value - low) / (high - low) : 0.5);
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
  svg.setAttribute("width", width); svg.setAttribute("height", height);
  const line = document.createElementNS(space, "polyline");
  line.setAttribute("points", values.map((value, index) => value === null ? "" : `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  line.setAttribute("style", "fill:none;stroke:var(--faint);stroke-width:1.4");
  svg.append(line);
  if (at >= 0 && values[at] !== null) {
    const dot = document.createElementNS(space, "circle");
    dot.setAttribute("cx", x(at)); dot.setAttribute("cy", y(values[at])); dot.setAttribute("r", 2.8);
    dot.setAttribute("style", "fill:var(--second)");
    svg.append(dot);
  }
  return svg;
}

// -- the page ---------------------------------------------------------------------------------------------
function bar(name) {
  const dark = el("button", { "aria-label": "light or dark", onclick: () => setDark(!document.documentElement.classList.contains("dark")) }, "Dark");
  dark.id = "dark";
  document.body.prepend(el("div", { class: "bar" }, el("strong", {}, name), el("nav", {}), dark));
}

function head() {
  const { name, folder, facts } = data.heading;
  bar(name);
  const steps = columns.step || [];
  const reached = steps.length ? `after step ${steps[steps.length - 1]}` : "before the first step";
  document.querySelector(".bar").after(el("main", {},
    el("header", {}, el("h1", {}, name), el("p", {}, `${folder} · written ${data.written}, ${reached}`),
      el("ul", { class: "facts" }, facts.map(([word, value]) => el("li", {}, el("b", {}, word), value)))),
    el("div", { class: "tiles" }, data.tiles.map((tile) =>
      el("div", { class: "tile" }, el("span", {}, tile.label), el("b", {}, tile.value), el("span", {}, tile.detail))))));
}

function setDark(isDark) {
  document.documentElement.classList.toggle("dark", isDark);
  document.getElementById("dark").textContent = isDark ? "Light" : "Dark";
  painters.forEach((paint) => paint());
}

const LEVELS = { green: ["✓", "good"], amber: ["!", "watch"], red: ["✕", "act"], unknown: ["–", "not measured"] };

function healthPanel() {
  const count = (level) => data.health.filter((one) => one.level === level).length;
  const told = Object.keys(LEVELS).filter(count).map((level) => `${count(level)} ${LEVELS[level][1]}`).join(", ");
  section("health", "Health", "Is this run healthy?", `${told}. Judged over the newest steps; docs/metrics.md has the rules.`, "health", (node) =>
    node.append(el("ul", { class: "health" }, data.health.map(({ name, metric, level, value, text, advice, page }) => {
      const line = points(metric).y;
      return el("li", { class: level }, el("span", { class: "level" }, el("i", { "aria-hidden": "true" }, LEVELS[level][0]), LEVELS[level][1]),
        el("div", {}, el("b", {}, name), el("code", {}, metric)), el("b", { class: "value" }, number(value)), el("span", { class: "trend" }, sparkline(line, line.length - 1, 120, 24)),
        el("span", { class: "measured" }, text), level === "amber" || level === "red" ? el("p", {}, `${advice} `, el("code", {}, `docs/${page}`)) : null);
    }))));
}

function rewardCurve() {
  section("reward", "Reward", "Reward", "Mean over the samples of each step, with their spread, and over the validation prompts, which keep their noise.", "reward",
    (node) => plot(node, 380, () => ({ traces: [...bandTraces(), ...rewardTraces("reward/mean", "val/reward", 9)],
      shape: { showlegend: true, margin: { l: 56, r: 14, t: 34, b: 44 }, xaxis: stepAxis("optimizer steps"), yaxis: axis("reward") } })));
}

function partCurves() {
  const extra = new Set(["reward/mean", "reward/std", "reward/min", "reward/max", "reward/zero_spread_fraction"]);
  const names = new Set();
  for (const name of Object.keys(columns)) {
    if (name.startsWith("reward/") && !extra.has(name)) names.add(name.slice(7));
    else if (name.startsWith("val/reward_") && !extra.has(name.replace("val/reward_", "reward/"))) names.add(name.slice(11));
  }
  section("rewards", "Rewards", "Each reward", "Every reward and its details: in training, and in validation.", "parts", (node) => {
    const grid = el("div", { class: "plots" });
    node.append(grid);
    for (const name of [...names].slice(0, 24)) {
      const cell = el("div", { class: "small" }, el("h3", {}, name));
      grid.append(cell);
      plot(cell, 190, () => ({ traces: rewardTraces(`reward/${name}`, `val/reward_${name}`, 6),
        shape: { margin: { l: 44, r: 8, t: 6, b: 26 }, xaxis: stepAxis(""), yaxis: axis("", { nticks: 5 }) } }));
    }
    if (names.size > 24) node.append(el("p", { class: "intro" }, `${names.size - 24} more are under "All numbers".`));
  });
}

function rewardDistributions() {
  const { steps, rewards } = data.distributions;
  section("distributions", "Distributions", "How the rewards are distributed", "Over the samples of a training step. Left: every recorded step, darker is more. Right: the chosen step against the first.", "distributions", (node) => {
    const names = Object.keys(rewards);
    let name = names[0], at = steps.length - 1;
    const middles = () => rewards[name].edges.slice(1).map((edge, bin) => (edge + rewards[name].edges[bin]) / 2);
    const { row, move } = slider(node, steps, at, (chosen) => { at = chosen; plots.forEach((one) => one.paint()); });
    if (names.length > 1) row.prepend(el("select", { "aria-label": "reward", onchange: (event) => { name = event.target.value; plots.forEach((one) => one.paint()); } },
      names.map((one) => el("option", { value: one }, one))));
    const grid = el("div", { class: "plots two" });
    node.append(grid);
    const scale = () => [[0, colour("well")], [1, colour("accent")]];
    const plots = [];
    const [left, right] = [el("div"), el("div")];
    grid.append(left, right);
    plots.push(plot(left, 300, () => ({ traces: [{ type: "heatmap", x: steps.map(String), y: middles(), z: middles().map((_, bin) => rewards[name].shares.map((of) => of && of[bin])),
      colorscale: scale(), showscale: false, hovertemplate: "step %{x}<br>%{y:.3g}: %{z:.1%}<extra></extra>" }],
      shape: { hovermode: "closest", xaxis: axis("optimizer steps", { type: "category" }), yaxis: axis(name), shapes: [{ type: "rect", xref: "x", yref: "paper", x0: at - 0.5, x1: at + 0.5, y0: 0, y1: 1,
        line: { color: colour("second"), width: 2 } }] } })));
    plots.push(plot(right, 300, () => ({ traces: [
      ...(at > 0 && rewards[name].shares[0] ? [{ type: "bar", x: middles(), y: rewards[name].shares[0], name: `step ${steps[0]}`, marker: { color: colour("hatch") }, opacity: 0.75, hovertemplate: "%{y:.1%}" }] : []),
      { type: "bar", x: middles(), y: rewards[name].shares[at] || [], name: `step ${steps[at]}`, marker: { color: colour("accent") }, opacity: 0.72, hovertemplate: "%{y:.1%}" }],
      shape: { barmode: "overlay", bargap: 0.06, showlegend: true, margin: { l: 52, r: 14, t: 28, b: 42 }, xaxis: axis(name, { hoverformat: ".3g" }), yaxis: axis("share of samples", { tickformat: ".0%", rangemode: "tozero" }) } })));
    move();
  });
}

function validationPictures() {
  const { prompts, steps, pictures, rewards, reward_steps: rewardSteps } = data.validations;
  section("pictures", "Pictures", "Validation prompts over the steps", "The same prompts and the same noise after every validation. The small line is the prompt's reward over all validations.", "validations", (node) => {
    let compares = true, sorts = "as given";
    const grid = el("div", { class: "cards" });
    const score = (index, prompt) => (rewards[rewardSteps.indexOf(steps[index])] || [])[prompt] ?? null;
    let at = steps.length - 1;
    const gain = (prompt) => (score(at, prompt) ?? 0) - (score(0, prompt) ?? 0);
    const draw = () => {
      const order = prompts.map((_, prompt) => prompt);
      if (sorts === "largest change first") order.sort((a, b) => Math.abs(gain(b)) - Math.abs(gain(a)));
      if (sorts === "lowest reward first") order.sort((a, b) => (score(at, a) ?? 0) - (score(at, b) ?? 0));
      grid.replaceChildren(...order.map((prompt) => {
        const now = score(at, prompt), first = score(0, prompt);
        const shown = compares && at > 0 ? [frame(pictures[0][prompt], `step ${steps[0]}`), frame(pictures[at][prompt], `step ${steps[at]}`)] : [frame(pictures[at][prompt], prompts[prompt])];
        return el("div", { class: "card" }, el("div", { class: "frames" }, shown),
          el("div", { class: "score" }, el("b", {}, number(now, 3)), at > 0 && now !== null && first !== null ? change(now - first) : null,
            sparkline(rewards.map((row) => row[prompt]), rewardSteps.indexOf(steps[at]))),
          el("p", {}, prompts[prompt]));
      }));
      fitCells(grid, "--cell", pictures[at].find(Boolean), 150, compares && at > 0 ? 1.9 : 1);
    };
    const { row, move } = slider(node, steps, at, (chosen) => { at = chosen; draw(); });
    if (steps.length > 1) row.append(el("button", { "aria-pressed": "true", onclick: (event) => { compares = !compares; event.target.setAttribute("aria-pressed", String(compares)); draw(); } }, `Beside step ${steps[0]}`));
    row.append(el("select", { "aria-label": "order", onchange: (event) => { sorts = event.target.value; draw(); } }, ["as given", "largest change first", "lowest reward first"].map((word) => el("option", {}, word))));
    node.append(grid);
    move();
  });
}

function groupPictures() {
  const { steps, groups } = data.groups;
  section("groups", "Groups", "Best and worst of training groups", "Samples of one prompt compete: these were rated highest and lowest. If the best look worse than the worst, the reward is at fault.", "groups", (node) => {
    const grid = el("div", { class: "groups" });
    const { move } = slider(node, steps, steps.length - 1, (at) => {
      grid.replaceChildren(...groups[at].map((group) => {
        const split = group.map((one) => one.prompt.match(/^(best|worst) of (\d+): ([\s\S]*)$/) || [null, "", "", one.prompt]);
        return el("div", { class: "group" }, el("p", {}, split[0][3]),
          el("div", {}, group.map((one, index) => el("div", { class: "card" }, el("div", { class: "frames" }, frame(one.picture, one.prompt)),
            el("div", { class: "score" }, el("b", {}, number(one.reward, 3)), split[index][1] ? el("span", { class: "tag" }, `${split[index][1]} of ${split[index][2]}`) : null)))));
      }));
      fitCells(grid, "--pair", groups[at].flat().map((one) => one.picture).find(Boolean), 178, 2.1);
    });
    node.append(grid);
    move();
  });
}

function speed() {
  section("speed", "Speed", "Throughput and idle time", "Samples per second over the whole step, where a step's seconds went, and the share of each pool's device time without work.", "speed", (node) => {
    const grid = el("div", { class: "plots two" });
    node.append(grid);
    const cell = (title) => { const one = el("div", { class: "small" }, el("h3", {}, title)); grid.append(one); return one; };
    plot(cell("Samples per second"), 250, () => { const line = points("perf/images_per_s"); return { traces: [{ ...line, mode: line.x.length > 1 ? "lines" : "markers", line: { color: colour("accent"), width: 1.8 }, hovertemplate: "%{y:.4g}<extra></extra>" }],
      shape: { xaxis: stepAxis("optimizer steps"), yaxis: axis("samples/s", { rangemode: "tozero" }) } }; });
    const parts = [["generate", "generating", "#0072B2"], ["score", "scoring", "#CC79A7"], ["train", "training", "#E69F00"], ["sync", "sending weights", "#56B4E9"], ["overhead", "nothing of these", "#9aa3ad"]].filter(([name]) => columns[`perf/${name}_s`]);
    plot(cell("Seconds of a step in which it was"), 250, () => ({ traces: [...parts.map(([name, words, shade]) => ({ ...points(`perf/${name}_s`), name: words, mode: "lines+markers", marker: { size: points("perf/step_s").x.length > 1 ? 0.1 : 7, color: shade }, line: { color: shade, width: 1.8 }, hovertemplate: "%{y:.3g} s" })),
      { ...points("perf/step_s"), name: "the whole step", mode: "lines", line: { color: colour("ink"), width: 1.2, dash: "dot" }, hovertemplate: "%{y:.3g} s" }],
      shape: { showlegend: true, legend: { orientation: "h", x: 0, y: -0.24, yanchor: "top" }, xaxis: stepAxis("optimizer steps", { title: undefined }), yaxis: axis("s", { rangemode: "tozero" }) } }));
    const idle = Object.keys(columns).filter((name) => name.startsWith("perf/bubble_fraction/"));
    if (idle.length) plot(cell("Idle share of each pool"), 250, () => ({ traces: idle.map((name, index) => ({ ...points(name), name: name.slice(21), mode: "lines", line: { width: 1.8, color: ["#0072B2", "#E69F00", "#CC79A7"][["generator", "trainer", "reward"].indexOf(name.slice(21))] }, hovertemplate: "%{y:.1%}" })),
      shape: { showlegend: true, margin: { l: 52, r: 14, t: 30, b: 42 }, xaxis: stepAxis("optimizer steps"), yaxis: axis("", { tickformat: ".0%", rangemode: "tozero" }) } }));
    const used = Object.keys(columns).filter((name) => /^perf\/(mfu|tflops_per_device)\//.test(name));
    const kind = used.some((name) => name.startsWith("perf/mfu/")) ? "mfu" : "tflops_per_device";
    if (used.length) plot(cell(kind === "mfu" ? "Model FLOPs utilisation" : "TFLOP/s per device"), 250, () => ({ traces: used.filter((name) => name.includes(kind)).map((name) => ({ ...points(name), name: name.split("/")[2], mode: "lines", line: { width: 1.8, color: name.endsWith("trainer") ? "#E69F00" : "#0072B2" }, hovertemplate: kind === "mfu" ? "%{y:.1%}" : "%{y:.3g}" })),
      shape: { showlegend: true, margin: { l: 52, r: 14, t: 30, b: 42 }, xaxis: stepAxis("optimizer steps"), yaxis: axis("", { tickformat: kind === "mfu" ? ".0%" : "", rangemode: "tozero" }) } }));
  });
}

function timeline() {
  const { steps, kinds } = data.timelines;
  section("timeline", "Timeline", "Timeline", "A row per replica, reward worker and trainer. Grey is waiting; an empty stretch was not recorded. Drag to zoom, double-click to see all.", "timeline", (node) => {
    let chosen = steps[steps.length - 1];
    const pick = el("select", { "aria-label": "step", onchange: (event) => { chosen = steps[event.target.value]; show(); } },
      steps.map((one, index) => el("option", { value: index, selected: one === chosen }, `step ${one.step}${one.word ? ` (${one.word})` : ""}`)));
    const facts = el("span", {}), key = el("div", { class: "key-row" }), place = el("div"), table = el("div", { class: "pools" });
    node.append(el("div", { class: "controls" }, pick, facts), key, place, table);
    let drawn = null;
    function rowsOf() {
      const starts = []; let total = 0;
      for (const lane of chosen.lanes) { starts.push(total); total += lane.rows; }
      return { starts, total };
    }
    function draw() {
      const { starts, total } = rowsOf(), traces = [];
      const several = new Set(chosen.lanes.map((lane) => lane.host)).size > 1;
      for (const kind of Object.keys(kinds)) {
        for (const pale of [false, true]) {
          const bars = chosen.bars.filter((bar) => bar.kind === kind && bar.pale === pale);
          if (!bars.length) continue;
          const waits = kind === "wait";
          traces.push({ type: "bar", orientation: "h", base: bars.map((bar) => bar.at), x: bars.map((bar) => bar.s), y: bars.map((bar) => starts[bar.lane] + bar.row), width: bars.map(() => waits ? 0.55 : 0.84),
            text: bars.map((bar) => `${bar.text} · ${number(bar.s, 3)} s`), textposition: "none", hovertemplate: "%{text}<extra></extra>",
            marker: { color: waits ? colour("wait") : kinds[kind].colour, opacity: pale ? 0.45 : 1, line: { width: 0.6, color: colour("card") } } });
        }
      }
      return { traces, shape: { barmode: "overlay", hovermode: "closest", margin: { l: 10, r: 14, t: 8, b: 42 }, xaxis: axis("seconds since the step began", { range: [0, chosen.step_s] }),
        yaxis: axis("", { autorange: false, range: [total - 0.4, -0.6], tickmode: "array", tickvals: chosen.lanes.map((lane, index) => starts[index] + (lane.rows - 1) / 2), showgrid: false,
          ticktext: chosen.lanes.map((lane) => several ? `${lane.name} · ${lane.host}` : lane.name), fixedrange: true }) } };
    }
    function show() {
      facts.textContent = chosen.headline;
      const seen = Object.keys(kinds).filter((kind) => chosen.bars.some((bar) => bar.kind === kind));
      key.replaceChildren(...seen.map((kind) => el("span", {}, el("i", { style: `background:${kind === "wait" ? "var(--wait)" : kinds[kind].colour}` }), kinds[kind].words)),
        ...(chosen.bars.some((bar) => bar.pale) ? [el("span", {}, "paler: for another step")] : []));
      if (drawn) painters.splice(painters.indexOf(drawn.paint), 1);
      place.replaceChildren();
      drawn = plot(place, 70 + 26 * Math.max(2, rowsOf().total), draw);
      const left = [];
      if (chosen.num_lanes_left_out) left.push(`${chosen.num_lanes_left_out} more rows are not drawn.`);
      if (chosen.num_bars_left_out) left.push(`${chosen.num_bars_left_out} of the shortest intervals are not drawn.`);
      table.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ["pool", "devices", "busy", "idle", "idle because"].map((word) => el("th", {}, word)))),
        el("tbody", {}, chosen.pools.map((pool) => el("tr", {}, el("td", {}, pool.pool), el("td", {}, String(pool.devices)),
          el("td", {}, el("span", { class: "share" }, el("i", { style: `width:${100 * pool.busy}%` })), `${(100 * pool.busy).toFixed(1)} %`), el("td", {}, `${(100 * pool.idle).toFixed(1)} %`),
          el("td", {}, pool.causes.map(([words, share]) => `${words} ${(100 * share).toFixed(1)} %`).join(" · ") || "–"))))),
        ...left.map((text) => el("p", { class: "intro" }, text)));
    }
    show();
  });
}

function everything() {
  section("metrics", "All numbers", "All numbers", "Any metric of metrics.jsonl over the steps.", "metrics", (node) => {
    const names = Object.keys(columns).filter((name) => name !== "step").sort();
    let name = names.includes("actor/grad_norm") ? "actor/grad_norm" : names[0];
    const pick = el("select", { "aria-label": "metric", onchange: (event) => { name = event.target.value; drawn.paint(); } }, names.map((one) => el("option", { value: one, selected: one === name }, one)));
    node.append(el("div", { class: "controls" }, pick));
    const drawn = plot(node, 280, () => { const line = points(name); return { traces: [{ ...line, mode: line.x.length > 30 ? "lines" : "lines+markers", line: { color: colour("accent"), width: 1.8 }, hovertemplate: "%{y:.5g}<extra></extra>" }], shape: { xaxis: stepAxis("optimizer steps"), yaxis: axis(name) } }; });
  });
}

function rows(head, lines) {
  return el("table", {}, el("thead", {}, el("tr", {}, head.map((word) => el("th", {}, word)))), el("tbody", {}, lines));
}

function config() {
  const { words, changes, config: values } = data.start;
  section("config", "Config", "Config against the recipe", "What the command line changed. Interpolations are shown as they are written.", "nothing", (node) => {
    if (words.length) node.append(el("code", { class: "words" }, words.join("\n")));
    if (data.missing.empty.changes) node.append(el("p", { class: "empty" }, data.missing.empty.changes));
    else node.append(rows(["key", "recipe", "this run"], changes.map(([key, old, now]) => el("tr", {}, el("td", { class: "key" }, key), el("td", { class: "key old" }, old), el("td", { class: "key" }, now)))));
    if (data.missing.empty.config) { node.append(el("p", { class: "empty" }, data.missing.empty.config)); return; }
    const body = el("tbody");
    const find = el("input", { type: "search", placeholder: "part of a key or value", "aria-label": "filter", oninput: () => fill() });
    const fill = () => {
      const part = find.value.toLowerCase();
      body.replaceChildren(...values.filter(([key, value]) => key.toLowerCase().includes(part) || value.toLowerCase().includes(part))
        .map(([key, value]) => el("tr", {}, el("td", { class: "key" }, key), el("td", { class: "key" }, value))));
    };
    fill();
    node.append(el("details", {}, el("summary", {}, `The whole config, ${values.length} values`), el("div", { class: "controls", style: "margin:10px 0 0" }, find), el("div", { class: "scroll" }, el("table", {}, body))));
  });
}

function warnings() {
  section("warnings", "Warnings", "Warnings and notes", "Notes were said before the run started; warnings by its driver since.", "nothing", (node) => {
    const list = el("ul", { class: "notes" });
    for (const one of data.warnings.shown) {
      const when = one.count === 1 ? `step ${one.first_step}` : `${one.count} times, steps ${one.first_step} to ${one.last_step}`;
      list.append(el("li", {}, el("span", { class: `tag ${one.level.toLowerCase()}` }, one.level.toLowerCase()), el("span", { class: "tag" }, when), one.text));
    }
    for (const note of data.start.notes) list.append(el("li", {}, el("span", { class: "tag" }, "note"), note));
    if (data.missing.empty.warnings) node.append(el("p", { class: data.start.notes.length ? "intro" : "empty" }, data.missing.empty.warnings));
    node.append(list);
  });
}

function versions() {
  section("versions", "Versions", "Versions", "Of what the run computes with, when it started.", "versions", (node) =>
    node.append(rows(["package", "version"], Object.entries(data.start.versions).map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", { class: "key" }, value))))));
}

function foot() {
  const left = data.missing.left_out;
  document.querySelector("main").append(el("footer", {}, `Written by verl-digen ${data.version}. Everything here comes from the run's folder; nothing is fetched.`,
    left.length ? el("ul", {}, left.map((text) => el("li", {}, text))) : null));
  document.querySelector(".bar nav").append(...sections.map(([id, short]) => el("a", { href: `#${id}` }, short)));
}

function report() {
  head();
  healthPanel();
  rewardCurve();
  validationPictures();
  partCurves();
  rewardDistributions();
  groupPictures();
  speed();
  timeline();
  everything();
  config();
  warnings();
  versions();
}

function draw(view) {
  view();
  foot();
  const wanted = new URLSearchParams(location.search).get("theme");
  setDark(wanted ? wanted === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.setAttribute("data-drawn", sections.length);
}
