// Display of the page. dashboard_figures.js, which precedes this in one script, computes the figures.
const PERIOD_MS = 2000, ANSWER_MS = 8000, SHOWN_BATCHES = 20;
const TIERS = ["priority", "default", "flex", "batch"];
const OTHERS = ["priority", "fcfs"];
const COLUMN = 480, GAP = 20, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 10, BOTTOM = 20;
const SVG = "http://www.w3.org/2000/svg";
let key = "", width = COLUMN;
let locked = !document.getElementById("key").hidden;  // batches are not requested until a key is entered
const at = (id) => document.getElementById(id);

// ---- pieces of the page ----

function made(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function drawn(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function row(cells) {
  const line = made("tr");
  for (const cell of cells) {
    const place = made("td");
    place.append(cell);
    line.append(place);
  }
  return line;
}

function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}

function plot(title, unit, series, { stacked = false, most = 0 } = {}) {
  const times = history.map((one) => one.s), count = times.length;
  let below = new Array(count).fill(0), highest = most;
  const tops = series.map(({ ys, mark }) => {
    const top = stacked && !mark ? ys.map((y, k) => below[k] + (y || 0)) : ys;
    if (stacked && !mark) below = top;
    for (const y of top) if (y !== null && y > highest) highest = y;
    return top;
  });
  highest = most || roundUp(highest || 1);
  const end = times[count - 1], span = Math.max(60, end - times[0]);
  const x = (s) => LEFT + (1 - (end - s) / span) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - Math.min(value, highest) / highest * (HEIGHT - TOP - BOTTOM);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${unit}, the last minutes` });
  for (const share of [0, 0.5, 1]) {
    svg.append(drawn("path", { class: "grid", d: `M${LEFT} ${y(share * highest)}H${width - RIGHT}` }));
    svg.append(drawn("text", { x: LEFT - 5, y: y(share * highest) + 4, "text-anchor": "end" }, short(share * highest)));
  }
  svg.append(drawn("text", { x: LEFT, y: HEIGHT - 4 }, `−${duration(span)}`));
  svg.append(drawn("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  let floor = new Array(count).fill(0);
  series.forEach(({ mark }, k) => {
    const point = (i, value) => `${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    if (stacked && !mark) {
      const there = tops[k].map((value, i) => point(i, value)).join("L");
      const back = floor.map((value, i) => point(i, value)).reverse().join("L");
      svg.append(drawn("path", { class: `area s${k}`, d: `M${there}L${back}Z` }));
      floor = tops[k];
      return;
    }
    let path = "", pen = "M";
    tops[k].forEach((value, i) => {
      path += value === null ? "" : pen + point(i, value) + (pen === "M" ? "h0" : "");
      pen = value === null ? "M" : "L";
    });
    svg.append(drawn("path", { class: mark ? "line mark" : `line s${k}`, d: path || "M0 0" }));
  });
  const caption = made("figcaption", title + " ");
  caption.append(made("span", unit));
  const legend = made("div", undefined, "legend");
  series.forEach(({ name, mark }, k) => {
    const entry = made("span", undefined, mark ? "mark" : `s${k}`);
    entry.append(made("i"), name);
    legend.append(entry);
  });
  const figure = made("figure");
  figure.append(caption, svg, legend);
  return figure;
}

// ---- the page ----

function lines(figure) {
  return history.map((now, k) => k === 0 ? null : figure(history[k - 1], now));
}

function showPlots() {
  const whole = at("plots").clientWidth;
  width = whole < 2 * COLUMN + GAP ? whole : (whole - GAP) / 2;  // like the columns of the style sheet, so that text keeps its size
  const tokens = (name) => lines((before, now) => rate(before, now, "neaptide_step_tokens_total", { class: name }));
  const blocks = (state) => history.map((one) => sum(one.samples, "neaptide_kv_blocks", { state }));
  const met = (slo) => history.map((now, k) => {
    const share = attained(firstWithin(k, SHARE_S), now, { slo });
    return share === null ? null : 100 * share;
  });
  const inMs = (values) => values.map((value) => value === null ? null : 1000 * value);
  const measured = (a, b) => mean(a, b, "neaptide_step_seconds_sum", { phase: "total" }, "neaptide_step_seconds_count", { phase: "total" });
  const predicted = (a, b) => mean(a, b, "neaptide_steps_predicted_seconds_total", {}, "neaptide_steps_total", {});
  at("plots").replaceChildren(
    plot("Tokens computed, by class", "tokens/s", [
      { name: "online", ys: tokens("online") }, { name: "offline", ys: tokens("offline") },
    ], { stacked: true }),
    plot("Targets met", `% of the last ${SHARE_S} s`, [{ name: "TTFT", ys: met("ttft") }, { name: "TPOT", ys: met("tpot") }], { most: 100 }),
    plot("KV blocks, and the reserve for online work", "blocks", [
      { name: "online", ys: blocks("online") }, { name: "offline", ys: blocks("offline") },
      { name: "cached", ys: blocks("cached") }, { name: "free", ys: blocks("free") },
      { name: "reserved for chats (forecast)", ys: history.map((one) => sum(one.samples, "neaptide_kv_reserved_blocks")), mark: true },
    ], { stacked: true }),
    plot("Mean time of a step", "ms", [{ name: "predicted", ys: inMs(lines(predicted)) }, { name: "measured", ys: inMs(lines(measured)) }]),
  );
}

