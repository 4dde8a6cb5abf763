/** Converts between the client's own types and the messages of protos/pdmesh/v1: requests out, events in. */

import {
  Constraint,
  FinishReason as WireFinishReason,
  Priority as WirePriority,
  SamplingParams,
  type EmittedChoice,
} from "./gen/pdmesh/v1/common.js";
import {
  ChatMessage,
  ChatRequest,
  GenerateRequest,
  PrefillMode as WireMode,
  RequestOptions,
  ToolChoice as WireToolChoice,
  type Delta as WireDelta,
  type DeepPartial,
  type GenerateResponse,
  Timings as WireTimings,
  Usage,
  type Tool as WireTool,
  TokenizeRequest,
} from "./gen/pdmesh/v1/mesh.js";
import { invalidArgument } from "./errors.js";
import type {
  ChatOptions,
  Choice,
  Completed,
  Delta,
  Event,
  FinishReason,
  GenerateOptions,
  Generation,
  Message,
  PrefillMode,
  Priority,
  Started,
  Timings,
  Tool,
  ToolCall,
  ToolCallDelta,
  ToolChoice,
} from "./types.js";

/** A request for a stream, and the method that takes it. */
export type Request = { method: "generate"; message: GenerateRequest } | { method: "chat"; message: ChatRequest };

const FINISH_REASONS = new Map<WireFinishReason, FinishReason>([
  [WireFinishReason.FINISH_REASON_STOP, "stop"],
  [WireFinishReason.FINISH_REASON_LENGTH, "length"],
  [WireFinishReason.FINISH_REASON_TOOL_CALLS, "tool_calls"],
  [WireFinishReason.FINISH_REASON_ABORT, "abort"],
]);
const MODES: Record<PrefillMode, WireMode> = { local: WireMode.PREFILL_MODE_LOCAL, remote: WireMode.PREFILL_MODE_REMOTE };
const PRIORITIES: Record<Priority, WirePriority> = {
  interactive: WirePriority.PRIORITY_INTERACTIVE,
  standard: WirePriority.PRIORITY_STANDARD,
  batch: WirePriority.PRIORITY_BATCH,
};
const TOOL_CHOICES: Record<ToolChoice, WireToolChoice> = {
  auto: WireToolChoice.TOOL_CHOICE_AUTO,
  none: WireToolChoice.TOOL_CHOICE_NONE,
  required: WireToolChoice.TOOL_CHOICE_REQUIRED,
};
const CALL_OPTIONS = ["timeoutMs", "signal", "metadata", "model"];
const CHAT_OPTIONS = [
  ...CALL_OPTIONS,
  "tools",
  "toolChoice",
  "toolNames",
  "parallelToolCalls",
  "chatTemplateKwargs",
  "addGenerationPrompt",
  "continueFinalMessage",
];

// Requests

/** Return the request for a text or token prompt. Throws InvalidArgument for what no message can hold. */
export function generateRequest(prompt: string | number[], options: GenerateOptions): Request {
  const text = typeof prompt === "string";
  const value: DeepPartial<GenerateRequest> = {
    prompt: text ? { $case: "text", value: prompt } : { $case: "tokens", value: { ids: prompt } },
  };
  checked("prompt", () => GenerateRequest.encode(GenerateRequest.fromPartial(value)));
  const message = GenerateRequest.fromPartial({ ...value, model: options.model ?? "", ...parameters(options, CALL_OPTIONS) });
  return { method: "generate", message };
}

/** Return the request for the next message of a conversation. Throws InvalidArgument for what no message can hold. */
export function chatRequest(messages: Message[], options: ChatOptions): Request {
  const { tools, toolChoice, toolNames, parallelToolCalls, chatTemplateKwargs, addGenerationPrompt, continueFinalMessage } =
    options;
  const message = ChatRequest.fromPartial({
    model: options.model ?? "",
    messages: messages.map(wireMessage),
    ...parameters(options, CHAT_OPTIONS),
    tools: tools?.map(wireTool) ?? [],
    toolChoice:
      toolChoice === undefined ? WireToolChoice.TOOL_CHOICE_UNSPECIFIED : member("toolChoice", TOOL_CHOICES, toolChoice),
    toolNames: toolNames ?? [],
    parallelToolCalls,
    chatTemplateKwargs: chatTemplateKwargs === undefined ? "" : JSON.stringify(chatTemplateKwargs),
    addGenerationPrompt,
    continueFinalMessage: continueFinalMessage ?? false,
  });
  return { method: "chat", message };
}

