/** Routers that do what a test tells them, in this process. */

import { once } from "node:events";
import { connect, createServer, type AddressInfo, type Server as TcpServer, type Socket } from "node:net";
import { Metadata, Server, ServerCredentials, type ServerWritableStream, status } from "@grpc/grpc-js";
import { BinaryWriter } from "@bufbuild/protobuf/wire";
import {
  Completed,
  Delta,
  type GenerateRequest,
  type GenerateResponse,
  MeshService,
  type ReleaseSessionRequest,
  type ReleaseSessionResponse,
  Started,
  type TokenizeRequest,
  type TokenizeResponse,
} from "../src/gen/pdmesh/v1/mesh.js";

export const SEED = 2n ** 63n + 7n;

export function started(): GenerateResponse {
  return { event: { $case: "started", value: Started.fromPartial({ seed: SEED, requestId: "r" }) } };
}

/** The token of each index is a function of the index, as a mesh's is of request, seed and index. */
export function token(index: number): GenerateResponse {
  const value = Delta.fromPartial({ firstIndex: index, tokenIds: [100 + index], text: `${index} ` });
  return { event: { $case: "delta", value } };
}

export const COMPLETED: GenerateResponse = { event: { $case: "completed", value: Completed.fromPartial({}) } };

export interface Failure {
  code: status;
  details?: string;
  metadata?: Metadata;
}

export type Script = (call: ServerWritableStream<GenerateRequest, GenerateResponse>) => void;

/** Write these messages, then end: in order, with a failure, or not at all. */
export function answers(messages: GenerateResponse[], end: Failure | "ok" | "open" = "ok"): Script {
  return (call) => {
    for (const message of messages) call.write(message);
    if (end === "ok") call.end();
    else if (end !== "open") call.emit("error", { details: "", ...end });
  };
}

/** Write all that is left of `num` tokens, as a router does: from the beginning, or after what was emitted. */
export function whole(num: number): Script {
  return (call) => {
    const done = call.request.resume?.emitted[0]?.tokenIds.length ?? 0;
    const tokens = Array.from({ length: num - done }, (_, offset) => token(done + offset));
    answers([started(), ...tokens, COMPLETED])(call);
  };
}

/** A router whose calls of Generate take one script after the other; the last one stays. */
export class ScriptedRouter {
  readonly requests: GenerateRequest[] = [];
  readonly released: ReleaseSessionRequest[] = [];
  readonly arrivals: number[] = [];
  readonly headers: Metadata[] = [];
  readonly server = new Server();
  numCancelled = 0;
  port = 0;

  constructor(
    private readonly scripts: Script[],
    private readonly tokenizeFailures: Failure[] = [],
  ) {}

  get address(): string {
    return `127.0.0.1:${this.port}`;
  }

  async start(credentials = ServerCredentials.createInsecure()): Promise<this> {
    const take = (call: ServerWritableStream<GenerateRequest, GenerateResponse>) => {
      this.requests.push(call.request);
      this.arrivals.push(performance.now());
      this.headers.push(call.metadata);
      call.on("cancelled", () => (this.numCancelled += 1));
      const script = this.scripts.length > 1 ? this.scripts.shift() : this.scripts[0];
      script?.(call);
    };
    const tokenize = (_: { request: TokenizeRequest }, callback: (error: Failure | null, value?: TokenizeResponse) => void) => {
      this.arrivals.push(performance.now());
      const failure = this.tokenizeFailures.shift();
      if (failure === undefined) callback(null, { tokenIds: [1, 2], maxContext: 9 });
      else callback(failure);
    };
    const releaseSession = (
      call: { request: ReleaseSessionRequest },
      callback: (error: Failure | null, value?: ReleaseSessionResponse) => void,
    ) => {
      this.released.push(call.request);
      callback(null, { numBlocks: 7, numWorkers: 2, numUnreachable: 1 });
    };
    this.server.addService(MeshService, { generate: take, chat: take, tokenize, releaseSession } as never);
    this.port = await new Promise<number>((resolve, reject) => {
      const bound = (error: Error | null, port: number) => (error === null ? resolve(port) : reject(error));
      this.server.bindAsync("127.0.0.1:0", credentials, bound);
    });
    return this;
  }

  stop(): void {
    this.server.forceShutdown();
  }
}

/** Takes connections and says nothing, as a router whose process is stopped. */
export class SilentServer {
  readonly #sockets: Socket[] = [];
  readonly #server: TcpServer = createServer((socket) => this.#sockets.push(socket));

  async start(): Promise<string> {
    this.#server.listen(0, "127.0.0.1");
    await once(this.#server, "listening");
    return `127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  stop(): void {
    this.#server.close();
    for (const socket of this.#sockets) socket.destroy();
  }
}

/** Return an address that refuses connections. */
export async function refused(): Promise<string> {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, "close");
  await once(connect(port, "127.0.0.1"), "error");
  return `127.0.0.1:${port}`;
}

/** Return the metadata of an error with details: RetryInfo, or ErrorInfo with these pairs. */
export function details(detail: { retryDelayMs: number } | Record<string, string>): Metadata {
  const any = new BinaryWriter();
  if (typeof detail["retryDelayMs"] === "number") {
    const { retryDelayMs } = detail as { retryDelayMs: number };
    const duration = new BinaryWriter().uint32((1 << 3) | 0).int64(Math.floor(retryDelayMs / 1000));
    duration.uint32((2 << 3) | 0).int32((retryDelayMs % 1000) * 1e6);
    const info = new BinaryWriter().uint32((1 << 3) | 2).bytes(duration.finish());
    any
      .uint32((1 << 3) | 2)
      .string("type.googleapis.com/google.rpc.RetryInfo")
      .uint32((2 << 3) | 2)
      .bytes(info.finish());
  } else {
    const info = new BinaryWriter().uint32((1 << 3) | 2).string("INVALID_ARGUMENT");
    for (const [key, value] of Object.entries(detail)) {
      const pair = new BinaryWriter()
        .uint32((1 << 3) | 2)
        .string(key)
        .uint32((2 << 3) | 2)
        .string(value);
      info.uint32((3 << 3) | 2).bytes(pair.finish());
    }
    any
      .uint32((1 << 3) | 2)
      .string("type.googleapis.com/google.rpc.ErrorInfo")
      .uint32((2 << 3) | 2)
      .bytes(info.finish());
  }
  const metadata = new Metadata();
  metadata.set(
    "grpc-status-details-bin",
    Buffer.from(
      new BinaryWriter()
        .uint32((3 << 3) | 2)
        .bytes(any.finish())
        .finish(),
    ),
  );
  return metadata;
}