function showFigures() {
  const now = history[history.length - 1], before = shortlyBefore(), first = history[0];
  const online = (name) => rate(before, now, "neaptide_step_tokens_total", { class: name });
  const covered = mean(first, now, "neaptide_steps_within_margin_total", {}, "neaptide_steps_total", {});
  const error = mean(first, now, "neaptide_step_prediction_error_ratio_sum", {}, "neaptide_step_prediction_error_ratio_count", {});
  const figures = [
    ["online tokens/s", short(online("online"))],
    ["offline tokens/s", short(online("offline"))],
    ["running, online / offline", ["online", "offline"].map((name) => sum(now.samples, "neaptide_requests_running", { class: name })).join(" / ")],
    ["waiting, online / offline", ["online", "offline"].map((name) => short(sum(now.samples, "neaptide_requests_waiting", { class: name }))).join(" / ")],
    ["preempted, 5 min", short(grown(first, now, "neaptide_preemptions_total"))],
    ["steps on time", percent(covered)],
    ["prediction error", percent(error)],
  ];
  at("figures").replaceChildren(...figures.map(([name, value]) => {
    const card = made("div");
    card.append(made("b", value), made("span", name));
    return card;
  }));
  at("tiers").replaceChildren(...TIERS.map((tier) => tier === "batch" ? row([
    tier,
    short(sum(now.samples, "neaptide_batch_requests_pending")),
    "–",
    "–",
    short(sum(now.samples, "neaptide_batch_requests_total")),
  ]) : row([
    tier,
    String(sum(now.samples, "neaptide_requests_in_flight", { tier })),
    percent(attained(first, now, { tier, slo: "ttft" })),
    percent(attained(first, now, { tier, slo: "tpot" })),
    short(sum(now.samples, "neaptide_requests_total", { tier })),
  ])));
  say(...stateOf(now.samples));
}

// On a gateway, the series of each replica have its name, and sums are over all replicas.
function replicasOf(samples) {
  return valuesOf(samples, "neaptide_cluster_replica_ready").map(([labels, ready]) => [labels.replica, ready > 0]);
}

function showReplicas() {
  const now = history[history.length - 1], before = shortlyBefore();
  const replicas = replicasOf(now.samples);
  at("cluster").hidden = replicas.length === 0;
  at("replicas").replaceChildren(...replicas.map(([replica, ready]) => row([
    replica,
    ready ? "yes" : "no",
    String(sum(now.samples, "neaptide_cluster_requests_in_flight", { replica })),
    ready ? ms(sum(now.samples, "neaptide_cluster_free_slack_seconds", { replica })) : "–",
    short(rate(before, now, "neaptide_step_tokens_total", { replica, class: "online" })),
    short(rate(before, now, "neaptide_step_tokens_total", { replica, class: "offline" })),
    short(sum(now.samples, "neaptide_cluster_requests_total", { replica })),
    short(sum(now.samples, "neaptide_cluster_lost_requests_total", { replica })),
  ])));
}

function say(text, bad) {
  const state = at("state");
  if (state.textContent !== text) state.textContent = text;
  state.className = bad ? "bad" : "";
}

function showShadow(samples) {
  const known = (name, labels) => Number.isNaN(sum(samples, name, labels)) ? null : sum(samples, name, labels);
  const count = (value) => value === null ? "–" : short(value);
  const gain = (value) => value === null ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + short(Math.abs(value));
  if (replicasOf(samples).length > 0) {
    at("shadownote").textContent = "Each replica replays its own traffic; see its own page.";
    return;
  }
  const length = sum(samples, "neaptide_shadow_window_seconds");
  const rows = length > 0 ? OTHERS.map((policy) => {
    const won = known("neaptide_shadow_won_offline_tokens", { policy });
    return row([
      `simulated: ${policy}`,
      percent(known("neaptide_shadow_attainment_ratio", { policy })),
      gain(known("neaptide_shadow_saved_targets", { policy })),
      count(known("neaptide_shadow_offline_tokens_per_second", { policy })),
      gain(won === null ? null : won / length),
    ]);
  }) : [];
  if (length > 0) rows.unshift(row([
    "this server",
    percent(known("neaptide_shadow_real_attainment_ratio")),
    "",
    count(known("neaptide_shadow_real_offline_tokens_per_second")),
    "",
  ]));
  at("shadow").replaceChildren(...rows);
  at("shadownote").textContent = length > 0 ?
    `${duration(length)} of this server's own traffic with ${short(sum(samples, "neaptide_shadow_requests"))} online requests, ` +
    `replayed under vLLM's schedulers; it ended ${duration(sum(samples, "neaptide_shadow_age_seconds"))} ago.` :
    samples.has("neaptide_shadow_window_seconds") ?
      "Waiting for traffic: after a few minutes it is replayed under vLLM's schedulers." : "Off (--shadow).";
}

