/** The client in front of routers that fail as they are told. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { readFileSync } from "node:fs";
import { ServerCredentials, status } from "@grpc/grpc-js";
import {
  Cancelled,
  Client,
  type ClientOptions,
  DeadlineExceeded,
  type Event,
  InvalidArgument,
  Overloaded,
  Unavailable,
} from "../src/index.js";
import {
  answers,
  COMPLETED,
  details,
  type Failure,
  refused,
  type Script,
  ScriptedRouter,
  SEED,
  SilentServer,
  started,
  token,
  whole,
} from "./servers.js";

const LOST: Failure = { code: status.UNAVAILABLE, details: "the router is going" };
const FULL: Failure = { code: status.RESOURCE_EXHAUSTED, details: "full", metadata: details({ retryDelayMs: 300 }) };
const TOO_LARGE: Failure = { code: status.RESOURCE_EXHAUSTED, details: "too large for ever" };
const TOKENS = [100, 101, 102, 103, 104, 105];

interface Given {
  routers?: string[];
  options?: ClientOptions;
}

/** Run with one scripted router for each list, and a client of all of them. */
async function withRouters(
  scripts: Script[][],
  use: (client: Client, ...routers: ScriptedRouter[]) => Promise<void>,
  { routers: before = [], options = {} }: Given = {},
): Promise<void> {
  const routers = await Promise.all(scripts.map((each) => new ScriptedRouter([...each]).start()));
  const client = new Client([...before, ...routers.map((router) => router.address)], options);
  try {
    await use(client, ...routers);
  } finally {
    client.close();
    for (const router of routers) router.stop();
  }
}

test("a stream: started, deltas, completed; then it is over", async () => {
  await withRouters([[whole(6)]], async (client, router) => {
    const events: Event[] = [];
    const stream = client.generateStream("a", { maxTokens: 6, metadata: { traceparent: "00-1" } });
    for await (const event of stream) events.push(event);
    assert.deepEqual(
      events.map((event) => event.type),
      ["started", ...Array(6).fill("delta"), "completed"],
    );
    assert.equal(events[0]?.type === "started" && events[0].seed, SEED);
    assert.deepEqual(await stream.next(), { done: true, value: undefined });
    assert.deepEqual(router?.headers[0]?.get("traceparent"), ["00-1"]);
  });
});

test("a stream that breaks goes on at the next router, after what was received", async () => {
  const breaks: [string, Script][] = [
    ["unavailable", answers([started(), token(0), token(1)], LOST)],
    ["ended early", answers([started(), token(0), token(1)], "ok")],
    ["cancelled by a proxy", answers([started(), token(0), token(1)], { code: status.CANCELLED })],
  ];
  for (const [name, broken] of breaks) {
    await withRouters([[broken], [whole(6)]], async (client, one, other) => {
      const answer = await client.generate("a", { requestId: "mine" });
      assert.deepEqual([answer.tokenIds, answer.text, answer.numResumes], [TOKENS, "0 1 2 3 4 5 ", 1], name);
      assert.equal(one?.requests.length, 1);
      const [request] = other?.requests ?? [];
      assert.deepEqual([request?.resume?.seed, request?.resume?.emitted[0]?.tokenIds], [SEED, [100, 101]]);
      assert.deepEqual([request?.options?.requestId, request?.options?.attempt], ["mine-r1", 1]);
      await client.generate("a");
      const counts = [one?.requests.length, other?.requests.length];
      assert.deepEqual(counts, [1, 2], "it stays with the router that answered last");
    });
  }
});

test("a router that is killed under a stream", async () => {
  await withRouters([[answers([started(), token(0)], "open")], [whole(6)]], async (client, one) => {
    const tokens: number[] = [];
    for await (const event of client.generateStream("a")) {
      if (event.type === "delta") tokens.push(...event.tokenIds);
      if (tokens.length === 1) one?.stop();
    }
    assert.deepEqual(tokens, TOKENS);
  });
});

test("a stream that lives for longer than a router is looked for is continued all the same", async () => {
  const slow: Script = (call) => {
    call.write(started());
    setTimeout(() => answers([token(0)], LOST)(call), 400);
  };
  await withRouters(
    [[slow], [whole(6)]],
    async (client) => {
      assert.deepEqual((await client.generate("a")).tokenIds, TOKENS);
    },
    { options: { resumeTimeoutMs: 200 } },
  );
});

