/** When and where a call is tried again. Pure decisions: the clock is passed in, in milliseconds. */

import { status } from "@grpc/grpc-js";
import { Cancelled, meshError, type MeshError, Overloaded, Unavailable } from "./errors.js";

export interface RetryPolicy {
  /** How long a client looks for a router since the last sign of life of one; the deadline of a call bounds it too. */
  resumeTimeoutMs: number;
  /** Whether a rejected request waits as long as the router says, and is tried again. */
  retryOverload: boolean;
  firstBackoffMs: number;
  maxBackoffMs: number;
}

export const DEFAULT_POLICY: RetryPolicy = {
  resumeTimeoutMs: 30_000,
  retryOverload: false,
  firstBackoffMs: 50,
  maxBackoffMs: 2_000,
};

/** Return the error of a call that its caller has not cancelled: CANCELLED then means a router or a proxy that shuts down. */
export function unasked(error: MeshError): MeshError {
  if (!(error instanceof Cancelled)) return error;
  return meshError(status.UNAVAILABLE, `the router cancelled the call: ${error.message}`, { cause: error });
}

/**
 * Decides the attempts of one call. `address` is the index of the router to try next.
 *
 * Routers are tried in turn: a failure moves on to the next at once, and backs off (doubling) after each full round.
 */
export class Retrier {
  readonly #deadline: number | undefined;
  #lastSignOfLife: number;
  #numFailures = 0;

  constructor(
    private readonly policy: RetryPolicy,
    private readonly numAddresses: number,
    public address: number,
    now: number,
    timeoutMs: number | undefined,
  ) {
    this.#deadline = timeoutMs === undefined ? undefined : now + timeoutMs;
    this.#lastSignOfLife = now;
  }

  /** Return the time until the deadline, at least 0; undefined without one. */
  timeLeft(now: number): number | undefined {
    return this.#deadline === undefined ? undefined : Math.max(0, this.#deadline - now);
  }

  /** Note that a router answered: the next failure is a new one. */
  progressed(now: number): void {
    this.#lastSignOfLife = now;
    this.#numFailures = 0;
  }

  /**
   * Return the time to wait before the next attempt, at `address`. Throws `error` if there is none, DeadlineExceeded when the
   * deadline comes first. A rejection without a delay is final: the request may be too large for ever.
   *
   * `resuming`: part of the answer has been returned. The request was admitted once, so a rejection is retried like the loss that
   * caused it.
   */
  failed(error: MeshError, now: number, resuming = false): number {
    let delay: number;
    if (error instanceof Unavailable) delay = this.#backoff();
    else if (error instanceof Overloaded && error.retryDelayMs !== undefined && (this.policy.retryOverload || resuming)) {
      delay = error.retryDelayMs;
    } else throw error;
    this.#checkLimits(error, now + delay);
    this.#numFailures += 1;
    this.address = (this.address + 1) % this.numAddresses;
    return delay;
  }

  #backoff(): number {
    const numRounds = Math.floor((this.#numFailures + 1) / this.numAddresses);
    if (numRounds === 0) return 0;
    return Math.min(this.policy.maxBackoffMs, this.policy.firstBackoffMs * 2 ** (numRounds - 1));
  }

  #checkLimits(error: MeshError, retryAt: number): void {
    if (this.#deadline !== undefined && retryAt >= this.#deadline) {
      const message = `the deadline comes before another attempt; the last one failed: ${error.message}`;
      throw meshError(status.DEADLINE_EXCEEDED, message, { cause: error });
    }
    const waitsByDeadline = error instanceof Overloaded && this.#deadline !== undefined;
    if (!waitsByDeadline && retryAt > this.#lastSignOfLife + this.policy.resumeTimeoutMs) throw error;
  }
}
