/**
 * The history of a stream, and the request that continues it.
 *
 *     request ──► started ──► delta … delta ──✗ router lost
 *                   │ seed       │ token ids, fingerprint
 *                   └────────────┴──► request + Resume(seed, emitted, fingerprint) ──► (started) ──► delta … ──► completed
 *
 * Tokens are a function of the request, its seed, and the weights and formats that the fingerprint names; text is a function of the
 * tokens. So a second router that receives all of them continues exactly where the first stopped. The checks here guarantee it to
 * the caller: each index once, in order.
 */

import { status } from "@grpc/grpc-js";
import { type GenerateResponse, RequestOptions } from "./gen/pdmesh/v1/mesh.js";
import { meshError } from "./errors.js";
import type { Delta, Event, FinishReason, Started } from "./types.js";
import { emittedChoice, eventOf, type Request } from "./wire.js";

const MAX_REQUEST_ID = 64;
const MAX_UINT32 = 2 ** 32 - 1;

/** Holds the history of one stream. Pure: no clock, no network. */
export class StreamSession {
  readonly #request: Request;
  #started: Started | undefined;
  readonly #emitted = new Map<number, number[]>();
  readonly #finished = new Map<number, FinishReason>();
  #systemFingerprint = "";
  #numLosses = 0;
  #numLegs = 0;
  completed = false;

  constructor(request: Request) {
    this.#request = request;
  }

  /** Whether the caller has received a part of the answer. */
  get resuming(): boolean {
    return this.#started !== undefined;
  }

  /** Note that the router that served the stream is lost. */
  lost(): void {
    this.#numLosses += 1;
  }

  /** Return the request to send after `attempt` attempts: the original at first, later one that continues what was received. */
  request(attempt: number): Request {
    if (attempt === 0) return this.#request;
    const given = this.#request.message.options ?? RequestOptions.fromPartial({});
    const options = { ...given, attempt: Math.min(given.attempt + attempt, MAX_UINT32) };
    if (this.#numLosses > 0) options.requestId = this.#nextRequestId(given.requestId);
    const resume = this.#resume();
    if (this.#request.method === "chat") return { method: "chat", message: { ...this.#request.message, options, resume } };
    return { method: "generate", message: { ...this.#request.message, options, resume } };
  }

  #resume() {
    if (this.#started === undefined) return this.#request.message.resume;
    const choices = [...this.#emitted].sort(([a], [b]) => a - b);
    const emitted = choices.map(([index, ids]) => emittedChoice(index, ids, this.#finished.get(index)));
    return { seed: this.#started.seed, emitted, systemFingerprint: this.#systemFingerprint };
  }

  /** Return a new id for each loss: workers may still hold the lost router's request, until their grace period ends. */
  #nextRequestId(given: string): string {
    const first = given || (this.#started?.requestId ?? "");
    const suffix = `-r${this.#numLosses}`;
    return first === "" ? "" : first.slice(0, MAX_REQUEST_ID - suffix.length) + suffix;
  }

  /** Return the event for the caller; undefined for a repetition. Throws Internal when a router breaks the order of indexes. */
  accept(response: GenerateResponse): Event | undefined {
    const event = eventOf(response);
    if (event?.type === "started") return this.#acceptStarted(event);
    if (event?.type === "delta") return this.#acceptDelta(event);
    if (event === undefined) return undefined;
    this.completed = true;
    return { ...event, numResumes: this.#numLegs - 1 };
  }

  #acceptStarted(started: Started): Started | undefined {
    this.#numLegs += 1;
    if (this.#started === undefined) {
      this.#started = started;
      return started;
    }
    if (started.seed !== this.#started.seed) {
      throw internal(`the stream was resumed with seed ${started.seed}; it began with ${this.#started.seed}`);
    }
    return undefined;
  }

  #acceptDelta(delta: Delta): Delta | undefined {
    if (this.#finished.has(delta.choice)) return undefined;
    const emitted = this.#emitted.get(delta.choice) ?? [];
    this.#emitted.set(delta.choice, emitted);
    if (delta.tokenIds.length > 0 && !isNext(delta, emitted)) return undefined;
    emitted.push(...delta.tokenIds);
    this.#systemFingerprint ||= delta.systemFingerprint;
    if (delta.finishReason !== undefined) this.#finished.set(delta.choice, delta.finishReason);
    return delta;
  }
}

/** Return whether the delta continues the choice; false: it repeats. Anything else is an error: text cannot be cut. */
function isNext(delta: Delta, emitted: number[]): boolean {
  const { choice, firstIndex, tokenIds } = delta;
  const end = firstIndex + tokenIds.length;
  if (firstIndex === emitted.length) return true;
  if (end <= emitted.length && tokenIds.every((id, offset) => emitted[firstIndex + offset] === id)) return false;
  throw internal(
    `choice ${choice}: the router sent indexes ${firstIndex} to ${end - 1} where ${emitted.length} is next;` +
      " this is a bug of the router, please report it with the request id",
  );
}

function internal(message: string) {
  return meshError(status.INTERNAL, message);
}
