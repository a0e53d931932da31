"use strict";
// Texts of the page. Nothing here changes the page; the server has computed the figures.
const percent = (share) => share === null ? "–" : (100 * share).toFixed(share > 0.995 && share < 1 ? 2 : 1) + "%";

function latency(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.9995) return Number((1000 * seconds).toPrecision(seconds < 0.01 ? 2 : 3)) + " ms";
  return seconds < 120 ? Number(seconds.toPrecision(3)) + " s" : duration(seconds);
}

// A latency beside its target: one that is above it does not look like it.
function beside(seconds, target_s) {
  const text = latency(seconds);
  return seconds !== null && seconds > target_s && text === latency(target_s) ? `over ${text}` : text;
}

function short(value) {
  if (value === null || value === undefined) return "–";
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

// Stretches of values that are known: the index of the first, and that after the last. isCut: one begins at this index.
function stretches(values, isCut = () => false) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i > 0 && values[i - 1] !== null && !isCut(i)) found[found.length - 1][1] = i + 1;
    else found.push([i, i + 1]);
  });
  return found;
}

// Times without an engine, as [from, to] within the plot; one that lasts ends now.
function absencesSince(absences, first_s, at_s) {
  return absences.map(({ start_s, end_s }) => [Math.max(start_s, first_s), end_s ?? at_s]).filter(([, to]) => to > first_s);
}

// Whether there is nothing to draw. Where the axis has an end of its own, as shares have, a zero is a value.
function isNothing(lines, most) {
  return lines.every((ys) => ys.every((y) => most ? y === null : !y));
}

// The top of an axis: a round number at or above the value.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((top) => top >= value * 0.999);
}

function factsOf(facts, at_s) {
  const where = [facts.device, facts.dtype].filter(Boolean).join(" "), words = [facts.model];
  if (where) words.push(where);
  if (facts.policy) words.push(`policy ${facts.policy}`);
  words.push(`version ${facts.version}`);
  if (facts.started_s) words.push(`up ${duration(at_s - facts.started_s)}`);
  words.push(`updated ${new Date(1000 * at_s).toLocaleTimeString()}`);
  return words.join(" · ");
}

// Why a batch is where it is, in a sentence; empty if there is nothing to say.
function reasonOf(batch, standstill) {
  const errors = batch.errors?.data ?? [];
  if (errors.length > 0) {
    const first = errors[0], line = first.line ? `line ${first.line}: ` : "";
    return `Failed: ${line}${first.message}` + (errors.length > 1 ? ` (and ${errors.length - 1} more)` : "");
  }
  if (batch.neaptide?.waits_for) return `Waiting: ${batch.neaptide.waits_for}`;
  if (batch.status === "in_progress" && standstill) return `Waiting: ${standstill}.`;
  if (batch.status === "expired") return "Its completion window ended before its lines.";
  const counts = batch.request_counts;
  if (batch.status === "completed" && counts.failed > 0)
    return `${short(counts.failed)} of ${short(counts.total)} lines failed; the error file says why.`;
  return "";
}
