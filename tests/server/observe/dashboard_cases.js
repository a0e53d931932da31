"use strict";
// Runs the page's script, which comes on standard input, without a page: its functions are called with data of ours.
const assert = require("node:assert/strict"), fs = require("node:fs"), vm = require("node:vm");

const elements = new Map();
function element() {
  return { hidden: true, textContent: "", className: "", value: "", clientWidth: 900, children: [], addEventListener() {},
    append(...more) { this.children.push(...more); }, setAttribute(name, value) { this[name] = value; },
    querySelector() { return element(); },
    replaceChildren(...children) { this.children = children; } };
}
const asked = [];
let isFrozen = false, seen = null, unanswered = "";
const context = {
  document: {
    getElementById: (id) => elements.get(id) || elements.set(id, element()).get(id),
    createElement: element, createElementNS: element,
  },
  Date, AbortSignal: { timeout: (ms) => ({ ms }) },
  FormData: class { * [Symbol.iterator]() {} },
  setTimeout() {}, setInterval() {}, clearInterval() {},
  fetch: async (path, options) => {
    asked.push([path, options]);
    if (isFrozen) throw Object.assign(new Error("signal timed out"), { name: "TimeoutError" });
    return { ok: path === "dashboard/data", status: 500, json: async () => seen };
  },
};
vm.createContext(context);
const own = ["percent", "latency", "beside", "short", "duration", "roundUp", "stretches", "isNothing", "factsOf", "reasonOf", "batchRows", "plot", "refresh"];
vm.runInContext(`${fs.readFileSync(0, "utf8")}\nglobalThis.own = { ${own.join(", ")} };`, context);
const f = context.own;

const BATCH = { id: "batch_1", status: "in_progress", errors: null, neaptide: null,
  request_counts: { total: 600, completed: 0, failed: 0 } };