/** Return the request for the token ids of a text, or of messages. */
export function tokenizeRequest(text: string | Message[], model: string): TokenizeRequest {
  if (typeof text === "string") return TokenizeRequest.fromPartial({ model, text });
  return TokenizeRequest.fromPartial({ model, messages: text.map(wireMessage) });
}

function wireMessage(message: Message): ChatMessage {
  return ChatMessage.fromPartial(message);
}

function wireTool(tool: Tool): WireTool {
  const { name, description = "", parameters = "", strict = false } = tool;
  return { name, description, parameters: jsonText(parameters), strict };
}

function jsonText(value: object | string): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

interface Parameters {
  sampling: SamplingParams;
  options: RequestOptions;
}

/** Return the options that generate and chat share. Those of the names `others` are none of them. */
function parameters(given: GenerateOptions, others: readonly string[]): Parameters {
  const left = new Map(Object.entries(given).filter(([name, value]) => value !== undefined && !others.includes(name)));
  const sampling: DeepPartial<SamplingParams> = {};
  const options: DeepPartial<RequestOptions> = {};
  const constraint = constraintOf(left);
  if (constraint !== undefined) sampling.constraint = constraint;
  for (const [name, value] of left) {
    if (Object.hasOwn(NO_SAMPLING, name)) {
      set(name, sampling, name === "seed" ? seedOf(value) : value, SamplingParams);
    } else if (Object.hasOwn(NO_OPTIONS, name)) {
      set(name, options, optionOf(name, value), RequestOptions);
    } else {
      throw invalidArgument(name, `${name} is not an option of a request`);
    }
  }
  return { sampling: SamplingParams.fromPartial(sampling), options: RequestOptions.fromPartial(options) };
}

const NO_SAMPLING = SamplingParams.fromPartial({});
const NO_OPTIONS = RequestOptions.fromPartial({});

interface Codec<T> {
  fromPartial(object: DeepPartial<T>): T;
  encode(message: T): unknown;
}

/** Set one field of a message, if its type can hold the value. */
function set<T>(name: string, message: DeepPartial<T>, value: unknown, codec: Codec<T>): void {
  const field = { [name]: value } as DeepPartial<T>;
  checked(name, () => codec.encode(codec.fromPartial(field)));
  Object.assign(message as object, field);
}

function checked(field: string, encode: () => unknown): void {
  try {
    encode();
  } catch (error) {
    throw invalidArgument(field, `${field} cannot be sent: ${error instanceof Error ? error.message : error}`, error);
  }
}

function seedOf(value: unknown): bigint {
  if (typeof value === "bigint" && value >= 0n && value < 2n ** 64n) return value;
  if (typeof value === "number" && Number.isSafeInteger(value) && value >= 0) return BigInt(value);
  throw invalidArgument("seed", `seed is ${String(value)}; it must be a bigint of 64 bits, or a safe number, at least 0`);
}

function optionOf(name: string, value: unknown): unknown {
  if (name === "mode") return member(name, MODES, value);
  if (name === "priority") return member(name, PRIORITIES, value);
  return value;
}

function member<V>(name: string, members: Record<string, V>, value: unknown): V {
  const found = typeof value === "string" && Object.hasOwn(members, value) ? members[value] : undefined;
  if (found === undefined)
    throw invalidArgument(name, `${name} is ${String(value)}; it must be one of ${Object.keys(members).join(", ")}`);
  return found;
}

/** Take the constraint out of the options. */
function constraintOf(options: Map<string, unknown>): Constraint | undefined {
  const kinds: Record<string, (value: unknown) => Constraint["kind"]> = {
    jsonSchema: (value) => ({ $case: "jsonSchema", value: jsonText(value as object | string) }),
    regex: (value) => ({ $case: "regex", value: value as string }),
    choice: (value) => ({ $case: "choice", value: { values: value as string[] } }),
    grammar: (value) => ({ $case: "grammar", value: value as string }),
  };
  let found: Constraint | undefined;
  for (const [name, kind] of Object.entries(kinds)) {
    if (!options.has(name)) continue;
    const constraint = { kind: kind(options.get(name)) };
    if (found !== undefined) throw invalidArgument(name, `${name} excludes ${found.kind?.$case}; give one of them`);
    checked(name, () => Constraint.encode(constraint));
    options.delete(name);
    found = constraint;
  }
  return found;
}

