/** The history of a stream: what is sent to the next router, and what of its answer the caller sees. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { status } from "@grpc/grpc-js";
import { FinishReason } from "../src/gen/pdmesh/v1/common.js";
import { Completed, Delta, GenerateResponse, Started } from "../src/gen/pdmesh/v1/mesh.js";
import { errorFromStatus, Internal, InvalidArgument, Unavailable } from "../src/errors.js";
import { StreamSession } from "../src/session.js";
import type { GenerateOptions } from "../src/types.js";
import { chatRequest, eventOf, generateRequest, generation } from "../src/wire.js";

function started(seed = 2n ** 64n - 1n): GenerateResponse {
  return { event: { $case: "started", value: Started.fromPartial({ seed, requestId: "r", model: "tiny" }) } };
}

function delta(firstIndex: number, tokenIds: number[], more: Parameters<typeof Delta.fromPartial>[0] = {}): GenerateResponse {
  return { event: { $case: "delta", value: Delta.fromPartial({ firstIndex, tokenIds, ...more }) } };
}

const COMPLETED: GenerateResponse = { event: { $case: "completed", value: Completed.fromPartial({}) } };

function session(options: GenerateOptions = {}): StreamSession {
  return new StreamSession(generateRequest("hello", options));
}

test("the first request is the caller's, and later ones go on after what was received", () => {
  const one = session({ requestId: "mine", attempt: 3, seed: 5 });
  assert.equal(one.request(0).message.resume, undefined);
  one.accept(started());
  one.accept(delta(0, [1, 2], { systemFingerprint: "fp_x" }));
  one.accept(delta(0, [7], { choice: 1, finishReason: FinishReason.FINISH_REASON_TOOL_CALLS }));
  one.lost();
  const { message } = one.request(1);
  assert.deepEqual(message.resume, {
    seed: 2n ** 64n - 1n,
    emitted: [
      { index: 0, tokenIds: [1, 2], finishReason: FinishReason.FINISH_REASON_UNSPECIFIED },
      { index: 1, tokenIds: [7], finishReason: FinishReason.FINISH_REASON_STOP },
    ],
    systemFingerprint: "fp_x",
  });
  assert.equal(message.options?.requestId, "mine-r1");
  assert.equal(message.options?.attempt, 4);
  assert.equal(message.sampling?.seed, 5n);
});

test("request ids stay within their length, and one that was only rejected keeps its own", () => {
  const one = session({ requestId: "x".repeat(64) });
  assert.equal(one.request(1).message.options?.requestId, "x".repeat(64));
  one.lost();
  assert.equal(one.request(2).message.options?.requestId, "x".repeat(61) + "-r1");
  const unnamed = session();
  unnamed.lost();
  assert.equal(unnamed.request(1).message.options?.requestId, "");
});

test("the caller sees each index once, whatever a second router repeats", () => {
  const one = session();
  const responses = [started(), delta(0, [1, 2]), started(), delta(0, [1, 2]), delta(2, [3]), COMPLETED];
  const events = responses.map((response) => one.accept(response));
  assert.deepEqual(
    events.map((event) => event?.type),
    ["started", "delta", undefined, undefined, "delta", "completed"],
  );
  const last = events.at(-1);
  assert.equal(last?.type === "completed" && last.numResumes, 1);
  assert.ok(one.completed);
});

test("a gap, another token and another seed are bugs of the router", () => {
  for (const wrong of [delta(3, [4]), delta(1, [9]), delta(1, [2, 3]), started(6n)]) {
    const one = session();
    one.accept(started());
    one.accept(delta(0, [1, 2]));
    assert.throws(() => one.accept(wrong), Internal);
  }
});

test("a connection that breaks while it is written to is a lost router, an error of the router is not", () => {
  const details = "Received RST_STREAM with code 2 triggered by internal client error: write EPIPE";
  assert.ok(errorFromStatus({ code: status.INTERNAL, details }) instanceof Unavailable);
  assert.ok(errorFromStatus({ code: status.INTERNAL, details: "internal error 1f" }) instanceof Internal);
});

test("an event of a newer router is passed over", () => {
  assert.equal(session().accept({ event: undefined }), undefined);
});

test("options go where they belong", () => {
  const options = {
    temperature: 0.5,
    seed: 2n ** 63n,
    stop: ["x"],
    jsonSchema: { type: "object" },
    priority: "batch",
    mode: "local",
  } as const;
  const { message } = generateRequest([1, 2], { ...options, stop: ["x"], model: "m", sloTtftMs: 5, timeoutMs: 1 });
  assert.equal(message.sampling?.temperature, 0.5);
  assert.equal(message.sampling?.topK, undefined);
  assert.equal(message.sampling?.seed, 2n ** 63n);
  assert.deepEqual(message.sampling?.constraint, { kind: { $case: "jsonSchema", value: '{"type":"object"}' } });
  assert.deepEqual([message.options?.priority, message.options?.mode, message.options?.sloTtftMs], [3, 1, 5]);
});

test("what no message can hold is named", () => {
  const wrong: [string, object][] = [
    ["maxTokens", { maxTokens: -1 }],
    ["topK", { topK: 1.5 }],
    ["seed", { seed: 2 ** 60 }],
    ["seed", { seed: -1n }],
    ["mode", { mode: "elsewhere" }],
    ["regex", { jsonSchema: {}, regex: "a" }],
    ["max_tokens", { max_tokens: 5 }],
    ["tools", { tools: [] }],
  ];
  for (const [field, options] of wrong) {
    assert.throws(
      () => generateRequest("a", options),
      (error: InvalidArgument) => error instanceof InvalidArgument && error.field === field,
    );
  }
  assert.throws(
    () => generateRequest([-1], {}),
    (error: InvalidArgument) => error.field === "prompt",
  );
});

test("tools, a history with calls and the template's variables are sent", () => {
  const call = { id: "c", name: "weather", arguments: "{}" };
  const history = [
    { role: "user", content: "?" },
    { role: "assistant", toolCalls: [call], reasoning: "hm" },
    { role: "tool", content: "Sunny", toolCallId: "c" },
  ];
  const tools = [{ name: "weather", parameters: { type: "object" } }];
  const sent = chatRequest(history, {
    tools,
    toolChoice: "required",
    parallelToolCalls: false,
    chatTemplateKwargs: { enable_thinking: false },
  });
  assert.equal(sent.method, "chat");
  if (sent.method !== "chat") return;
  assert.deepEqual(sent.message.tools, [{ name: "weather", description: "", parameters: '{"type":"object"}', strict: false }]);
  assert.deepEqual(sent.message.messages[1]?.toolCalls, [call]);
  assert.deepEqual([sent.message.toolChoice, sent.message.parallelToolCalls], [3, false]);
  assert.equal(sent.message.chatTemplateKwargs, '{"enable_thinking":false}');
});

test("pieces of calls and of reasoning add up to an answer", async () => {
  const pieces = [
    started(),
    delta(0, [1], { reasoning: "let me " }),
    delta(1, [2], { reasoning: "see", toolCalls: [{ index: 0, id: "a", name: "f", arguments: '{"x"' }] }),
    delta(2, [3], {
      toolCalls: [
        { index: 0, id: "", name: "", arguments: ": 1}" },
        { index: 1, id: "b", name: "g", arguments: "{}" },
      ],
    }),
    delta(3, [], { finishReason: FinishReason.FINISH_REASON_TOOL_CALLS }),
    COMPLETED,
  ];
  async function* events() {
    for (const piece of pieces) yield eventOf(piece)!;
  }
  const answer = await generation(events());
  assert.deepEqual(answer.toolCalls, [
    { id: "a", name: "f", arguments: '{"x": 1}' },
    { id: "b", name: "g", arguments: "{}" },
  ]);
  assert.equal(answer.choices[0]?.reasoning, "let me see");
  assert.equal(answer.choices[0]?.finishReason, "tool_calls");
  assert.deepEqual(answer.tokenIds, [1, 2, 3]);
});