const cases = {
  "a share is never rounded to all or nothing"() {
    assert.deepEqual([null, 0, 0.5, 0.9995, 1].map(f.percent), ["–", "0.0%", "50.0%", "99.95%", "100.0%"]);
  },
  "a latency has its unit"() {
    assert.deepEqual([null, 0.0042, 0.151, 2.048, 16, 180].map(f.latency), ["–", "4.2 ms", "151 ms", "2.05 s", "16 s", "3.0 min"]);
  },
  "a latency above its target does not look like it"() {
    assert.deepEqual([0.1004, 0.1, 0.118, null].map((one) => f.beside(one, 0.1)), ["over 100 ms", "100 ms", "118 ms", "–"]);
  },
  "a time says its unit and its sign"() {
    assert.deepEqual([59, 119, 7200, -180].map(f.duration), ["59 s", "119 s", "2.0 h", "−3.0 min"]);
  },
  "an axis ends at a round number"() {
    assert.deepEqual([0.7, 65536, 410, 1].map(f.roundUp).map((top) => Number(top.toPrecision(6))), [0.8, 80000, 500, 1]);
  },
  "the facts are one line"() {
    const facts = { model: "m", device: "cpu", dtype: "float32", policy: "neaptide", version: "1", started_s: 100 };
    assert.match(f.factsOf(facts, 400), /^m · cpu float32 · policy neaptide · version 1 · up 5.0 min · updated /);
    assert.match(f.factsOf({ model: "m", version: "1" }, 400), /^m · version 1 · updated /);
  },
  "a batch says why it failed or waits"() {
    const errors = { data: [{ line: 3, message: "Messages is required." }, { line: 4, message: "x" }] };
    assert.equal(f.reasonOf({ ...BATCH, errors }, ""), "Failed: line 3: Messages is required. (and 1 more)");
    assert.equal(f.reasonOf({ ...BATCH, errors: { data: [{ line: null, message: "Too many." }] } }, ""), "Failed: Too many.");
    assert.equal(f.reasonOf({ ...BATCH, neaptide: { waits_for: "No server serves m." } }, ""), "Waiting: No server serves m.");
    assert.equal(f.reasonOf(BATCH, "chats use the whole machine"), "Waiting: chats use the whole machine.");
    assert.equal(f.reasonOf(BATCH, ""), "");
    assert.equal(f.reasonOf({ ...BATCH, status: "completed", request_counts: { total: 9, failed: 2 } }, "x"),
      "2 of 9 lines failed; the error file says why.");
  },
  "time without an engine is a gap"() {
    assert.deepEqual([[null, 5, 0, null, null, 3], [null, null]].map((ys) => JSON.stringify(f.stretches(ys))), ["[[1,3],[5,6]]", "[]"]);
  },
  "time without an engine is marked, however short, until now if it lasts"() {
    const points = { start_s: [100, 115, 130] }, absences = [[90, 99], [90, 108], [117, 117.5], [140, null]];
    const seen = { points, absences: absences.map(([start_s, end_s]) => ({ start_s, end_s })), at_s: 160 };
    const [, svg, legend] = f.plot(seen, "TTFT", "ms", [{ name: "p50", ys: [1, null, 1] }], {}).children;
    const bands = svg.children.filter((one) => one.class === "away").map((one) => [one.x, one.width].map(Math.round));
    const place = (s) => 50 + (480 - 50 - 8) * (s - 100) / 60;  // the plot's inner width, for 60 s
    assert.deepEqual(JSON.stringify(bands), JSON.stringify([[50, 56], [Math.round(place(117)), 4], [331, 141]]));
    assert.equal(legend.children.at(-1).children.at(-1), "engine away");
    assert.equal(f.plot({ ...seen, absences: [] }, "TTFT", "ms", [{ name: "p50", ys: [1, null, 1] }], {}).children[2].children.length, 1);
  },
  "no line and no area crosses the time without an engine"() {
    const points = { start_s: [100, 115, 130, 145] }, absences = [{ start_s: 129, end_s: 130 }];
    const drawn = (stacked) => f.plot({ points, absences, at_s: 160 }, "TTFT", "ms", [{ name: "p50", ys: [1, 1, 1, 1] }], { stacked })
      .children[1].children.find((one) => /s0/.test(one.class)).d;
    assert.equal(drawn(false).split("M").length - 1, 2);
    assert.equal(drawn(true).split("Z").length - 1, 2);
  },
  "a reason is a row of its own"() {
    assert.equal(f.batchRows({ ...BATCH, neaptide: { outlook: null, waits_for: "No server." } }).length, 2);
    assert.equal(f.batchRows(BATCH).length, 1);
  },
  async "a server that does not answer in time is told first"() {
    seen = { at_s: 100, status: { severity: "ok", sentence: "Chats meet their targets.", cause: "" }, standstill: "",
      facts: { model: "m", version: "1" }, latencies: [{ name: "TTFT", target_s: 1 }, { name: "TPOT", target_s: 0.1 }].map(
        (one) => ({ ...one, p50_s: null, p99_s: null, met: null })),
      now: { oldest_silent_s: 0, speed: null, errors: 0, refused: 0, preemptions: 0 }, pending_lines: 0,
      tiers: [], points: {}, late: [], comparison: null, replays: false };
    await f.refresh();
    assert.equal(elements.get("sentence").textContent, "Chats meet their targets.");
    assert.equal(elements.get("status").className, "ok");
    assert.ok(asked.length > 1 && asked.every(([, options]) => options.signal.ms <= 10_000));
    isFrozen = true;
    await f.refresh();
    assert.equal(elements.get("sentence").textContent, "The server does not answer. The figures below are old.");
    assert.equal(elements.get("cause").textContent, "Cause: no answer within 8 s");
    assert.equal(elements.get("status").className, "bad");
  },
  "a page without figures does not call them old"() {
    assert.equal(unanswered, "The server does not answer.");
  },
  "shares of nothing are drawn, and no work is not"() {
    assert.equal(f.isNothing([[0, 0], [null, 0]], 100), false);
    assert.equal(f.isNothing([[null, null]], 100), true);
    assert.equal(f.isNothing([[0, null], [0, 0]], 0), true);
    assert.equal(f.isNothing([[0, 3]], 0), false);
  },
};

(async () => {
  isFrozen = true;
  await new Promise(setImmediate);  // the page's own first question
  isFrozen = false;
  unanswered = elements.get("sentence").textContent;
  for (const [name, run] of Object.entries(cases)) {
    try {
      await run();
    } catch (error) {
      error.message = `${name}: ${error.message}`;
      throw error;
    }
  }
})();
