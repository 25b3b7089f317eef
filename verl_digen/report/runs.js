// -- several runs: the list of `digen watch`, and their comparison ------------------------------------------
const COLOURS = ["#2f7fd6", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8a6fd1", "#9aa3ad", "#b3a100", "#7a4b2a", "#00a3a3", "#d1495b"];
const shade = (index) => COLOURS[index % COLOURS.length];

function title(name, text, ...more) {
  bar(name);
  document.querySelector(".bar").after(el("main", {}, el("header", {}, el("h1", {}, name), el("p", {}, text), ...more)));
}

function ago(seconds) {
  for (const [size, word] of [[86400, "d"], [3600, "h"], [60, "min"]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${word} ago`;
  return "just now";
}

function hours(value) { return value === null ? "–" : value < 1 ? `${number(value * 60, 2)} min` : `${number(value, 3)} h`; }

// the worst verdict of health, with the names of all that are not green
function verdict(run) {
  if (!run.health.length) return "–";
  const worst = run.health[0][0], [icon, word] = LEVELS[worst];
  return el("span", { class: "health" }, el("span", { class: worst }, el("span", { class: "level" }, el("i", { "aria-hidden": "true" }, icon), word)),
    el("div", { class: "faint reason" }, run.health.filter(([level]) => level !== "green").map(([, name]) => name).join(", ")));
}

// a row per run; `first`: what stands before its name, `link`: where the name leads
function runTable(first, link) {
  const rewards = (run) => el("td", {}, el("span", { class: "score" }, el("b", {}, number(run.validation, 4)), sparkline(run.spark, run.spark.length - 1)));
  const lines = data.runs.map((run, index) => el("tr", {}, el("td", {}, first(index)),
    el("td", {}, link ? el("a", { class: "name", href: link(run) }, run.name) : run.name, el("br"), el("span", { class: "faint" }, run.recipe)),
    el("td", {}, el("span", { class: `tag ${run.state}`, title: run.reason }, run.state), run.reason ? el("div", { class: "faint reason" }, run.reason) : null),
    el("td", {}, verdict(run)), el("td", {}, run.steps ? `${run.step} of ${run.steps}` : String(run.step)), rewards(run),
    el("td", {}, number(run.best, 4), run.best_step !== null ? el("span", { class: "faint" }, ` step ${run.best_step}`) : null), el("td", {}, number(run.reward, 4)),
    el("td", {}, number(run.samples_per_s, 3)), el("td", {}, hours(run.hours)),
    el("td", { title: new Date(run.changed_s * 1000).toLocaleString("en") }, ago(Date.now() / 1000 - run.changed_s))));
  return el("div", { class: "wide runs" }, rows(["", "run", "state", "health", "step", "validation", "best", "training", "samples/s", "time of steps", "changed"], lines));
}

function list() {
  title("Runs", `${data.runs.length} below ${data.root}`);
  const chosen = new Set();
  const go = el("button", { disabled: true, onclick: () => { location.href = `compare?${[...chosen].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`; } }, "Compare");
  const tick = (run) => el("input", { type: "checkbox", "aria-label": `compare ${run.name}`, id: `tick ${run.name}`, onchange: (event) => {
    chosen[event.target.checked ? "add" : "delete"](run.name);
    go.disabled = chosen.size < 2 || chosen.size > data.most_compared;
    go.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  } });
  section("runs", "Runs", "Runs", "A name leads to the run's report. Tick two or more to lay them over each other.", "runs", (node) =>
    node.append(runTable((index) => tick(data.runs[index]), (run) => `run?name=${encodeURIComponent(run.name)}`), el("div", { class: "controls" }, go)));
  for (const text of data.broken) document.querySelector("main").append(el("p", { class: "empty" }, text));
}

function comparison() {
  title(`${data.runs.length} runs`, `compared ${data.written}`);
  section("runs", "Runs", "Runs", "Rewards of the newest and the best validation, and of the newest training step. The time is the sum of the steps.", "runs",
    (node) => node.append(runTable((index) => el("i", { class: "dot", style: `background:${shade(index)}` }), data.is_live ? (run) => `run?name=${encodeURIComponent(run.name)}` : null)));
  let across = "step";
  const axes = { step: "optimizer steps", "perf/samples": "samples", "perf/hours": "hours of training" };
  const curve = (run, name) => {
    const found = { x: [], y: [] };
    (run.columns[name] || []).forEach((value, row) => { if (value !== null) { found.x.push(run.columns[across][row]); found.y.push(value); } });
    return found;
  };
  const traces = (name, marked) => data.runs.map((run, index) => {
    const line = curve(run, name), isShort = line.x.length < 2;
    return { ...line, name: run.name, legendgroup: run.name, mode: marked ? "lines+markers" : isShort ? "markers" : "lines", opacity: marked ? 1 : 0.8,
      line: { color: shade(index), width: 1.8 }, marker: { size: 8, color: shade(index) }, hovertemplate: "%{y:.4g}" };
  });
  const shape = (word) => ({ showlegend: true, margin: { l: 56, r: 14, t: 34, b: 44 }, xaxis: axis(axes[across]), yaxis: axis(word) });
  section("reward", "Reward", "Rewards over each other", "Left the validation prompts, right the samples of each step.", "reward", (node) => {
    const grid = el("div", { class: "plots two" }), drawn = [];
    const pick = el("select", { "aria-label": "against", onchange: (event) => { across = event.target.value; painters.forEach((paint) => paint()); } }, Object.entries(axes).map(([name, words]) => el("option", { value: name }, `against ${words}`)));
    node.append(el("div", { class: "controls" }, pick), grid);
    for (const [name, words] of [["val/reward", "validation reward"], ["reward/mean", "training reward"]]) {
      const cell = el("div");
      grid.append(cell);
      drawn.push(plot(cell, 360, () => ({ traces: traces(name, name === "val/reward"), shape: shape(words) })));
    }
  });
  section("metrics", "All numbers", "All numbers", "Any metric of the runs, against what is chosen above.", "metrics", (node) => {
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.columns)))].filter((name) => !(name in axes) && name !== "at_s").sort();
    let name = names.includes("actor/grad_norm") ? "actor/grad_norm" : names[0];
    const pick = el("select", { "aria-label": "metric", onchange: (event) => { name = event.target.value; drawn.paint(); } }, names.map((one) => el("option", { value: one, selected: one === name }, one)));
    node.append(el("div", { class: "controls" }, pick));
    const drawn = plot(node, 280, () => ({ traces: traces(name, false), shape: shape(name) }));
  });
  const { prompts, shown, steps } = data.pictures;
  section("pictures", "Pictures", "The same prompts", "Each run's newest validation with pictures.", "pictures", (node) => node.append(prompts.length
    ? el("div", { class: "groups", style: `--pair: ${Math.min(190 * data.runs.length, 1100)}px` }, prompts.map((prompt, row) => el("div", { class: "group" }, el("p", {}, prompt), el("div", {}, shown[row].map(([picture, reward], index) =>
      el("div", { class: "card" }, el("div", { class: "frames" }, frame(picture, prompt)), el("div", { class: "score" }, el("b", {}, number(reward, 3))),
        el("p", {}, el("i", { class: "dot", style: `background:${shade(index)}` }), ` ${data.runs[index].name}, step ${steps[index]}`)))))))
    : el("p", { class: "empty" }, "No prompt has a picture in all of them.")));
  section("differences", "Config", "Differences of their configs", "Keys that are not equal in all of them, and versions. A dash: the run does not have the key.", "differences", (node) => node.append(data.differences.length
    ? el("div", { class: "wide long" }, rows(["key", ...data.runs.map((run) => run.name)], data.differences.map(([key, ...values]) => el("tr", {}, [key, ...values].map((value) => el("td", { class: "key" }, value ?? "–"))))))
    : el("p", { class: "empty" }, "Their configs are equal.")));
}
