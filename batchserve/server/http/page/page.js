"use strict";
// The page at /: it reads /live for figures and draft trees, and /v1/... for the playground.

const KEPT_S = 60;
const element = (id) => document.getElementById(id);
const headers = () => {
  const key = element("key").value || sessionStorage.getItem("key") || "";
  return key ? { Authorization: `Bearer ${key}` } : {};
};

// Server-sent events of a response; EventSource could send no key.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function show(state, text) {
  element("state").className = state;
  element("state").textContent = text;
}

// Charts: each series is a function of two readings that follow each other.

const quantile = (name, share) => (before, now) => {
  const after = now.histograms?.[name];
  if (!after || !before.histograms?.[name]) return null;
  const counts = after.counts.map((count, i) => count - before.histograms[name].counts[i]);
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  let left = share * total;
  for (let i = 0; i < counts.length; i++) {
    if (left <= counts[i]) {
      const low = i === 0 ? 0 : after.bounds[i - 1];
      const high = i < after.bounds.length ? after.bounds[i] : low;
      return 1000 * (low + (high - low) * (counts[i] ? left / counts[i] : 0));
    }
    left -= counts[i];
  }
  return null;
};
const rate = (name) => (before, now) =>
  now.values?.[name] === undefined ? null : (now.values[name] - (before.values?.[name] ?? 0)) / (now.at_s - before.at_s);
const load = (name) => (before, now) => now.load?.[name] ?? null;
const CHARTS = [
  { title: "Throughput", unit: "tokens/s", series: { answers: rate("completion_tokens_total") } },
  { title: "Requests", unit: "", series: { running: load("requests_running"), waiting: load("requests_waiting") } },
  { title: "Time to first token", unit: "ms", series: { p50: quantile("time_to_first_token_seconds", 0.5), p99: quantile("time_to_first_token_seconds", 0.99) } },
  { title: "Inter-token latency", unit: "ms", series: { p50: quantile("inter_token_latency_seconds", 0.5), p99: quantile("inter_token_latency_seconds", 0.99) } },
  { title: "Acceptance by drafter", unit: "%", series: {}, drafters: true },
  { title: "Draft rows of a request", unit: "", series: { mean: (before, now) => now.gauges?.draft_rows_per_request ?? null } },
];
const COLOURS = ["var(--accent)", "var(--series-2)", "var(--series-3)", "var(--faint)"];
const readings = [];

function acceptanceSeries(latest) {
  const series = {};
  for (const name of Object.keys(latest.acceptance || {})) {
    series[name] = (before, now) => {
      const [first, last] = [before.acceptance?.[name], now.acceptance?.[name]];
      const tested = first && last ? last.tested - first.tested : 0;
      return tested > 0 ? (100 * (last.accepted - first.accepted)) / tested : null;
    };
  }
  return series;
}

function drawCharts() {
  const latest = readings[readings.length - 1];
  for (const chart of CHARTS) {
    const series = chart.drafters ? acceptanceSeries(latest) : chart.series;
    const lines = Object.entries(series).map(([name, of]) => ({
      name,
      points: readings.slice(1).map((now, i) => ({ at: now.at_s - latest.at_s, value: of(readings[i], now) })),
    }));
    drawChart(chart, lines.filter((line) => line.points.some((point) => point.value !== null)));
  }
}

