"use strict";
// Runs the page's script, which comes on standard input, without a page: its functions are called with samples of ours.
const assert = require("node:assert/strict"), fs = require("node:fs"), vm = require("node:vm");

const elements = new Map();
function element() {
  return { hidden: true, textContent: "", className: "", value: "", clientWidth: 900, addEventListener() {},
    append() {}, setAttribute() {}, replaceChildren(...children) { this.children = children; } };
}
const asked = [];
let now = 0, page = "", isFrozen = false;
const context = {
  document: {
    getElementById: (id) => elements.get(id) || elements.set(id, element()).get(id),
    createElement: element, createElementNS: element,
  },
  Date: { now: () => 1000 * now },
  AbortSignal: { timeout: (ms) => ({ ms }) },
  FormData: class { * [Symbol.iterator]() {} },
  setTimeout() {},
  fetch: async (path, options) => {
    asked.push([path, options]);
    if (isFrozen && options?.signal) throw new Error("signal timed out");
    return { ok: path === "metrics", status: 500, text: async () => page };
  },
};
vm.createContext(context);
const own = ["parse", "sum", "attained", "mean", "rate", "remember", "history", "stateOf", "firstWithin", "shortlyBefore", "percent", "refresh"];
vm.runInContext(`${fs.readFileSync(0, "utf8")}\nglobalThis.own = { ${own.join(", ")} };`, context);
const f = context.own;

const TTFT = 'tier="default",slo="ttft"';
function counted(met, missed, more = "") {
  return `neaptide_slo_attained_total{${TTFT}} ${met}\nneaptide_slo_violated_total{${TTFT}} ${missed}\n${more}`;
}
function saw(s, text) {
  f.remember({ s, samples: f.parse(text) });
}
function shareShown() {
  return f.percent(f.attained(f.history[0], f.history[f.history.length - 1], { tier: "default", slo: "ttft" }));
}
function afresh() {
  f.history.length = 0;
}

const cases = {
  "met is what was met, of all"() {
    afresh();
    saw(0, counted(100, 50));
    saw(2, counted(190, 60));
    assert.equal(shareShown(), "90.0%");
    assert.equal(f.rate(f.history[0], f.history[1], "neaptide_slo_attained_total", {}), 45);
  },
  "without any there is no share"() {
    afresh();
    saw(0, counted(7, 3));
    saw(2, counted(7, 3));
    assert.equal(shareShown(), "–");
  },
  "a mean is of what came since"() {
    afresh();
    saw(0, "neaptide_step_seconds_sum 5\nneaptide_step_seconds_count 10\n");
    saw(2, "neaptide_step_seconds_sum 8\nneaptide_step_seconds_count 20\n");
    const [a, b] = f.history;
    assert.equal(f.mean(a, b, "neaptide_step_seconds_sum", {}, "neaptide_step_seconds_count", {}), 0.3);
  },
  "no difference reaches over a restart that a counter tells"() {
    afresh();
    saw(0, counted(1000, 5));
    saw(60, counted(0, 0));
    saw(120, counted(95, 25));
    assert.equal(f.history.length, 2);
    assert.equal(shareShown(), "79.2%");
  },
  "nor over one that only the start of the process tells"() {
    afresh();
    saw(0, counted(10, 100, "process_start_time_seconds 1.5e+09\n"));
    saw(2, counted(200, 190, "process_start_time_seconds 1.6e+09\n"));
    saw(4, counted(400, 280, "process_start_time_seconds 1.6e+09\n"));
    assert.equal(shareShown(), f.percent(200 / 290));
  },
  "nor over one of a replica that was away meanwhile"() {
    const of = (name, met) => `neaptide_slo_attained_total{replica="${name}",${TTFT}} ${met}\n`;
    afresh();
    saw(0, of("a", 50) + of("b", 500));
    saw(2, of("a", 60));
    saw(4, of("a", 70) + of("b", 3));
    assert.equal(f.history.length, 1);
  },
  "what a replica has counted before it answers again is not new"() {
    const of = (name, met) => `neaptide_slo_attained_total{replica="${name}",${TTFT}} ${met}\n`;
    afresh();
    saw(0, of("a", 50));
    saw(2, of("a", 60) + of("b", 500));
    assert.equal(f.rate(f.history[0], f.history[1], "neaptide_slo_attained_total", {}), 5);
  },
  "a page in the background keeps five minutes, too"() {
    afresh();
    for (let k = 0; k < 30; k++) saw(60 * k, counted(k, 0));
    assert.equal(f.history[0].s, 60 * 29 - 300);
    assert.equal(f.firstWithin(5, 30), f.history[5]);
    assert.equal(f.shortlyBefore(), f.history[4]);
  },
  "a share of the last half minute is of that"() {
    afresh();
    for (let k = 0; k < 60; k++) saw(2 * k, counted(k, 0));
    assert.equal(f.firstWithin(59, 30).s, 2 * 59 - 30);
    assert.equal(f.shortlyBefore().s, 2 * 59 - 10);
  },
  "the word for the state is the engine's"() {
    const state = (up, starts, age, more = "") => [...f.stateOf(f.parse(
      `neaptide_engine_up ${up}\nneaptide_engine_starts_total ${starts}\nneaptide_engine_state_age_seconds ${age}\n${more}`))];
    assert.deepEqual(state(1, 1, 0.2), ["serving", false]);
    assert.deepEqual(state(0, 0, 40), ["the engine has been starting for 40 s", false]);
    assert.deepEqual(state(0, 1, 180), ["the engine has been down for 3.0 min; it is restarting", true]);
    assert.deepEqual(state(1, 2, 12), ["serving; the engine has been silent for 12 s", false]);
    assert.deepEqual(state(1, 1, 0, "neaptide_besteffort_paused 1\n"), ["offline work is paused by the operator", false]);
    assert.deepEqual(state(1, 1, 0, "neaptide_storage_failing 1\n"), ["serving; batch data cannot be stored", true]);
    assert.deepEqual([...f.stateOf(f.parse("neaptide_cluster_replicas 0\n"))], ["no replica answers", true]);
    const two = ["a", "b"].map((name, k) =>
      `neaptide_engine_up{replica="${name}"} ${k}\nneaptide_engine_state_age_seconds{replica="${name}"} 1\n`).join("");
    assert.deepEqual([...f.stateOf(f.parse(two))], ["serving; 1 of 2 engines are up", false]);
  },
  async "a server that does not answer in time is none that serves"() {
    afresh();
    page = "neaptide_engine_up 1\nneaptide_engine_starts_total 1\nneaptide_engine_state_age_seconds 0\n";
    await f.refresh();
    assert.equal(elements.get("state").textContent, "serving");
    assert.ok(asked.length > 1 && asked.every(([, options]) => options.signal.ms <= 10_000));
    isFrozen = true;
    now += 10;
    await f.refresh();
    assert.match(elements.get("state").textContent, /does not answer/);
    assert.equal(elements.get("state").className, "bad");
    isFrozen = false;
  },
};

(async () => {
  await new Promise(setImmediate);  // the page's own first question
  for (const [name, run] of Object.entries(cases)) {
    try {
      await run();
    } catch (error) {
      error.message = `${name}: ${error.message}`;
      throw error;
    }
  }
})();
