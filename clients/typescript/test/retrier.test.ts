/** When and where it is tried again: the table of the Python client's retries. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { status } from "@grpc/grpc-js";
import { DeadlineExceeded, meshError, Overloaded, Unavailable } from "../src/errors.js";
import { DEFAULT_POLICY, Retrier, type RetryPolicy, unasked } from "../src/retrier.js";

const LOST = meshError(status.UNAVAILABLE, "lost");
const FULL = meshError(status.RESOURCE_EXHAUSTED, "full", { retryDelayMs: 700 });
const TOO_LARGE = meshError(status.RESOURCE_EXHAUSTED, "too large for ever");

interface Given extends Partial<RetryPolicy> {
  addresses?: number;
  timeoutMs?: number;
}

function retrier({ addresses = 1, timeoutMs, ...policy }: Given = {}): Retrier {
  return new Retrier({ ...DEFAULT_POLICY, ...policy }, addresses, 0, 0, timeoutMs);
}

test("a failure moves on to the next router at once and backs off after each round", () => {
  const each = retrier({ addresses: 2 });
  const found = [1, 2, 3, 4, 5].map(() => [each.failed(LOST, 0), each.address]);
  assert.deepEqual(found, [
    [0, 1],
    [50, 0],
    [50, 1],
    [100, 0],
    [100, 1],
  ]);
});

test("the backoff doubles up to its bound, and begins again with a sign of life", () => {
  const one = retrier();
  assert.deepEqual(
    [1, 2, 3, 4, 5, 6, 7, 8].map(() => one.failed(LOST, 0)),
    [50, 100, 200, 400, 800, 1600, 2000, 2000],
  );
  one.progressed(0);
  assert.equal(one.failed(LOST, 0), 50);
});

test("a rejection is waited out as long as it says, if it is asked for or the stream is under way", () => {
  assert.throws(() => retrier().failed(FULL, 0), FULL);
  assert.equal(retrier({ retryOverload: true }).failed(FULL, 0), 700);
  assert.equal(retrier().failed(FULL, 0, true), 700);
});

test("a rejection without a delay and any other error are final", () => {
  const invalid = meshError(status.INVALID_ARGUMENT, "wrong");
  for (const error of [TOO_LARGE, invalid]) assert.throws(() => retrier({ retryOverload: true }).failed(error, 0, true), error);
});

test("it looks for a router until the time is over", () => {
  const one = retrier({ resumeTimeoutMs: 1000 });
  assert.equal(one.failed(LOST, 900), 50);
  assert.throws(() => one.failed(LOST, 950), Unavailable);
});

test("the deadline comes first", () => {
  const one = retrier({ timeoutMs: 100 });
  assert.throws(() => one.failed(LOST, 60), DeadlineExceeded);
  assert.equal(one.timeLeft(30), 70);
  assert.equal(one.timeLeft(300), 0);
  assert.equal(retrier().timeLeft(0), undefined);
});

test("a rejected request with a deadline waits for longer than a router is looked for", () => {
  const patient = retrier({ resumeTimeoutMs: 100, retryOverload: true, timeoutMs: 5000 });
  assert.equal(patient.failed(FULL, 0), 700);
  const hasty = retrier({ resumeTimeoutMs: 100, retryOverload: true });
  assert.throws(() => hasty.failed(FULL, 0), Overloaded);
});

test("a cancellation that the caller did not ask for is a router that goes", () => {
  assert.ok(unasked(meshError(status.CANCELLED, "gone")) instanceof Unavailable);
  assert.equal(unasked(FULL), FULL);
});