function drawChart(chart, lines) {
  if (!chart.card) {
    chart.card = document.createElement("div");
    chart.card.className = "card";
    chart.card.innerHTML = '<h3></h3><div class="now"></div><svg viewBox="0 0 300 60" preserveAspectRatio="none" role="img"></svg><div class="legend"></div>';
    chart.card.querySelector("h3").textContent = chart.title + (chart.unit ? `, ${chart.unit}` : "");
    chart.card.querySelector("svg").setAttribute("aria-label", chart.title);
    element("charts").append(chart.card);
  }
  const last = (line) => line.points.findLast((point) => point.value !== null)?.value ?? 0;
  const most = Math.max(1e-9, ...lines.flatMap((line) => line.points.map((point) => point.value ?? 0)));
  const digits = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));
  chart.card.querySelector(".now").textContent = lines.map((line) => digits(last(line))).join(" / ");
  chart.card.querySelector(".legend").innerHTML = "";
  const svg = chart.card.querySelector("svg");
  svg.innerHTML = "";
  lines.forEach((line, i) => {
    const label = document.createElement("span");
    label.textContent = `${line.name}${i + 1 < lines.length ? "  " : `   (most: ${digits(most)})`}`;
    label.style.color = COLOURS[i % COLOURS.length];
    chart.card.querySelector(".legend").append(label);
    let path = "";
    for (const { at, value } of line.points) {
      if (value === null || at < -KEPT_S) continue;
      path += `${path ? "L" : "M"}${(300 * (1 + at / KEPT_S)).toFixed(1)},${(58 - (56 * value) / most).toFixed(1)}`;
    }
    svg.append(svgElement("path", { d: path, fill: "none", stroke: COLOURS[i % COLOURS.length], "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" }));
  });
}

