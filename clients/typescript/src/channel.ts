/** Addresses and connections. */

import { credentials, type ChannelCredentials, type ChannelOptions } from "@grpc/grpc-js";
import { invalidArgument } from "./errors.js";

export const DEFAULT_ADDRESS = "127.0.0.1:8100";
/** A router that takes a connection and then says nothing is given up after so long, as one that cannot be reached. */
export const CONNECT_TIMEOUT_MS = 1_000;

// While a call runs, a router is asked for a sign of life every keepalive_time, and has keepalive_timeout to give it: one that
// stands still is left after the sum. A restarted one is reconnected within max_reconnect_backoff. Each client has connections of
// its own: closing one does not affect another's.
const OPTIONS: ChannelOptions = {
  "grpc.keepalive_time_ms": 400,
  "grpc.keepalive_timeout_ms": 800,
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1_000,
  "grpc.max_receive_message_length": 64 << 20,
  "grpc.max_send_message_length": 64 << 20,
  "grpc.enable_http_proxy": 0,
  "grpc.use_local_subchannel_pool": 1,
};

/** Certificates in PEM. `cert` and `key` may be absent where the routers accept all clients. */
export interface TlsOptions {
  ca: string | Uint8Array;
  cert?: string | Uint8Array;
  key?: string | Uint8Array;
  /** The name in the routers' certificates, whatever their addresses. */
  serverName?: string;
}

/** Return the credentials and the options of the channels to all routers. */
export function connection(tls: TlsOptions | undefined): [ChannelCredentials, ChannelOptions] {
  if (tls === undefined) return [credentials.createInsecure(), OPTIONS];
  const { ca, cert, key, serverName = "pdmesh" } = tls;
  const pem = (text: string | Uint8Array | undefined) => (text === undefined ? null : Buffer.from(text));
  return [credentials.createSsl(pem(ca), pem(key), pem(cert)), { ...OPTIONS, "grpc.ssl_target_name_override": serverName }];
}

/** Return the routers to use, in order. A string may hold several, separated by commas. Throws InvalidArgument for none. */
export function addresses(given: string | readonly string[]): string[] {
  const names = typeof given === "string" ? given.split(",") : given;
  const found = names.map((name) => name.trim()).filter((name) => name !== "");
  if (found.length === 0) throw invalidArgument("routers", `name at least one address, such as ${DEFAULT_ADDRESS}`);
  return found;
}