function batchRow(batch) {
  const counts = batch.request_counts, ended = counts.completed + counts.failed, seen = batch.neaptide;
  const bar = made("progress");
  bar.max = Math.max(1, counts.total);
  bar.value = ended;
  bar.setAttribute("aria-label", `${ended} of ${counts.total} lines`);
  let takes = "–", slack = "–", outlook = made("span", "–");
  if (seen && seen.waits_for) {
    outlook = made("span", "waiting", "at_risk");
    outlook.title = seen.waits_for;
  } else if (seen) {
    const latest = seen.expected_seconds === null ? null : Math.max(seen.expected_seconds, seen.needed_seconds);
    takes = duration(seen.needed_seconds) + " to " + (latest === null ? "?" : duration(latest));
    slack = duration(seen.left_seconds - (latest === null ? seen.needed_seconds : latest));
    outlook = made("span", seen.outlook.replace("_", " "), seen.outlook);
  }
  return row([batch.id.slice(0, 18), batch.status, bar, `${short(ended)} of ${short(counts.total)}`, takes, slack, outlook]);
}

async function showBatches() {
  if (locked) return;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const reply = await fetch(`v1/batches?limit=${SHOWN_BATCHES}`, { headers, signal: AbortSignal.timeout(ANSWER_MS) });
  locked = reply.status === 401;
  at("key").hidden = !locked;
  if (!reply.ok) {
    at("batches").replaceChildren();
    at("note").textContent = locked ? "Unknown API key." : `Batches: HTTP ${reply.status}.`;
    return;
  }
  const list = await reply.json();
  at("batches").replaceChildren(...list.data.map(batchRow));
  at("note").textContent = list.data.length === 0 ? "No batches." :
    "Time left: at best – at the current rate. Slack: time to spare in the window." +
    (list.has_more ? ` Showing the latest ${SHOWN_BATCHES}.` : "");
}

async function refresh() {
  try {
    const reply = await fetch("metrics", { signal: AbortSignal.timeout(ANSWER_MS) });
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    remember({ s: Date.now() / 1000, samples: parse(await reply.text()) });
    showFigures();
    showReplicas();
    showPlots();
    showShadow(history[history.length - 1].samples);
    await showBatches();
  } catch (error) {
    say(`the server does not answer: ${error.message}`, true);
  }
  setTimeout(refresh, PERIOD_MS);
}

function answerOf(found) {
  const offline = found.offline_tokens_per_second, share = found.attainment;
  const replicas = found.replicas === null ? "more than were tried" : `${found.replicas}`;
  return `Of ${short(found.requests)} online requests ${percent(share.both)} meet both targets (TTFT ${percent(share.ttft)}, ` +
    `TPOT ${percent(share.tpot)}) on one replica` + (offline === null ? "" : `, with ${short(offline)} offline tokens/s`) +
    `. Replicas needed for 90%: ${replicas}. Based on ${found.recorded_seconds > 120 ? "the busiest two minutes of " : ""}${duration(found.recorded_seconds)} of traffic.`;
}

async function askWhatIf(form) {
  const note = at("whatifnote"), body = {};
  for (const [name, value] of new FormData(form)) if (value) body[name] = name === "profile" ? value : Number(value);
  const headers = { "Content-Type": "application/json" }, own = at("operatorkey").value;
  if (own) headers.Authorization = `Bearer ${own}`;
  note.textContent = "simulating ...";
  const reply = await fetch("admin/what-if", { method: "POST", headers, body: JSON.stringify(body) });
  const found = await reply.json();
  // No key field if the caller's address was refused: a server without keys accepts none.
  if (reply.status === 401 || found.error?.code === "admin_key_required") form.querySelector(".operator").hidden = false;
  note.textContent = reply.ok ? answerOf(found) : found.error.message;
}

at("whatif").addEventListener("submit", (event) => {
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  askWhatIf(event.target)
    .catch((error) => { at("whatifnote").textContent = `the server does not answer: ${error.message}`; })
    .finally(() => { button.disabled = false; });
});
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("keyfield").value;
  locked = false;
  showBatches().catch((error) => say(`the server does not answer: ${error.message}`, true));
});
refresh();
