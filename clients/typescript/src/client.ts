/** The client of a mesh. */

import { setTimeout as sleep } from "node:timers/promises";
import {
  type CallOptions as GrpcCallOptions,
  type ClientReadableStream,
  type ClientUnaryCall,
  connectivityState,
  Metadata,
  type ServiceError,
  status,
} from "@grpc/grpc-js";
import { LoadAdapterRequest } from "./gen/pdmesh/v1/worker.js";
import {
  type ExplainRequest,
  type ExplainResponse,
  type GenerateResponse,
  type GetStatusResponse,
  type ListMeshAdaptersResponse,
  type MeshAdapter,
  MeshClient,
  type ReleaseSessionResponse,
} from "./gen/pdmesh/v1/mesh.js";
import { addresses, CONNECT_TIMEOUT_MS, connection, DEFAULT_ADDRESS, type TlsOptions } from "./channel.js";
import { Cancelled, errorFromStatus, invalidArgument, meshError, type MeshError } from "./errors.js";
import { DEFAULT_POLICY, Retrier, type RetryPolicy, unasked } from "./retrier.js";
import { type Call, CallFailed, Stream } from "./stream.js";
import type { CallOptions, ChatOptions, GenerateOptions, Generation, Message, Model, Tokens } from "./types.js";
import { chatRequest, generateRequest, generation, type Request, tokenizeRequest } from "./wire.js";

export interface ClientOptions {
  /** How long to look for a router after the last one was lost. */
  resumeTimeoutMs?: number;
  /** Wait and try again when the mesh has no capacity. */
  retryOverload?: boolean;
  /** Certificates, for a mesh that encrypts. */
  tls?: TlsOptions;
  /** For routers that require one. */
  apiKey?: string;
}

type Named = CallOptions & { model?: string };
type Unary<Q, R> = (
  request: Q,
  metadata: Metadata,
  options: Partial<GrpcCallOptions>,
  callback: (error: ServiceError | null, response: R) => void,
) => ClientUnaryCall;

/**
 * Calls a mesh. `routers`: addresses "host:port", in a list or comma-separated, tried in turn; the client stays with the router
 * that answered last. A lost router costs a pause: a stream continues at the next address, with the same seed, after the tokens
 * received so far. Calls reject with MeshError.
 */
export class Client {
  readonly routers: readonly string[];
  readonly #stubs: MeshClient[];
  readonly #policy: RetryPolicy;
  readonly #headers: Record<string, string>;
  #preferred = 0;
  readonly #closing = new AbortController();

  constructor(routers: string | readonly string[] = DEFAULT_ADDRESS, options: ClientOptions = {}) {
    this.routers = addresses(routers);
    const { resumeTimeoutMs = DEFAULT_POLICY.resumeTimeoutMs, retryOverload = DEFAULT_POLICY.retryOverload, apiKey } = options;
    this.#policy = { ...DEFAULT_POLICY, resumeTimeoutMs, retryOverload };
    this.#headers = apiKey ? { authorization: `Bearer ${checkedKey(apiKey)}` } : {};
    const [credentials, channelOptions] = connection(options.tls);
    this.#stubs = this.routers.map((address) => new MeshClient(address, credentials, channelOptions));
  }

  /** Return the continuation of a text or token prompt. */
  async generate(prompt: string | number[], options: GenerateOptions = {}): Promise<Generation> {
    return generation(this.generateStream(prompt, options));
  }

  /** Return an iterator like `generate`: started, then deltas, last completed. Leaving it cancels the request. */
  generateStream(prompt: string | number[], options: GenerateOptions = {}): Stream {
    return this.#stream(generateRequest(prompt, options), options);
  }

  /** Return the next message of a conversation, oldest message first, under the model's own chat template. */
  async chat(messages: Message[], options: ChatOptions = {}): Promise<Generation> {
    return generation(this.chatStream(messages, options));
  }

  /** Return an iterator like `chat`: started, then deltas, last completed. Leaving it cancels the request. */
  chatStream(messages: Message[], options: ChatOptions = {}): Stream {
    return this.#stream(chatRequest(messages, options), options);
  }

  /** Return the token ids of a text, or of messages rendered with the chat template. */
  async tokenize(text: string | Message[], options: Named = {}): Promise<Tokens> {
    return this.#unary((stub) => stub.tokenize.bind(stub), tokenizeRequest(text, options.model ?? ""), options);
  }

