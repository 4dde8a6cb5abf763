/**
 * The client of a pdmesh mesh.
 *
 *     const client = new Client("127.0.0.1:8100,127.0.0.1:8101");
 *     for await (const event of client.generateStream("Once upon a time", { maxTokens: 64, timeoutMs: 30_000 })) {
 *       if (event.type === "delta") process.stdout.write(event.text);
 *     }
 *     client.close();
 */

export { Client, type ClientOptions } from "./client.js";
export type { TlsOptions } from "./channel.js";
export {
  Cancelled,
  DeadlineExceeded,
  Internal,
  InvalidArgument,
  MeshError,
  NotFound,
  Overloaded,
  Unavailable,
} from "./errors.js";
export type { Stream } from "./stream.js";
export type * from "./types.js";
export type {
  ExplainRequest,
  ExplainResponse,
  GetStatusResponse,
  ListMeshAdaptersResponse,
  MeshAdapter,
} from "./gen/pdmesh/v1/mesh.js";