/** Return what the caller has received of a choice, for a Resume. */
export function emittedChoice(index: number, tokenIds: number[], finishReason: FinishReason | undefined): EmittedChoice {
  const reasons: Record<FinishReason, WireFinishReason> = {
    stop: WireFinishReason.FINISH_REASON_STOP,
    length: WireFinishReason.FINISH_REASON_LENGTH,
    tool_calls: WireFinishReason.FINISH_REASON_STOP, // to the mesh it is the same
    abort: WireFinishReason.FINISH_REASON_ABORT,
  };
  const reason = finishReason === undefined ? WireFinishReason.FINISH_REASON_UNSPECIFIED : reasons[finishReason];
  return { index, tokenIds, finishReason: reason };
}

// Answers

/** Return the event of a message; undefined for a kind that this client does not know (from a newer router). */
export function eventOf(response: GenerateResponse): Event | undefined {
  switch (response.event?.$case) {
    case "started":
      return { type: "started", ...response.event.value };
    case "delta":
      return deltaOf(response.event.value);
    case "completed": {
      const { usage = Usage.fromPartial({}), timings = WireTimings.fromPartial({}) } = response.event.value;
      return { type: "completed", usage, timings: timingsOf(timings), numResumes: 0 };
    }
    default:
      return undefined;
  }
}

function deltaOf(delta: WireDelta): Delta {
  return { type: "delta", ...delta, finishReason: FINISH_REASONS.get(delta.finishReason) };
}

function timingsOf(wire: WireTimings): Timings {
  const numbers = Object.entries(wire).map(([name, value]) => [name, typeof value === "bigint" ? Number(value) : value]);
  const mode = (Object.keys(MODES) as PrefillMode[]).find((name) => MODES[name] === wire.mode);
  return { ...(Object.fromEntries(numbers) as Omit<Timings, "mode">), mode };
}

/** Return the complete answer of a finished stream. */
export async function generation(events: AsyncIterable<Event>): Promise<Generation> {
  let started: Started | undefined;
  let completed: Completed | undefined;
  const deltas = new Map<number, Delta[]>([[0, []]]);
  for await (const event of events) {
    if (event.type === "started") started = event;
    else if (event.type === "completed") completed = event;
    else if (deltas.has(event.choice)) deltas.get(event.choice)?.push(event);
    else deltas.set(event.choice, [event]);
  }
  if (started === undefined || completed === undefined) throw new Error("a stream that ended without error has both");
  const { requestId, model, seed } = started;
  const { usage, timings, numResumes } = completed;
  const choices = [...deltas].sort(([a], [b]) => a - b).map(([index, parts]) => choiceOf(index, parts));
  const { text, tokenIds, toolCalls } = choices[0] as Choice;
  return { requestId, model, seed, choices, usage, timings, numResumes, text, tokenIds, toolCalls };
}

function choiceOf(index: number, deltas: Delta[]): Choice {
  const text = deltas.map((delta) => delta.text).join("");
  const reasoning = deltas.map((delta) => delta.reasoning).join("");
  const toolCalls = callsOf(deltas);
  return {
    index,
    text,
    tokenIds: deltas.flatMap((delta) => delta.tokenIds),
    finishReason: deltas.at(-1)?.finishReason,
    stopReason: deltas.at(-1)?.stopReason ?? "",
    logprobs: deltas.flatMap((delta) => delta.logprobs),
    reasoning,
    toolCalls,
    warnings: deltas.map((delta) => delta.warning).filter((warning) => warning !== ""),
    message: { role: "assistant", content: text, toolCalls, reasoning },
  };
}

function callsOf(deltas: Delta[]): ToolCall[] {
  const calls = new Map<number, ToolCall>();
  for (const piece of deltas.flatMap((delta): ToolCallDelta[] => delta.toolCalls)) {
    const call = calls.get(piece.index);
    if (call === undefined) calls.set(piece.index, { id: piece.id, name: piece.name, arguments: piece.arguments });
    else call.arguments += piece.arguments;
  }
  return [...calls].sort(([a], [b]) => a - b).map(([, call]) => call);
}
