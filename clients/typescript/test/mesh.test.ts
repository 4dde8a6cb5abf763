/**
 * The client against a real mesh of processes, whose addresses and control `python -m tests.clients` puts into the environment:
 * PDMESH_ROUTERS, two of them, and PDMESH_CONTROL, which kills processes of the mesh and says when all are ready again.
 */

import assert from "node:assert/strict";
import { test } from "node:test";
import { Client, DeadlineExceeded, InvalidArgument, NotFound, type Tool } from "../src/index.js";
import { generation } from "../src/wire.js";

const ROUTERS = process.env["PDMESH_ROUTERS"] ?? "";
const skip = ROUTERS === "" ? "PDMESH_ROUTERS is not set: run it by `make test-clients`" : false;
const PROMPT = "The capital of France is";
const OPTIONS = { temperature: 0.8, ignoreEos: true, timeoutMs: 100_000 };

async function control(path: string): Promise<void> {
  const answer = await fetch(`${process.env["PDMESH_CONTROL"]}/${path}`, { method: "POST" });
  assert.equal(answer.status, 200, await answer.text());
}

async function using<T>(use: (client: Client) => Promise<T>): Promise<T> {
  const client = new Client(ROUTERS);
  try {
    return await use(client);
  } finally {
    client.close();
  }
}

async function eventually(condition: () => Promise<boolean>): Promise<void> {
  for (let attempt = 0; !(await condition()); attempt += 1) {
    assert.ok(attempt < 500, "not within the time");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

test("generate: a seed repeats its tokens, whole and streamed", { skip }, async () => {
  await using(async (client) => {
    const whole = await client.generate(PROMPT, { ...OPTIONS, seed: 2n ** 63n + 1n, maxTokens: 30, n: 2, logprobs: 1 });
    assert.deepEqual(
      whole.choices.map((choice) => choice.tokenIds.length),
      [30, 30],
    );
    assert.equal(whole.choices[0]?.logprobs.length, 30);
    assert.equal(whole.choices[0]?.finishReason, "length");
    assert.equal(whole.seed, 2n ** 63n + 1n);
    assert.equal(whole.usage.completionTokens, 60);
    assert.ok(whole.timings.ttftNs > 0 && whole.timings.totalNs >= whole.timings.ttftNs);

    const { tokenIds } = await client.tokenize(PROMPT);
    let text = "";
    const tokens: number[] = [];
    for await (const event of client.generateStream(tokenIds, { ...OPTIONS, seed: whole.seed, maxTokens: 30 })) {
      if (event.type !== "delta") continue;
      assert.equal(event.firstIndex, event.tokenIds.length > 0 ? tokens.length : event.firstIndex);
      tokens.push(...event.tokenIds);
      text += event.text;
    }
    assert.deepEqual([tokens, text], [whole.tokenIds, whole.text]);
  });
});

test("chat: forced calls come in typed pieces that add up", { skip }, async () => {
  const parameters = {
    type: "object",
    properties: { mode: { enum: ["on", "off"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
    required: ["mode", "days"],
    additionalProperties: false,
  };
  const tools: Tool[] = [{ name: "set", description: "It sets.", parameters }];
  const options = {
    ...OPTIONS,
    ignoreEos: false,
    tools,
    toolChoice: "required",
    parallelToolCalls: false,
    maxTokens: 500,
    seed: 7,
  } as const;
  const messages = [{ role: "user", content: "Turn it on." }];
  await using(async (client) => {
    const answer = await client.chat(messages, { ...options, tools });
    assert.equal(answer.choices[0]?.finishReason, "tool_calls");
    const [call] = answer.toolCalls;
    assert.equal(call?.name, "set");
    const { mode, days } = JSON.parse(call?.arguments ?? "") as { mode: string; days: number };
    assert.ok(["on", "off"].includes(mode) && days >= 1 && days <= 9);
    assert.equal(answer.text, "");

    let pieces = "";
    for await (const event of client.chatStream(messages, { ...options, tools })) {
      if (event.type === "delta") pieces += event.toolCalls.map((piece) => piece.arguments).join("");
    }
    assert.equal(pieces, call?.arguments);

    const turns = [...messages, answer.choices[0].message, { role: "tool", content: "Done.", toolCallId: call?.id ?? "" }];
    const next = await client.chat(turns, { ...OPTIONS, maxTokens: 5, seed: 7 });
    assert.equal(next.tokenIds.length, 5);
  });
});

test("structured output follows its schema", { skip }, async () => {
  await using(async (client) => {
    const { text } = await client.generate(PROMPT, {
      ...OPTIONS,
      ignoreEos: false,
      choice: ["yes", "no"],
      maxTokens: 20,
      seed: 3,
    });
    assert.ok(["yes", "no"].includes(text));
  });
});

test("errors name the field, or the model", { skip }, async () => {
  await using(async (client) => {
    const wrong = client.generate(PROMPT, { temperature: -1 });
    await assert.rejects(
      wrong,
      (error: InvalidArgument) => error instanceof InvalidArgument && error.field === "sampling.temperature",
    );
    await assert.rejects(client.generate(PROMPT, { model: "other" }), NotFound);
    const [model] = await client.listModels();
    assert.equal(model?.name, "tiny");
  });
});

test("a deadline and a cancellation free everything", { skip }, async () => {
  await using(async (client) => {
    await assert.rejects(client.generate(PROMPT, { ...OPTIONS, maxTokens: 1900, seed: 1, timeoutMs: 150 }), DeadlineExceeded);
    for await (const event of client.generateStream(PROMPT, { ...OPTIONS, maxTokens: 1900, seed: 2 })) {
      if (event.type === "delta") break;
    }
    await eventually(async () => (await client.status()).numInflight === 0);
  });
});

test(
  "streams of a killed router go on at the other, with the tokens of an undisturbed run",
  { skip, timeout: 120_000 },
  async () => {
    const seeds = [1, 2, 3, 4, 5, 6, 7, 8];
    const options = { ...OPTIONS, maxTokens: 1800 };
    const messages = [{ role: "user", content: PROMPT }];
    const stream = (client: Client, seed: number) =>
      seed % 2 === 0 ? client.generateStream(PROMPT, { ...options, seed }) : client.chatStream(messages, { ...options, seed });
    const undisturbed = await using((client) => Promise.all(seeds.map((seed) => generation(stream(client, seed)))));

    await using(async (client) => {
      const answers = seeds.map(() => ({ tokens: [] as number[], text: "", numResumes: -1 }));
      const reading = seeds.map(async (seed, number) => {
        const answer = answers[number] as (typeof answers)[number];
        for await (const event of stream(client, seed)) {
          if (event.type === "completed") answer.numResumes = event.numResumes;
          if (event.type !== "delta") continue;
          if (event.tokenIds.length > 0) assert.equal(event.firstIndex, answer.tokens.length);
          answer.tokens.push(...event.tokenIds);
          answer.text += event.text;
        }
      });
      await eventually(async () => answers.every((answer) => answer.tokens.length > 0));
      await control("kill/router-0");
      await Promise.all(reading);

      assert.deepEqual(
        answers.map(({ tokens }) => tokens),
        undisturbed.map(({ tokenIds }) => tokenIds),
      );
      assert.deepEqual(
        answers.map(({ text }) => text),
        undisturbed.map(({ text }) => text),
      );
      const resumed = answers.filter(({ numResumes }) => numResumes > 0).length;
      assert.ok(resumed > 0, "all streams were complete before their router was killed");
    });
    await control("ready");
  },
);
