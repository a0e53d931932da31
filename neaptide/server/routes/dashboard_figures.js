"use strict";
// Data of the page: samples of /metrics, their differences, and texts. Nothing here changes the page.
const KEPT_S = 300, SHARE_S = 30, RATE_S = 10;
const SILENT_S = 5;  // an engine reports twice a second, or after a step
const NONE = new Map();
const history = [];  // samples since the server's start, at most of the last five minutes

function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^(neaptide_\w+|process_start_time_seconds)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!found.has(match[1])) found.set(match[1], new Map());
    found.get(match[1]).set(match[2] || "", [labels, Number(match[3])]);
  }
  return found;
}

const matches = (own, labels) => Object.entries(labels).every(([k, v]) => own[k] === v);
const valuesOf = (samples, name) => [...(samples.get(name) || NONE).values()];

function sum(samples, name, labels = {}) {
  let total = 0;
  for (const [own, value] of valuesOf(samples, name)) if (matches(own, labels)) total += value;
  return total;
}

// A new series, of a replica that answers again, counts from its first sample.
function grown(before, now, name, labels = {}) {
  const then = before.samples.get(name) || NONE;
  let total = 0;
  for (const [key, [own, value]] of now.samples.get(name) || NONE)
    if (then.has(key) && matches(own, labels)) total += value - then.get(key)[1];
  return total;
}

// A restarted server counts from zero, so no difference may span a restart.
function isAnew(before, now) {
  for (const [name, series] of now.samples) {
    const isStart = name === "process_start_time_seconds";
    if (!isStart && !/_(total|count)$/.test(name)) continue;
    const then = before.samples.get(name) || NONE;
    for (const [key, [, value]] of series)
      if (then.has(key) && (isStart ? value !== then.get(key)[1] : value < then.get(key)[1])) return true;
  }
  return now.s < before.s;
}

function remember(sample) {
  // Compares with all samples, because a restarted replica has none in between.
  if (history.some((one) => isAnew(one, sample))) history.length = 0;
  history.push(sample);
  while (history[0].s < sample.s - KEPT_S) history.shift();  // a page in the background refreshes more rarely
}

// The first sample of the last ``seconds`` before the k-th.
function firstWithin(k, seconds) {
  let first = k;
  while (first > 0 && history[first - 1].s >= history[k].s - seconds) first--;
  return history[first];
}

// Start of the interval for current rates; longer if there is no recent sample.
function shortlyBefore() {
  const last = history.length - 1, first = firstWithin(last, RATE_S);
  return first === history[last] && last > 0 ? history[last - 1] : first;
}

function rate(before, now, name, labels) {
  return grown(before, now, name, labels) / Math.max(0.001, now.s - before.s);
}

function attained(before, now, labels) {
  const met = grown(before, now, "neaptide_slo_attained_total", labels);
  const missed = grown(before, now, "neaptide_slo_violated_total", labels);
  return met + missed > 0 ? met / (met + missed) : null;
}

function mean(before, now, total, totalLabels, count, countLabels) {
  const n = grown(before, now, count, countLabels);
  return n > 0 ? grown(before, now, total, totalLabels) / n : null;
}

// ---- texts ----

const percent = (share) => share === null ? "–" : (100 * share).toFixed(share > 0.995 && share < 1 ? 2 : 1) + "%";
const ms = (seconds) => seconds === null ? "–" : (1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0) + " ms";

function short(value) {
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + unit;
  return String(Number(value.toPrecision(3)));
}

function duration(seconds) {
  const size = Math.abs(seconds), sign = seconds < 0 ? "−" : "";
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (size >= 2 * length) return sign + (size / length).toFixed(1) + " " + unit;
  return sign + size.toFixed(0) + " s";
}

// The state as a text, and whether it is bad. A gateway has several engines.
function stateOf(samples) {
  const ages = valuesOf(samples, "neaptide_engine_state_age_seconds").map(([, age]) => age), age = Math.min(...ages);
  const up = sum(samples, "neaptide_engine_up");
  if (ages.length === 0) return ["no replica answers", true];
  if (up === 0 && sum(samples, "neaptide_engine_starts_total") === 0) return [`the engine has been starting for ${duration(age)}`, false];
  if (up === 0) return [`the engine has been down for ${duration(age)}; it is restarting`, true];
  const words = [sum(samples, "neaptide_besteffort_paused") > 0 ? "offline work is paused by the operator" : "serving"];
  if (up < ages.length) words.push(`${up} of ${ages.length} engines are up`);
  if (age > SILENT_S) words.push(`the engine has been silent for ${duration(age)}`);
  const failing = sum(samples, "neaptide_storage_failing") > 0;
  if (failing) words.push("batch data cannot be stored");
  return [words.join("; "), failing];
}