  /** Return the models that the mesh serves. */
  async listModels(options: CallOptions = {}): Promise<Model[]> {
    return (await this.#unary((stub) => stub.listModels.bind(stub), {}, options)).models;
  }

  /** Give up what workers retain for a session, those of one model or all. Idempotent: an unknown session has nothing. */
  async releaseSession(sessionId: string, options: Named & { tenant?: string } = {}): Promise<ReleaseSessionResponse> {
    const request = { sessionId, tenant: options.tenant ?? "", model: options.model ?? "" };
    return this.#unary((stub) => stub.releaseSession.bind(stub), request, options);
  }

  /** Return a router's view of the mesh. */
  async status(options: CallOptions = {}): Promise<GetStatusResponse> {
    return this.#unary((stub) => stub.getStatus.bind(stub), {}, options);
  }

  /** Return why requests were placed as they were. */
  async explain(request: ExplainRequest, options: CallOptions = {}): Promise<ExplainResponse> {
    return this.#unary((stub) => stub.explain.bind(stub), request, options);
  }

  /** Load a LoRA adapter on every worker of a model, from a folder as the workers see it. */
  async loadAdapter(name: string, folder: string, options: Named = {}): Promise<MeshAdapter> {
    const request = LoadAdapterRequest.fromPartial({ model: options.model ?? "", name, folder });
    return this.#unary((stub) => stub.loadAdapter.bind(stub), request, options);
  }

  /** Unload a LoRA adapter on every worker of a model; running requests go on to their end. */
  async unloadAdapter(name: string, options: Named = {}): Promise<MeshAdapter> {
    return this.#unary((stub) => stub.unloadAdapter.bind(stub), { model: options.model ?? "", name }, options);
  }

  /** Return the LoRA adapters of all models, with the workers that have them. */
  async listAdapters(options: CallOptions = {}): Promise<ListMeshAdaptersResponse> {
    return this.#unary((stub) => stub.listAdapters.bind(stub), {}, options);
  }

  /** Close the connections; running calls end with Cancelled. */
  close(): void {
    this.#closing.abort(new Error("the client was closed"));
    for (const stub of this.#stubs) stub.close();
  }

  #stream(request: Request, options: CallOptions): Stream {
    const metadata = this.#metadata(options);
    const open = (address: number, message: Request, timeLeftMs: number | undefined): Call => {
      const stub = this.#stub(address);
      const [sent, call] = [metadata.clone(), { deadline: deadlineIn(timeLeftMs) }];
      const running =
        message.method === "chat" ? stub.chat(message.message, sent, call) : stub.generate(message.message, sent, call);
      return new StreamCall(running, new ConnectTimeout(stub, this.routers[address], () => running.cancel()));
    };
    const answered = (address: number) => {
      this.#preferred = address;
    };
    // Other calls need not find out for themselves that a router is lost.
    const lost = (address: number, following: number) => {
      if (this.#preferred === address) this.#preferred = following;
    };
    return new Stream(open, request, this.#retrier(options.timeoutMs), answered, lost, this.#signal(options));
  }

  async #unary<Q, R>(method: (stub: MeshClient) => Unary<Q, R>, request: Q, options: CallOptions): Promise<R> {
    const retrier = this.#retrier(options.timeoutMs);
    const [metadata, signal] = [this.#metadata(options), this.#signal(options)];
    for (;;) {
      const stub = this.#stub(retrier.address);
      try {
        const response = await this.#once(stub, method(stub), request, metadata.clone(), retrier, signal);
        this.#preferred = retrier.address;
        return response;
      } catch (error) {
        if (!(error instanceof CallFailed)) throw error;
        if (signal.aborted) throw cancelled(signal);
        const delay = retrier.failed(unasked(error.failure), performance.now());
        await sleep(delay, undefined, { signal }).catch(() => undefined);
      }
    }
  }

  /** Make one attempt at a unary call. Rejects with CallFailed. */
  #once<Q, R>(
    stub: MeshClient,
    call: Unary<Q, R>,
    request: Q,
    metadata: Metadata,
    retrier: Retrier,
    signal: AbortSignal,
  ): Promise<R> {
    if (signal.aborted) throw cancelled(signal);
    return new Promise<R>((resolve, reject) => {
      const timeLeft = retrier.timeLeft(performance.now());
      const running = call(request, metadata, { deadline: deadlineIn(timeLeft) }, (error, response) => {
        connecting.end();
        signal.removeEventListener("abort", cancel);
        if (error === null) resolve(response);
        else reject(new CallFailed(connecting.failure ?? errorFromStatus(error)));
      });
      const cancel = () => running.cancel();
      const connecting = new ConnectTimeout(stub, this.routers[retrier.address], cancel);
      signal.addEventListener("abort", cancel, { once: true });
    });
  }

  #stub(address: number): MeshClient {
    if (this.#closing.signal.aborted) throw cancelled(this.#closing.signal);
    return this.#stubs[address] as MeshClient;
  }

  #retrier(timeoutMs: number | undefined): Retrier {
    return new Retrier(this.#policy, this.routers.length, this.#preferred, performance.now(), timeoutMs);
  }

  /** Return what ends a call: the client's own end, or the caller's signal. */
  #signal(options: CallOptions): AbortSignal {
    return options.signal === undefined ? this.#closing.signal : AbortSignal.any([this.#closing.signal, options.signal]);
  }

  #metadata(options: CallOptions): Metadata {
    const metadata = new Metadata();
    for (const [key, value] of Object.entries({ ...options.metadata, ...this.#headers })) metadata.set(key, value);
    return metadata;
  }
}

function deadlineIn(timeLeftMs: number | undefined): number {
  return timeLeftMs === undefined ? Infinity : Date.now() + timeLeftMs;
}

function cancelled(signal: AbortSignal): MeshError {
  return new Cancelled(status.CANCELLED, "the call was cancelled", { cause: signal.reason });
}

/** Return an API key that is valid in metadata. The error does not show it. */
function checkedKey(apiKey: string): string {
  if (/^[\x21-\x7e]+$/.test(apiKey)) return apiKey;
  throw invalidArgument("apiKey", "contains characters that no key has; give it as `pdmesh keys new` has shown it");
}

/**
 * Ends a call whose connection is not there in time: grpc-js has no limit of its own, and a router behind a dead host would be
 * waited for as long as the system tries to reach it.
 */
class ConnectTimeout {
  failure: MeshError | undefined;
  #ended = false;

  constructor(stub: MeshClient, address: string | undefined, cancel: () => void) {
    const [channel, deadline] = [stub.getChannel(), Date.now() + CONNECT_TIMEOUT_MS];
    const watch = (state: connectivityState) => {
      if (state === connectivityState.READY || state === connectivityState.SHUTDOWN || this.#ended) return;
      channel.watchConnectivityState(state, deadline, (expired) => {
        if (expired === undefined) return watch(channel.getConnectivityState(false));
        if (this.#ended) return;
        this.failure = meshError(status.UNAVAILABLE, `no connection to ${address} within ${CONNECT_TIMEOUT_MS} ms`);
        cancel();
      });
    };
    watch(channel.getConnectivityState(false));
  }

  end(): void {
    this.#ended = true;
  }
}

/** The messages of a call, one at a time. What has arrived is read before the call's error is thrown. */
class StreamCall implements Call {
  readonly #call: ClientReadableStream<GenerateResponse>;
  readonly #connecting: ConnectTimeout;
  #error: MeshError | undefined;
  #ended = false;
  #wake: () => void = () => undefined;

  constructor(call: ClientReadableStream<GenerateResponse>, connecting: ConnectTimeout) {
    this.#call = call;
    this.#connecting = connecting;
    call.on("readable", () => this.#wake());
    call.on("end", () => this.#finish());
    call.on("error", (error: ServiceError) => this.#finish(error));
  }

  async read(): Promise<GenerateResponse | undefined> {
    for (;;) {
      const message = this.#call.read() as GenerateResponse | null;
      if (message !== null) {
        this.#connecting.end();
        return message;
      }
      if (this.#error !== undefined) throw new CallFailed(this.#error);
      if (this.#ended) return undefined;
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    }
  }

  cancel(): void {
    this.#connecting.end();
    this.#call.cancel();
  }

  #finish(error?: ServiceError): void {
    this.#connecting.end();
    this.#ended = true;
    if (error !== undefined) this.#error = this.#connecting.failure ?? errorFromStatus(error);
    this.#wake();
  }
}
