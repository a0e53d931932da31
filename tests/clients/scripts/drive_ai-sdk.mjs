// Runs beside the packages of `ai`: one scenario a run; what it saw is printed as JSON.
import { createOpenAI } from "@ai-sdk/openai";
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
};

console.log(JSON.stringify(await scenarios[scenario]()));