test("before the first message the request is sent again as it was", async () => {
  await withRouters([[answers([], LOST), answers([], LOST), whole(6)]], async (client, router) => {
    assert.deepEqual((await client.generate("a", { seed: 3 })).tokenIds, TOKENS);
    assert.deepEqual(
      router?.requests.map((request) => [request.options?.attempt, request.resume]),
      [
        [0, undefined],
        [1, undefined],
        [2, undefined],
      ],
    );
    const [first = 0, , third = 0] = router?.arrivals ?? [];
    assert.ok(third - first >= 140, "50 and 100 ms of backoff");
  });
});

test("routers that refuse or never answer a connection are passed over", async () => {
  const silent = new SilentServer();
  const routers = [await refused(), await silent.start()];
  try {
    await withRouters(
      [[whole(6)]],
      async (client) => {
        const begin = performance.now();
        assert.deepEqual((await client.generate("a", { timeoutMs: 20_000 })).tokenIds, TOKENS);
        assert.ok(performance.now() - begin < 5_000);
        assert.deepEqual((await client.tokenize("a")).tokenIds, [1, 2]);
      },
      { routers },
    );
  } finally {
    silent.stop();
  }
});

test("a unary call passes over a router that never answers a connection", async () => {
  const silent = new SilentServer();
  const routers = [await silent.start()];
  try {
    await withRouters([[]], async (client) => assert.deepEqual((await client.tokenize("a")).maxContext, 9), { routers });
  } finally {
    silent.stop();
  }
});

test("a full mesh is final, unless it is to be waited for", async () => {
  await withRouters([[answers([], FULL)]], async (client, router) => {
    const failed = client.generate("a");
    await assert.rejects(failed, (error: Overloaded) => error instanceof Overloaded && error.retryDelayMs === 300);
    assert.equal(router?.requests.length, 1);
  });
  const patient = { options: { retryOverload: true } };
  const full = [answers([], FULL), whole(6)];
  await withRouters(
    [full],
    async (client, router) => {
      assert.deepEqual((await client.generate("a")).tokenIds, TOKENS);
      const [first = 0, second = 0] = router?.arrivals ?? [];
      assert.ok(second - first >= 299 && second - first < 2_000);
    },
    patient,
  );
  await withRouters([[answers([], TOO_LARGE)]], async (client) => assert.rejects(client.generate("a"), Overloaded), patient);
});

test("a stream that is rejected where it wants to go on waits without being asked to", async () => {
  const scripts = [answers([started(), token(0)], LOST), answers([], FULL), whole(6)];
  await withRouters([scripts], async (client) => assert.deepEqual((await client.generate("a")).tokenIds, TOKENS));
});

test("other errors are final, and name the field", async () => {
  const wrong: Failure = { code: status.INVALID_ARGUMENT, details: "text: is empty", metadata: details({ field: "text" }) };
  await withRouters([[answers([], wrong)], [whole(6)]], async (client, _, other) => {
    await assert.rejects(
      client.generate("a"),
      (error: InvalidArgument) => error instanceof InvalidArgument && error.field === "text",
    );
    assert.equal(other?.requests.length, 0);
  });
});

test("no router within the time that is looked for one", async () => {
  const client = new Client(await refused(), { resumeTimeoutMs: 200 });
  await assert.rejects(client.generate("a"), Unavailable);
  await assert.rejects(client.listModels(), Unavailable);
  client.close();
});

test("the deadline ends a stream, also one that waits for another router", async () => {
  await withRouters([[answers([started(), token(0)], "open")]], async (client, router) => {
    await assert.rejects(client.generate("a", { timeoutMs: 300 }), DeadlineExceeded);
    await eventually(() => router?.numCancelled === 1);
  });
  const client = new Client(await refused());
  await assert.rejects(client.generate("a", { timeoutMs: 300 }), DeadlineExceeded);
  client.close();
});

test("three ways to leave a stream end the request", async () => {
  await withRouters([[answers([started(), token(0)], "open")]], async (client, router) => {
    for await (const event of client.generateStream("a")) if (event.type === "delta") break;
    await eventually(() => router?.numCancelled === 1);

    const controller = new AbortController();
    const reason = new Error("enough");
    const stream = client.generateStream("a", { signal: controller.signal });
    setTimeout(() => controller.abort(reason), 100);
    await assert.rejects(drained(stream), (error: Cancelled) => error instanceof Cancelled && error.cause === reason);
    await eventually(() => router?.numCancelled === 2);

    const other = client.generateStream("a");
    setTimeout(() => other.cancel(), 100);
    await assert.rejects(drained(other), Cancelled);
    await eventually(() => router?.numCancelled === 3);
    assert.equal(router?.requests.length, 3, "none of them was sent again");

    await assert.rejects(client.generate("a", { signal: AbortSignal.abort() }), Cancelled);
    await assert.rejects(client.tokenize("a", { signal: AbortSignal.abort() }), Cancelled);
  });
});