function svgElement(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The batch: each request with the draft tree of its last step, the accepted path lit.

const shown = new Map();
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

function drawTree(one) {
  const children = new Map();
  one.texts.forEach((_, node) => {
    const parent = one.parents[node];
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  });
  const accepted = new Set(one.accepted);
  const places = new Map([[-1, { x: 6, y: 12, width: 8 }]]);
  const svg = svgElement("svg", {});
  const edges = svgElement("g", {});
  svg.append(edges);
  let row = 0;
  let right = 20;
  const place = (node, x) => {
    const label = visible(one.texts[node]).slice(0, 14);
    const width = 10 + 6.8 * label.length;
    const own = { x, y: 12 + 20 * row, width };
    places.set(node, own);
    right = Math.max(right, x + width + 8);
    const from = places.get(one.parents[node]);
    const isAccepted = accepted.has(node);
    const bend = `M${from.x + from.width},${from.y}C${from.x + from.width + 8},${from.y} ${x - 8},${own.y} ${x},${own.y}`;
    edges.append(svgElement("path", { class: `edge${isAccepted ? " accepted" : ""}`, d: bend }));
    const group = svgElement("g", { class: isAccepted ? "accepted" : "" });
    group.append(svgElement("rect", { class: "node", x, y: own.y - 8, width, height: 16, rx: 3 }));
    group.append(svgElement("text", { x: x + 5, y: own.y + 4 }, label));
    svg.append(group);
    placeAll(node, x + width + 16);
  };
  // The accepted child comes first, so that the accepted path is a straight line.
  const placeAll = (parent, x) => {
    const nodes = [...(children.get(parent) || [])].sort((a, b) => accepted.has(b) - accepted.has(a));
    nodes.forEach((node, i) => {
      if (i > 0) row++;
      place(node, x);
    });
  };
  svg.append(svgElement("circle", { cx: 8, cy: 12, r: 4, fill: "var(--accent)" }));
  placeAll(-1, 30);
  svg.setAttribute("width", right);
  svg.setAttribute("height", 24 + 20 * row);
  return svg;
}

function drawRequest(one, card) {
  const name = one.sample ? `${one.request_id} (sample ${one.sample})` : one.request_id;
  const drafts = one.texts.length ? `${one.accepted.length} of ${one.texts.length} draft tokens accepted` : one.num_rows > 1 ? `${one.num_rows} rows of its prompt` : "no drafts";
  const about = document.createElement("div");
  about.className = "about";
  const title = document.createElement("b");
  title.textContent = name;
  about.append(title, `  prompt ${one.num_prompt_tokens}, answer ${one.num_output_tokens} tokens; ${one.drafter}: ${drafts}`);
  const fresh = document.createElement("div");
  fresh.className = "new";
  fresh.textContent = one.new.join("");
  const tree = document.createElement("div");
  tree.className = "tree";
  if (one.texts.length) tree.append(drawTree(one));
  card.replaceChildren(about, tree, fresh);
}

function drawBatch(step) {
  const now = performance.now();
  for (const one of step.requests) {
    const id = `${one.request_id}#${one.sample}`;
    if (!shown.has(id)) {
      const card = document.createElement("div");
      card.className = "request";
      shown.set(id, { card });
    }
    const entry = shown.get(id);
    entry.at = now;
    drawRequest(one, entry.card);
  }
  element("batch-note").textContent = `${step.requests.length} in a step of ${(1000 * step.step_s).toFixed(1)} ms`;
  tidyBatch();
}

// A request that no step shows any more has ended: its last tree stays for a moment, so that it can be looked at.
function tidyBatch() {
  const now = performance.now();
  for (const [id, { at }] of shown) if (now - at > 4000 && shown.size > 1) shown.delete(id);
  const cards = [...shown.values()].map((entry) => entry.card);
  if (cards.length) element("requests").replaceChildren(...cards);
}

async function follow() {
  for (;;) {
    try {
      const response = await fetch("/live", { headers: headers() });
      if (response.status === 401) {
        element("key-label").hidden = false;
        show("bad", "a key is needed");
        await new Promise((resolve) => element("key").addEventListener("change", resolve, { once: true }));
        sessionStorage.setItem("key", element("key").value);
        continue;
      }
      if (!response.ok) throw new Error((await response.json()).error.message);
      show("live", "live");
      readings.length = 0;
      for await (const event of eventsOf(response)) {
        if (event.error) throw new Error(event.error.message);
        if (event.kind === "step") drawBatch(event);
        else {
          element("model").textContent = event.model;
          readings.push(event);
          if (readings.length > KEPT_S + 2) readings.shift();
          if (readings.length > 1) drawCharts();
          tidyBatch();
        }
      }
      throw new Error("the server has ended");
    } catch (error) {
      show("bad", error.message);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

// The playground.

let asking = null;

async function ask() {
  asking = new AbortController();
  element("send").disabled = true;
  element("stop").disabled = false;
  const answer = element("answer");
  answer.textContent = "";
  const prompt = element("prompt").value;
  const isChat = element("chat").checked;
  const body = {
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    max_tokens: Number(element("max-tokens").value),
    temperature: Number(element("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    speculation: { is_enabled: element("speculation").checked },
  };
  const begun = performance.now();
  try {
    const response = await fetch(isChat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal: asking.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (choice) addRun(answer, isChat ? choice.delta.content : choice.text, choice.token_ids || []);
      if (event.usage) {
        const seconds = (performance.now() - begun) / 1000;
        const details = event.usage.completion_tokens_details;
        element("answer-note").textContent =
          `${event.usage.completion_tokens} tokens in ${seconds.toFixed(2)} s; ` +
          `${details.accepted_draft_tokens} of ${details.draft_tokens} draft tokens accepted.`;
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") answer.append(`\n${error.message}`);
  } finally {
    element("send").disabled = false;
    element("stop").disabled = true;
  }
}

// All tokens of a chunk but the last one were drafted.
function addRun(answer, text, tokens) {
  if (!text) return;
  const run = document.createElement("span");
  run.textContent = text;
  if (tokens.length > 1) {
    run.className = "run";
    run.style.setProperty("--strength", `${Math.min(100, 25 + 15 * (tokens.length - 1))}%`);
    run.title = `${tokens.length} tokens in one step, ${tokens.length - 1} of them drafted`;
  }
  answer.append(run);
  answer.scrollTop = answer.scrollHeight;
}

element("key-label").addEventListener("submit", (event) => event.preventDefault());
element("send").addEventListener("click", ask);
element("stop").addEventListener("click", () => asking?.abort());
follow();
