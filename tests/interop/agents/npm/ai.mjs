// The `ai` package of npm (Vercel's AI SDK), on Responses (the default of @ai-sdk/openai) and on chat completions.
// Called, and answering, as checks.py says: one argument of JSON, one line of JSON at the end.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const QUESTION = "What is the weather in Lyon?";
const WEATHER = "Sunny, 25 C";
const LIMITS = { maxRetries: 0, maxOutputTokens: 150, temperature: 0 };
const place = JSON.parse(process.argv[2]);
const City = z.object({ name: z.string().max(20), is_sunny: z.boolean() });

const openai = createOpenAI({ baseURL: `${place.url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "pdmesh", baseURL: `${place.url}/v1`, supportsStructuredOutputs: true });
const responses = openai(place.model);
const chats = { openai: openai.chat(place.model), compatible: compatible(place.model) };
// One call at a time: a small model that must call would call until the limit. The name of the compatible provider is the key of
// what it puts into bodies as it is.
const ONE_CALL = { openai: { parallelToolCalls: false }, pdmesh: { parallel_tool_calls: false } };
const kept = { providerOptions: ONE_CALL };
const unkept = { providerOptions: { ...ONE_CALL, openai: { ...ONE_CALL.openai, store: false } } };

function require(isRight, what) {
  if (!isRight) throw new Error(`${what}`.slice(0, 400));
}

// A tool that is called in the first step, and an answer in the second one.
function loop(calls) {
  const weather = tool({
    description: "Tells the weather of a city.",
    inputSchema: z.object({ city: z.string().max(20) }),
    execute: async ({ city }) => {
      calls.push(city);
      return WEATHER;
    },
  });
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  return { ...LIMITS, prompt: QUESTION, tools: { weather }, stopWhen: stepCountIs(3), prepareStep };
}

function checkLoop(calls, steps, text) {
  require(calls.length === 1 && steps.length === 2 && text, `called ${JSON.stringify(calls)} in ${steps.length} steps, ${text}`);
  require(steps[0].toolResults[0].output === WEATHER, `results ${JSON.stringify(steps[0].toolResults)}`);
  return `called with ${JSON.stringify(calls[0])}, answer ${JSON.stringify(text)}`;
}

async function whole(model, more = kept) {
  const calls = [];
  const done = await generateText({ model, ...loop(calls), ...more });
  return checkLoop(calls, done.steps, done.text);
}

async function streamed(model, more = kept) {
  const calls = [];
  const problems = [];
  const stream = streamText({ model, ...loop(calls), ...more, onError: ({ error }) => problems.push(error) });
  let numPieces = 0;
  for await (const part of stream.fullStream) numPieces += part.type === "text-delta" ? 1 : 0;
  if (problems.length) throw problems[0];
  const [steps, text] = [await stream.steps, await stream.text];
  require(numPieces > 1, `${numPieces} pieces of text`);
  return `${numPieces} pieces, ${checkLoop(calls, steps, text)}`;
}

async function nextTurn(model, more = kept) {
  const calls = [];
  const first = await generateText({ model, ...loop(calls), ...more });
  const messages = [{ role: "user", content: QUESTION }, ...first.response.messages, { role: "user", content: "And in Rome?" }];
  const done = await generateText({ model, ...LIMITS, ...more, messages });
  require(done.text, "no answer");
  return JSON.stringify(done.text);
}

async function typed(model, more = kept) {
  const options = { model, ...LIMITS, ...more, schema: City, prompt: "Lyon is sunny." };
  const { object } = await generateObject(options);
  const stream = streamObject(options);
  for await (const partial of stream.partialObjectStream) require(typeof partial === "object", `partial ${partial}`);
  const again = await stream.object;
  require(City.safeParse(object).success && City.safeParse(again).success, JSON.stringify([object, again]));
  return JSON.stringify([object, again]);
}

async function onChats(check) {
  const got = [];
  for (const [name, model] of Object.entries(chats)) got.push(`${name}: ${await check(model)}`);
  return got.join("; ");
}

const CHECKS = {
  "chat: generateText, a loop of two steps": () => onChats(whole),
  "chat: streamText, a loop of two steps": () => onChats(streamed),
  "chat: generateObject and streamObject": () => onChats(typed),
  "responses that are kept: generateText, a loop of two steps, and another turn": async () =>
    `${await whole(responses)}; ${await nextTurn(responses)}`,
  "responses that are kept: streamText, a loop of two steps": () => streamed(responses),
  "responses with store: false: both loops, and another turn": async () =>
    `${await whole(responses, unkept)}; ${await streamed(responses, unkept)}; ${await nextTurn(responses, unkept)}`,
  "responses: generateObject and streamObject": () => typed(responses),
};

async function done(asked, check) {
  try {
    return { asked, got: (await check()).slice(0, 160), problem: "" };
  } catch (error) {
    return { asked, got: "", problem: `${error.name}: ${error.message}`.slice(0, 500) };
  }
}

const rows = [];
for (const [asked, check] of Object.entries(CHECKS)) rows.push(await done(asked, check));
console.log(JSON.stringify(rows));
process.exit(0);