test("a signal ends the search for a router", async () => {
  const client = new Client(await refused());
  await assert.rejects(client.generate("a", { signal: AbortSignal.timeout(200) }), Cancelled);
  await assert.rejects(client.listModels({ signal: AbortSignal.timeout(200) }), Cancelled);
  client.close();
});

test("a closed client's streams end with Cancelled", async () => {
  await withRouters([[answers([started(), token(0)], "open")]], async (client) => {
    const stream = client.generateStream("a");
    setTimeout(() => client.close(), 100);
    await assert.rejects(drained(stream), Cancelled);
    await assert.rejects(client.generate("a"), Cancelled);
    await assert.rejects(client.tokenize("a"), Cancelled);
  });
});

test("unary calls are tried again when a router goes", async () => {
  const router = await new ScriptedRouter([], [LOST, LOST]).start();
  const client = new Client(router.address);
  assert.deepEqual((await client.tokenize("a")).tokenIds, [1, 2]);
  assert.equal(router.arrivals.length, 3);
  client.close();
  router.stop();
});

test("a slow reader gets everything, and overlapping reads get one event each", async () => {
  await withRouters([[whole(3000)]], async (client) => {
    const stream = client.generateStream("a");
    const [first, second] = await Promise.all([stream.next(), stream.next()]);
    assert.deepEqual([first?.value?.type, second?.value?.type], ["started", "delta"]);
    await new Promise((resolve) => setTimeout(resolve, 100));
    let num = 1;
    for await (const event of stream) num += event.type === "delta" ? 1 : 0;
    assert.equal(num, 3000);
  });
});

const certificates = process.env["PDMESH_CERTIFICATES"];
const skip = certificates === undefined ? "PDMESH_CERTIFICATES is not set: run it by `make test-clients`" : false;

test("a router that requires a certificate gets one, and its own is checked", { skip }, async () => {
  const [ca, cert, key] = ["ca.crt", "tls.crt", "tls.key"].map((name) => readFileSync(`${certificates}/${name}`)) as [
    Buffer,
    Buffer,
    Buffer,
  ];
  const router = await new ScriptedRouter([whole(6)]).start(
    ServerCredentials.createSsl(ca, [{ cert_chain: cert, private_key: key }], true),
  );
  try {
    const client = new Client(router.address, { tls: { ca, cert, key: key.toString() } });
    assert.deepEqual((await client.generate("a", { timeoutMs: 10_000 })).tokenIds, TOKENS);
    client.close();
    for (const tls of [{ ca }, { ca, cert, key, serverName: "another" }, undefined]) {
      const refused = new Client(router.address, { tls, resumeTimeoutMs: 200 });
      await assert.rejects(refused.generate("a"), Unavailable);
      refused.close();
    }
  } finally {
    router.stop();
  }
});

test("addresses and keys", async () => {
  assert.deepEqual(new Client(" a:1, b:2 ").routers, ["a:1", "b:2"]);
  assert.throws(() => new Client(","), InvalidArgument);
  assert.throws(() => new Client("a:1", { apiKey: "two words" }), InvalidArgument);
  await withRouters(
    [[whole(1)]],
    async (client, router) => {
      await client.generate("a");
      assert.deepEqual(router?.headers[0]?.get("authorization"), ["Bearer key"]);
    },
    { options: { apiKey: "key" } },
  );
});

test("a completed stream is complete, whatever its status", async () => {
  await withRouters([[answers([started(), token(0), COMPLETED], LOST)]], async (client, router) => {
    assert.deepEqual((await client.generate("a")).tokenIds, [100]);
    assert.equal(router?.requests.length, 1);
  });
});

async function drained(stream: AsyncIterable<Event>): Promise<void> {
  for await (const _ of stream);
}

async function eventually(condition: () => boolean): Promise<void> {
  for (let attempt = 0; !condition(); attempt += 1) {
    assert.ok(attempt < 500, "not within 5 s");
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

test("the options of a session are sent, and a session is released", async () => {
  await withRouters([[whole(1)]], async (client, router) => {
    const session = { sessionId: "s", kvRetentionS: 5, sessionFinal: true, priorityHint: -7 };
    await client.chat([{ role: "user", content: "hello" }], session);
    assert.deepEqual({ ...router.requests[0]?.options, ...session }, router.requests[0]?.options);
    const counts = await client.releaseSession("s", { tenant: "t", model: "m" });
    assert.deepEqual(counts, { numBlocks: 7, numWorkers: 2, numUnreachable: 1 });
    await client.releaseSession("s");
    assert.deepEqual(router.released, [
      { sessionId: "s", tenant: "t", model: "m" },
      { sessionId: "s", tenant: "", model: "" },
    ]);
  });
});
