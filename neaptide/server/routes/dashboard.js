// Display of the page. dashboard_figures.js, which precedes this in one script, has the texts.
const PERIOD_MS = 2000, ANSWER_MS = 8000, SHOWN_BATCHES = 20, SHOWN_LATE = 10;
const ICONS = { ok: "✓", info: "i", warn: "!", bad: "✕" };
const COLUMN = 480, GAP = 20, HEIGHT = 190, LEFT = 50, RIGHT = 8, TOP = 10, BOTTOM = 20;
const NARROWEST = 3;  // pixels of a time without an engine, which may be a second
const SVG = "http://www.w3.org/2000/svg";
let key = "", width = COLUMN, standstill = "";
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

// Cells are texts, elements, or [text, class]. Names are for narrow screens, where each cell says its own.
function row(cells, names = []) {
  const line = made("tr");
  cells.forEach((cell, k) => {
    const place = made("td");
    if (Array.isArray(cell)) [cell, place.className] = cell;
    if (names[k]) place.setAttribute("data-name", names[k]);
    place.append(cell);
    line.append(place);
  });
  return line;
}

function plot({ points, absences, at_s }, title, unit, series, { stacked = false, most = 0, target = null } = {}) {
  const times = points.start_s, count = times.length;
  let below = new Array(count).fill(0), highest = most || target * 1.2 || 0;
  const tops = series.map(({ ys, mark }) => {
    const top = stacked && !mark ? ys.map((y, k) => below[k] + (y || 0)) : ys;
    if (stacked && !mark) below = top;
    for (const y of top) if (y !== null && y > highest) highest = y;
    return top;
  });
  const caption = made("figcaption", title + " "), figure = made("figure");
  caption.append(made("span", unit));
  const isEmpty = isNothing(series.map(({ ys }) => ys), most);
  if (isEmpty || count < 2) {  // one point is no line
    figure.append(caption, made("p", isEmpty ? "Nothing in the last 15 minutes." : "Drawn from the second point on.", "empty"));
    return figure;
  }
  highest = most || roundUp(highest || 1);
  const span = Math.max(60, at_s - times[0]), middle = (times[1] - times[0]) / 2;
  const x = (s) => LEFT + (1 - (at_s - s) / span) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - Math.min(value, highest) / highest * (HEIGHT - TOP - BOTTOM);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${unit}, the last 15 minutes` });
  for (const share of [0, 0.5, 1]) {
    svg.append(drawn("path", { class: "grid", d: `M${LEFT} ${y(share * highest)}H${width - RIGHT}` }));
    svg.append(drawn("text", { x: LEFT - 5, y: y(share * highest) + 4, "text-anchor": "end" }, short(share * highest)));
  }
  svg.append(drawn("text", { x: LEFT, y: HEIGHT - 4 }, `−${duration(span)}`));
  svg.append(drawn("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  const away = absencesSince(absences, times[0], at_s);
  for (const [from, to] of away) {
    const left = Math.min(x(from), width - RIGHT - NARROWEST), wide = Math.max(x(to) - left, NARROWEST);
    svg.append(drawn("rect", { class: "away", x: left, y: TOP, width: wide, height: HEIGHT - TOP - BOTTOM }));
  }
  const isCut = (i) => away.some(([from, to]) => from < times[i] + middle && to > times[i - 1] + middle);
  let floor = new Array(count).fill(0);
  series.forEach(({ ys, mark }, k) => {
    const point = (i, value) => `${x(times[i] + middle).toFixed(1)} ${y(value).toFixed(1)}`;
    if (stacked && !mark) {
      const edge = (values, [from, to]) => values.slice(from, to).map((value, i) => point(from + i, value));
      const areas = stretches(ys, isCut).map((one) => `M${[...edge(tops[k], one), ...edge(floor, one).reverse()].join("L")}Z`);
      svg.append(drawn("path", { class: `area s${k}`, d: areas.join("") || "M0 0" }));
      floor = tops[k];
      return;
    }
    let path = "", pen = "M";
    tops[k].forEach((value, i) => {
      if (isCut(i)) pen = "M";
      path += value === null ? "" : pen + point(i, value) + (pen === "M" ? "h0" : "");
      pen = value === null ? "M" : "L";
    });
    svg.append(drawn("path", { class: mark ? "line mark" : `line s${k}`, d: path || "M0 0" }));
  });
  if (target) svg.append(drawn("path", { class: "line mark", d: `M${LEFT} ${y(target)}H${width - RIGHT}` }));
  const legend = made("div", undefined, "legend");
  const named = series.map(({ name, mark }, k) => [name, mark ? "mark" : `s${k}`]);
  if (target) named.push([`target ${short(target)}`, "mark"]);
  if (away.length > 0) named.push(["engine away", "away"]);
  for (const [name, style] of named) {
    const entry = made("span", undefined, style);
    entry.append(made("i"), name);
    legend.append(entry);
  }
  figure.append(caption, svg, legend);
  return figure;
}

// ---- the page ----

function showStatus(status, facts) {
  at("status").className = status.severity;
  at("icon").textContent = ICONS[status.severity];
  for (const [id, text] of [["sentence", status.sentence], ["cause", status.cause ? `Cause: ${status.cause}` : ""]])
    if (at(id).textContent !== text) at(id).textContent = text;
  if (facts !== undefined) at("facts").textContent = facts;
  document.title = status.severity === "bad" ? "✕ Neaptide" : "Neaptide";
}

function showLatencies(latencies) {
  at("latencies").querySelector("tbody").replaceChildren(...latencies.map(({ name, p50_s, p99_s, target_s, met }) => row([
    name, latency(target_s), ...[p50_s, p99_s].map((one) => [beside(one, target_s), one !== null && one > target_s ? "bad" : ""]),
    [percent(met), met !== null && met < 0.95 ? "bad" : ""],
  ])));
}

function showFigures({ now, latencies, pending_lines }) {
  const slow = now.speed !== null && now.speed < 0.8, ttft_s = latencies[0].target_s;
  const figures = [
    [short(now.online_tokens_per_s), "online tokens/s, 1 min"],
    [short(now.offline_tokens_per_s), "offline tokens/s, 1 min"],
    [`${now.running_online} + ${now.running_offline}`, "running, online + offline"],
    [`${now.waiting_online} + ${short(Math.max(now.waiting_offline, pending_lines - now.running_offline, 0))}`, "waiting, online + offline"],
    [now.oldest_silent_s ? latency(now.oldest_silent_s) : "–", "oldest chat without a token", now.oldest_silent_s > ttft_s],
    [`${now.errors} / ${now.refused}`, "errors / refused as full, 5 min", now.errors + now.refused > 0],
    [now.speed === null ? "–" : percent(now.speed), "of the calibrated speed, 5 min", slow],
    [short(now.preemptions), "preempted, 5 min"],
  ];
  at("figures").replaceChildren(...figures.map(([value, name, isBad]) => {
    const card = made("div");
    card.append(made("b", value, isBad ? "bad" : ""), made("span", name));
    return card;
  }));
}

function showTiers(tiers) {
  at("tiers").replaceChildren(...tiers.map((one) => row([
    one.tier, String(one.in_flight), percent(one.ttft_met), percent(one.tpot_met), short(one.ended),
  ])));
}

function showPlots(seen) {
  const { points, latencies } = seen;
  at("plots").hidden = at("plotsnote").hidden = !points.start_s;
  if (!points.start_s) return;
  const whole = at("plots").clientWidth;
  width = whole < 2 * COLUMN + GAP ? whole : (whole - GAP) / 2;  // like the columns of the style sheet, so that text keeps its size
  const times = (values, factor) => values.map((value) => value === null ? null : factor * value);
  const blocksOf = (state) => ({ name: state, ys: points[`blocks_${state}`] });
  const blocks = ["online", "offline", "cached"].map(blocksOf);
  const highest = Math.max(...points.blocks_online.map((_, k) => [...blocks, blocksOf("free")].reduce((sum, { ys }) => sum + (ys[k] || 0), 0)));
  const draw = (...rest) => plot(seen, ...rest);
  at("plots").replaceChildren(
    draw("TTFT", "ms", [{ name: "p50", ys: times(points.ttft_p50_s, 1000) }, { name: "p99", ys: times(points.ttft_p99_s, 1000) }],
      { target: 1000 * latencies[0].target_s }),
    draw("TPOT", "ms", [{ name: "p50", ys: times(points.tpot_p50_s, 1000) }, { name: "p99", ys: times(points.tpot_p99_s, 1000) }],
      { target: 1000 * latencies[1].target_s }),
    draw("Targets met", "%", [{ name: "TTFT", ys: times(points.ttft_met, 100) }, { name: "TPOT", ys: times(points.tpot_met, 100) }], { most: 100 }),
    draw("Tokens computed, by class", "tokens/s", [
      { name: "online", ys: points.online_tokens_per_s }, { name: "offline", ys: points.offline_tokens_per_s },
    ], { stacked: true }),
    draw("KV cache", "blocks", [...blocks, { name: "reserved for chats (forecast)", ys: points.blocks_reserved, mark: true }],
      { stacked: true, most: highest }),
    draw("Mean time of a step", "ms", [{ name: "predicted", ys: times(points.predicted_s, 1000) }, { name: "measured", ys: times(points.step_s, 1000) }]),
  );
}

const LATE_NAMES = ["", "tier", "TTFT", "TTFT target", "TPOT", "TPOT target", "request", "why"];

function showLate(late) {
  at("latetable").hidden = late.length === 0;
  at("late").replaceChildren(...late.slice(0, SHOWN_LATE).map((one) => {
    const first = one.ttft_s === null || one.ttft_s > one.ttft_slo_s ? "late" : "", later = one.tpot_s !== null && one.tpot_s > one.tpot_slo_s ? "late" : "";
    return row([
      new Date(1000 * one.at_s).toLocaleTimeString(), one.tier,
      [one.ttft_s === null ? "no token" : beside(one.ttft_s, one.ttft_slo_s), first], latency(one.ttft_slo_s),
      [beside(one.tpot_s, one.tpot_slo_s), later], latency(one.tpot_slo_s),
      one.request.slice(0, 12), one.why || (first || later ? "not known yet" : "it failed; why is not known yet"),
    ], LATE_NAMES);
  }));
  at("latenote").textContent = late.length === 0 ? "None since the server started." : "The command `neaptide why REQUEST` says more. In the log, engine_id is this name in full.";
}

function showReplicas(replicas) {
  at("cluster").hidden = !replicas;
  at("replicas").replaceChildren(...(replicas || []).map((one) => row([
    one.name, one.ready ? "yes" : "no", String(one.in_flight), latency(one.free_slack_s), [one.sentence, one.severity],
  ], ["", "accepts", "in flight", "slack", ""])));
}

function showComparison({ comparison, replays, replicas }) {
  at("shadowtable").hidden = !comparison;
  at("shadow").replaceChildren(...(comparison ? comparison.rows : []).map((one) => row([
    one.policy, `${one.met} of ${comparison.requests}`, short(one.offline_tokens_per_s),
  ])));
  at("shadownote").textContent = replicas ? "Each replica replays its own traffic; see its own page." :
    !replays ? "Off (--shadow)." : !comparison ?
      "None yet. It needs a minute with 20 chats or more, all of which have ended; that minute is replayed under vLLM's schedulers." :
      `${duration(comparison.window_s)} of this server's own traffic, replayed under vLLM's schedulers; it ended ${duration(comparison.age_s)} ago.`;
}

const BATCH_NAMES = ["", "status", "", "lines", "time left", "slack", "deadline"];

function batchRows(batch) {
  const counts = batch.request_counts, ended = counts.completed + counts.failed, seen = batch.neaptide;
  const bar = made("progress");
  bar.max = Math.max(1, counts.total);
  bar.value = ended;
  bar.setAttribute("aria-label", `${ended} of ${counts.total} lines`);
  let takes = "–", slack = "–", deadline = "–";
  if (seen && seen.outlook) {
    const latest = seen.expected_seconds === null ? null : Math.max(seen.expected_seconds, seen.needed_seconds);
    const best = duration(seen.needed_seconds), usual = latest === null ? "?" : duration(latest);
    takes = best === usual ? best : `${best} to ${usual}`;
    slack = duration(seen.left_seconds - (latest === null ? seen.needed_seconds : latest));
    deadline = made("span", seen.outlook.replace("_", " "), seen.outlook);
  }
  const why = reasonOf(batch, standstill), lines = counts.total ? `${short(ended)} of ${short(counts.total)}` : "–";
  const rows = [row([batch.id, batch.status.replace("_", " "), bar, lines, takes, slack, deadline], BATCH_NAMES)];
  if (why) {
    const reason = made("tr", undefined, "reason"), place = made("td", why);
    place.setAttribute("colspan", String(BATCH_NAMES.length));
    reason.append(place);
    rows[0].className = "reasoned";
    rows.push(reason);
  }
  return rows;
}

async function showBatches() {
  if (locked) return;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const reply = await fetch(`v1/batches?limit=${SHOWN_BATCHES}`, { headers, signal: AbortSignal.timeout(ANSWER_MS) });
  locked = reply.status === 401;
  at("key").hidden = !locked;
  if (!reply.ok) {
    at("batches").replaceChildren();
    at("batchtable").hidden = true;
    at("note").textContent = locked ? "Unknown API key." : `Batches cannot be shown: HTTP ${reply.status}.`;
    return;
  }
  const list = await reply.json();
  at("batchtable").hidden = list.data.length === 0;
  at("batches").replaceChildren(...list.data.flatMap(batchRows));
  at("note").textContent = list.data.length === 0 ? "No batches." :
    "Time left: with the whole machine, and at the current rate. Slack: time to spare in the window." +
    (list.has_more ? ` Showing the latest ${SHOWN_BATCHES}.` : "");
}

async function refresh() {
  try {
    const reply = await fetch("dashboard/data", { signal: AbortSignal.timeout(ANSWER_MS) });
    if (!reply.ok) throw new Error(`HTTP ${reply.status}`);
    const seen = await reply.json();
    showStatus(seen.status, factsOf(seen.facts, seen.at_s));
    standstill = seen.standstill;
    at("standstill").hidden = !standstill;
    at("standstill").textContent = standstill && `Batch work stands still: ${standstill}.`;
    showLatencies(seen.latencies);
    showFigures(seen);
    showTiers(seen.tiers);
    showPlots(seen);
    showLate(seen.late);
    showReplicas(seen.replicas);
    showComparison(seen);
    await showBatches();
  } catch (error) {
    const old = at("figures").children.length === 0 ? "" : " The figures below are old.";
    const cause = error.name === "TimeoutError" ? `no answer within ${ANSWER_MS / 1000} s` : error.message;
    showStatus({ severity: "bad", sentence: `The server does not answer.${old}`, cause });
  }
  setTimeout(refresh, PERIOD_MS);
}

// ---- what if ----

function showAnswer(found) {
  const today = found.today, rows = [
    ["met both targets", percent(today.attainment.both), percent(found.attainment.both)],
    ["met TTFT", percent(today.attainment.ttft), percent(found.attainment.ttft)],
    ["met TPOT", percent(today.attainment.tpot), percent(found.attainment.tpot)],
    ["online requests", short(today.requests), short(found.requests)],
    ["offline tokens/s", short(today.offline_tokens_per_second), short(found.offline_tokens_per_second)],
    ["replicas needed for 90%", "", found.replicas === null ? "more than were tried" : String(found.replicas)],
  ];
  at("whatifrows").replaceChildren(...rows.map((cells) => row(cells)));
  at("whatiftable").hidden = false;
  return `Both columns are simulations of ${found.recorded_seconds > 120 ? "the busiest two minutes of " : ""}${duration(found.recorded_seconds)} of traffic.`;
}

async function askWhatIf(form, signal) {
  const body = {};
  for (const [name, value] of new FormData(form)) if (value) body[name] = name === "profile" ? value : Number(value);
  const headers = { "Content-Type": "application/json" }, own = at("operatorkey").value;
  if (own) headers.Authorization = `Bearer ${own}`;
  const reply = await fetch("admin/what-if", { method: "POST", headers, body: JSON.stringify(body), signal });
  const found = await reply.json();
  // No key field if the caller's address was refused: a server without keys accepts none.
  if (reply.status === 401 || found.error?.code === "admin_key_required") form.querySelector(".operator").hidden = false;
  return reply.ok ? showAnswer(found) : found.error.message;
}

function ask(form) {
  const began = Date.now(), control = new AbortController(), note = at("whatifnote");
  const tick = () => { note.textContent = `Simulating at low priority, for ${duration((Date.now() - began) / 1000)}. It may take up to 5 min.`; };
  const ticking = setInterval(tick, 1000);
  tick();
  at("whatiftable").hidden = at("ask").disabled = true;
  at("cancel").hidden = false;
  at("cancel").onclick = () => control.abort();
  askWhatIf(form, control.signal)
    .catch((error) => error.name === "AbortError" ? "Cancelled." : `The server does not answer: ${error.message}`)
    .then((text) => {
      clearInterval(ticking);
      note.textContent = text;
      at("ask").disabled = false;
      at("cancel").hidden = true;
    });
}

at("whatif").addEventListener("submit", (event) => {
  event.preventDefault();
  ask(event.target);
});
at("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("keyfield").value;
  locked = false;
  showBatches().catch((error) => { at("note").textContent = `The server does not answer: ${error.message}`; });
});
refresh();
