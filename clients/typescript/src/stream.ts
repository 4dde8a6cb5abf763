/** A request's events as an async iterator, which goes on at another router when one is lost. */

import { setTimeout as sleep } from "node:timers/promises";
import { status } from "@grpc/grpc-js";
import type { GenerateResponse } from "./gen/pdmesh/v1/mesh.js";
import { Cancelled, MeshError, meshError, Unavailable } from "./errors.js";
import { type Retrier, unasked } from "./retrier.js";
import { StreamSession } from "./session.js";
import type { Event } from "./types.js";
import type { Request } from "./wire.js";

/** A running call. `read` gives undefined at its end, and throws CallFailed where it failed. */
export interface Call {
  read(): Promise<GenerateResponse | undefined>;
  cancel(): void;
}

/** Sends the request to the router of that index. `timeLeftMs`: until the deadline of the whole stream. */
export type OpenCall = (address: number, request: Request, timeLeftMs: number | undefined) => Call;

/**
 * The events of one request: started, then deltas, last completed. Leaving it early (`break`, `return`, `cancel`, the signal)
 * cancels the request. Throws MeshError when the stream fails for good.
 */
export class Stream implements AsyncIterableIterator<Event> {
  readonly #session: StreamSession;
  readonly #stopped = new AbortController();
  #numCalls = 0;
  #closed = false;
  #call: Call;
  #turn: Promise<unknown> = Promise.resolve();

  constructor(
    private readonly open: OpenCall,
    request: Request,
    private readonly retrier: Retrier,
    private readonly answered: (address: number) => void,
    private readonly lost: (address: number, following: number) => void,
    private readonly signal: AbortSignal,
  ) {
    this.#session = new StreamSession(request);
    this.#call = this.#nextCall();
    signal.addEventListener("abort", this.cancel, { once: true });
    if (signal.aborted) this.cancel();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  /** Return the next event. Calls that overlap are answered one after the other. */
  next(): Promise<IteratorResult<Event>> {
    const result = this.#turn.then(() => this.#next());
    this.#turn = result.catch(() => undefined);
    return result;
  }

  /** End the request, if it has not ended; the iterator is exhausted then. */
  async return(): Promise<IteratorResult<Event>> {
    this.#close();
    return { done: true, value: undefined };
  }

  /** End the request. Whoever waits for the next event gets Cancelled. */
  readonly cancel = (): void => {
    this.#stopped.abort();
    this.#call.cancel();
  };

  #close(): void {
    this.#closed = true;
    this.#stopped.abort();
    this.signal.removeEventListener("abort", this.cancel);
    this.#call.cancel();
  }

  async #next(): Promise<IteratorResult<Event>> {
    try {
      while (!this.#closed) {
        const event = await this.#step();
        if (event !== undefined) return { done: false, value: event };
      }
    } catch (error) {
      if (!this.#closed) {
        this.#close();
        throw error;
      }
    }
    return { done: true, value: undefined };
  }

  /** Return one event, or undefined after a message that the caller does not see. */
  async #step(): Promise<Event | undefined> {
    let failure: MeshError;
    try {
      const response = await this.#call.read();
      if (response !== undefined) return this.#accept(response);
      failure = meshError(status.UNAVAILABLE, "the router ended the stream before it was complete");
    } catch (error) {
      if (!(error instanceof CallFailed)) throw error;
      failure = error.failure;
    }
    await this.#goOnAfter(failure);
    return undefined;
  }

  #accept(response: GenerateResponse): Event | undefined {
    this.retrier.progressed(performance.now());
    this.answered(this.retrier.address);
    return this.#session.accept(response);
  }

  async #goOnAfter(failure: MeshError): Promise<void> {
    if (this.#session.completed) return this.#close();
    this.#throwIfStopped();
    const error = unasked(failure);
    const failed = this.retrier.address;
    const delay = this.retrier.failed(error, performance.now(), this.#session.resuming);
    if (error instanceof Unavailable) {
      this.#session.lost();
      this.lost(failed, this.retrier.address);
    }
    if (delay > 0) await sleep(delay, undefined, { signal: this.#stopped.signal }).catch(() => undefined);
    this.#throwIfStopped();
    this.#call = this.#nextCall();
  }

  #throwIfStopped(): void {
    if (this.#stopped.signal.aborted)
      throw new Cancelled(status.CANCELLED, "the stream was cancelled", { cause: this.signal.reason });
  }

  #nextCall(): Call {
    const request = this.#session.request(this.#numCalls);
    this.#numCalls += 1;
    return this.open(this.retrier.address, request, this.retrier.timeLeft(performance.now()));
  }
}

/** Thrown by `Call.read`: the call ended with this error. Other errors of a stream are final. */
export class CallFailed extends Error {
  constructor(readonly failure: MeshError) {
    super(failure.message);
  }
}
