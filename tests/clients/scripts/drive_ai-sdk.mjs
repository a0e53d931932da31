// Runs beside the packages of `ai`: one scenario a run; what it saw is printed as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [scenario, baseURL] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const byDefault = openai("neaptide-tiny"); // asks /v1/responses
const chat = openai.chat("neaptide-tiny");
const options = { temperature: 0, maxOutputTokens: 300, maxRetries: 0 };
const Side = z.object({ side: z.enum(["left", "right"]), steps: z.number().int().min(0).max(9) });
const question = "What is 21 + 34?";

async function object(model) {
  return (await generateObject({ model, schema: Side, prompt: question, ...options })).object;
}

async function twoTurns(model) {
  const asked = [];
  const get_weather = tool({
    inputSchema: z.object({ city: z.enum(["paris", "rome"]) }),
    execute: async ({ city }) => {
      asked.push(city);
      return "sunny";
    },
  });
  const prompt = "What is the weather in paris?";
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const tools = { get_weather };
  const reply = await generateText({ model, tools, prompt, prepareStep, stopWhen: stepCountIs(2), ...options });
  return { text: reply.text, asked, steps: reply.steps.length };
}

const questions = ["Do I need an umbrella in Cologne?", "And in Rome?"];
const weather = { Cologne: "rain", Rome: "sun" };

// Two questions, with the messages that the SDK itself adds; then the last request once more as a batch.
async function conversation(isChat, isStreamed) {
  const sent = [];
  const recording = (url, init) => {
    sent.push({ url: new URL(url).pathname, body: JSON.parse(init.body) });
    return fetch(url, init);
  };
  const provider = isChat
    ? createOpenAICompatible({ name: "neaptide", baseURL, apiKey: "none", fetch: recording })
    : createOpenAI({ baseURL, apiKey: "none", fetch: recording });
  const cities = [];
  const get_weather = tool({
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return weather[city];
    },
  });
  const seen = { answers: [], cities, thoughts: [] };
  const messages = [];
  for (const question of questions) {
    messages.push({ role: "user", content: question });
    // The server stores no items: the SDK must send them whole, and reasoning in the form that it sends back.
    const providerOptions = { openai: { store: false, include: ["reasoning.encrypted_content"] } };
    const asked = { providerOptions, model: provider("neaptide-tiny"), tools: { get_weather }, messages, stopWhen: stepCountIs(3), maxRetries: 0 };
    const reply = isStreamed ? streamText(asked) : await generateText(asked);
    if (isStreamed) await reply.consumeStream();
    seen.answers.push(await reply.text);
    for (const step of await reply.steps) if (step.reasoningText) seen.thoughts.push(step.reasoningText);
    messages.push(...(await reply.response).messages);
  }
  return { ...seen, batch: saidIn(await answerOfBatch(sent.at(-1))) };
}

async function answerOfBatch({ url, body }) {
  const { stream, stream_options, ...rest } = body;
  const line = JSON.stringify({ custom_id: "only", method: "POST", url, body: rest });
  const form = new FormData();
  form.set("purpose", "batch");
  form.set("file", new Blob([line]), "lines.jsonl");
  const upload = await (await fetch(`${baseURL}/files`, { method: "POST", body: form })).json();
  const asked = { input_file_id: upload.id, endpoint: url, completion_window: "24h" };
  const headers = { "content-type": "application/json" };
  let batch = await (await fetch(`${baseURL}/batches`, { method: "POST", headers, body: JSON.stringify(asked) })).json();
  while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await (await fetch(`${baseURL}/batches/${batch.id}`)).json();
  }
  const output = await (await fetch(`${baseURL}/files/${batch.output_file_id}/content`)).text();
  return JSON.parse(output).response.body;
}

function saidIn(answer) {
  const message = answer.choices?.[0].message;
  if (message) return [message.reasoning_content, message.content];
  return answer.output.flatMap((item) => item.content.map((part) => part.text));
}

const scenarios = {
  text: async () => ({ text: (await generateText({ model: byDefault, prompt: question, ...options })).text }),
  stream: async () => {
    const texts = [];
    for await (const text of streamText({ model: byDefault, prompt: question, ...options }).textStream) {
      texts.push(text);
    }
    return { texts };
  },
  object: () => object(byDefault),
  object_chat: () => object(chat),
  two_turns: () => twoTurns(byDefault),
  two_turns_chat: () => twoTurns(chat),
  conversation: () => conversation(false, false),
  conversation_stream: () => conversation(false, true),
  conversation_chat: () => conversation(true, false),
  conversation_chat_stream: () => conversation(true, true),
};

console.log(JSON.stringify(await scenarios[scenario]()));
