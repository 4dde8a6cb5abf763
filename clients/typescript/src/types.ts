/** The arguments and results of the client. Options have the names and the comments of protos/pdmesh/v1, in camel case. */

import type { Logprobs, SamplingParams } from "./gen/pdmesh/v1/common.js";
import type {
  ModelInfo,
  RequestOptions,
  Started as WireStarted,
  ToolCallDelta,
  Usage,
  Timings as WireTimings,
} from "./gen/pdmesh/v1/mesh.js";

export type { Logprobs, ToolCallDelta, Usage };

export type FinishReason = "stop" | "length" | "tool_calls" | "abort";
/** Where the prompt was computed: on the decode worker itself, or on a prefill worker that pushed its KV. */
export type PrefillMode = "local" | "remote";
export type Priority = "interactive" | "standard" | "batch";
export type ToolChoice = "auto" | "none" | "required";

/** Options of every call. */
export interface CallOptions {
  /** The time that the call has, with all attempts. Without it only the end of its tokens ends a stream. */
  timeoutMs?: number;
  /** Ends the call with Cancelled, on every worker too. */
  signal?: AbortSignal;
  /** Sent with the call, such as a `traceparent`. */
  metadata?: Record<string, string>;
}

type Sampling = Partial<Omit<SamplingParams, "seed" | "constraint">>;
type Accounting = Partial<Omit<RequestOptions, "priority" | "mode">>;

/** Options of generate. What is absent takes the mesh's default. */
export interface GenerateOptions extends CallOptions, Sampling, Accounting {
  /** May be absent while the mesh serves exactly one. */
  model?: string;
  /** Determines every draw. A number must be safe (below 2^53). */
  seed?: bigint | number;
  /** A JSON Schema that the output follows, as an object or as text. Of this and the next three at most one. */
  jsonSchema?: object | string;
  /** What the whole output matches. */
  regex?: string;
  /** The output is one of these. */
  choice?: string[];
  /** A grammar that the output follows, in Lark syntax. */
  grammar?: string;
  priority?: Priority;
  mode?: PrefillMode;
}

/** A function that the model may call. `parameters`: a JSON Schema of an object, or its text. */
export interface Tool {
  name: string;
  description?: string;
  parameters?: object | string;
  /** Refuse a schema that calls cannot be held to. */
  strict?: boolean;
}

/** A call of a tool: `arguments` is a JSON object as text, unless the call was cut off. */
export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

/** One turn of a conversation. */
export interface Message {
  /** "system", "user", "assistant", "tool" or another that the model's template knows. */
  role: string;
  content?: string;
  /** Of an assistant. */
  toolCalls?: ToolCall[];
  /** Of an assistant: what it wrote before its answer. */
  reasoning?: string;
  /** Of a tool's answer: the call. */
  toolCallId?: string;
  /** Of a tool's answer: the tool. */
  name?: string;
}

/** Options of chat: those of generate, and what only a conversation has. */
export interface ChatOptions extends GenerateOptions {
  tools?: Tool[];
  toolChoice?: ToolChoice;
  /** The tools that may be called; with `toolChoice: "required"` and one name: that one. */
  toolNames?: string[];
  parallelToolCalls?: boolean;
  /** Variables that the model's chat template may read, such as `enable_thinking`. */
  chatTemplateKwargs?: Record<string, unknown>;
  addGenerationPrompt?: boolean;
  continueFinalMessage?: boolean;
}

/** Begins a stream: what determines its tokens. */
export interface Started extends WireStarted {
  type: "started";
}

/** New output of one choice. `tokenIds[0]` has output index `firstIndex`; text may lag behind the ids. */
export interface Delta {
  type: "delta";
  choice: number;
  firstIndex: number;
  tokenIds: number[];
  text: string;
  /** One for each of tokenIds, when asked for. */
  logprobs: Logprobs[];
  /** Set on the last delta of a choice. */
  finishReason: FinishReason | undefined;
  /** The stop string or token that ended the choice. */
  stopReason: string;
  /** Of chats: what the model writes before its answer. No part of the text. */
  reasoning: string;
  /** Of chats: pieces of calls. No part of the text. */
  toolCalls: ToolCallDelta[];
  /** For people: the model wrote something like a call that is none; it is in the text. */
  warning: string;
  /** Of the weights and formats that the tokens are computed with: on the first delta with tokens. */
  systemFingerprint: string;
}

type Plain<T> = { [K in keyof T]: T[K] extends bigint ? number : T[K] };

/** Where a request's time went, in nanoseconds. After a resumed stream they describe its last attempt. */
export type Timings = Plain<Omit<WireTimings, "mode">> & { mode: PrefillMode | undefined };

/** Ends a stream. */
export interface Completed {
  type: "completed";
  usage: Usage;
  timings: Timings;
  /** The routers that were lost on the way. */
  numResumes: number;
}

export type Event = Started | Delta | Completed;

/** One complete output. */
export interface Choice {
  index: number;
  text: string;
  tokenIds: number[];
  finishReason: FinishReason | undefined;
  stopReason: string;
  logprobs: Logprobs[];
  reasoning: string;
  toolCalls: ToolCall[];
  warnings: string[];
  /** The output of a chat as the next turn of its conversation. */
  message: Message;
}

/** The complete answer to a request. Text, tokens and calls are those of the first choice. */
export interface Generation {
  requestId: string;
  model: string;
  seed: bigint;
  choices: Choice[];
  usage: Usage;
  timings: Timings;
  numResumes: number;
  text: string;
  tokenIds: number[];
  toolCalls: ToolCall[];
}

/** A tokenized text, and the model's context, in tokens. */
export interface Tokens {
  tokenIds: number[];
  maxContext: number;
}

export type Model = ModelInfo;
