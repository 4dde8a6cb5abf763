/** The errors of the client: each is a MeshError with a gRPC status code; subclasses say what a caller can do about it. */

import { BinaryReader } from "@bufbuild/protobuf/wire";
import { Metadata, status, type StatusObject } from "@grpc/grpc-js";

interface Details {
  /** The field of the request that is at fault. */
  field?: string | undefined;
  /** When to try again. */
  retryDelayMs?: number | undefined;
  /** A word for programs, where one code has several causes. */
  reason?: string | undefined;
  cause?: unknown;
}

/** An error of a call. `field`, `retryDelayMs` and `reason` are what the mesh says of it, if it says so. */
export class MeshError extends Error {
  readonly field: string | undefined;
  readonly retryDelayMs: number | undefined;
  readonly reason: string | undefined;

  constructor(
    readonly code: status,
    message: string,
    details: Details = {},
  ) {
    super(message, { cause: details.cause });
    this.name = new.target.name;
    this.field = details.field;
    this.retryDelayMs = details.retryDelayMs;
    this.reason = details.reason;
  }
}

/** The request is wrong, whatever the state of the mesh; `field` names what is at fault. */
export class InvalidArgument extends MeshError {}
/** The model is not served here. */
export class NotFound extends MeshError {}
/** There is no capacity now. Without `retryDelayMs` there never is: the request is too large, or its reader too slow. */
export class Overloaded extends MeshError {}
/** No router answers, or no worker. */
export class Unavailable extends MeshError {}
/** The caller has cancelled the call; `cause` is the reason of its signal. */
export class Cancelled extends MeshError {}
/** The caller's deadline has passed. */
export class DeadlineExceeded extends MeshError {}
/** A bug of the mesh; the message holds the id under which its log has more. */
export class Internal extends MeshError {}

const CLASSES = new Map<status, typeof MeshError>([
  [status.INVALID_ARGUMENT, InvalidArgument],
  [status.NOT_FOUND, NotFound],
  [status.RESOURCE_EXHAUSTED, Overloaded],
  [status.UNAVAILABLE, Unavailable],
  [status.CANCELLED, Cancelled],
  [status.DEADLINE_EXCEEDED, DeadlineExceeded],
  [status.INTERNAL, Internal],
]);

/** Return the error of that code. */
export function meshError(code: status, message: string, details: Details = {}): MeshError {
  return new (CLASSES.get(code) ?? MeshError)(code, message, details);
}

export function invalidArgument(field: string, message: string, cause?: unknown): MeshError {
  return meshError(status.INVALID_ARGUMENT, message, { field, cause });
}

/** Return the error that a call ended with, with the details that came behind its status. */
export function errorFromStatus(ended: Pick<StatusObject, "code" | "details"> & { metadata?: Metadata | undefined }): MeshError {
  const code = isBrokenConnection(ended) ? status.UNAVAILABLE : ended.code;
  return meshError(code, ended.details || status[code] || "", detailsOf(ended.metadata));
}

/** Return whether a connection broke where grpc-js says INTERNAL: while it wrote (EPIPE). No status of a router reads so. */
function isBrokenConnection(ended: Pick<StatusObject, "code" | "details">): boolean {
  return ended.code === status.INTERNAL && ended.details.includes("triggered by internal client error");
}

// grpc-js delivers google.rpc.Status as bytes. Its messages are read by the numbers of their fields, which do not change: of them
// three are needed. A detail that cannot be read is as good as none.

function detailsOf(metadata: Metadata | undefined): Details {
  const [encoded] = metadata?.get("grpc-status-details-bin") ?? [];
  const found: Details = {};
  if (!(encoded instanceof Uint8Array)) return found;
  try {
    for (const detail of fieldsOf(encoded).bytes(3)) readDetail(fieldsOf(detail), found);
  } catch {
    return found;
  }
  return found;
}

function readDetail(any: Fields, found: Details): void {
  const kind = any.text(1).split("/").at(-1);
  const message = fieldsOf(any.bytes(2)[0] ?? new Uint8Array());
  if (kind === "google.rpc.ErrorInfo") {
    const pairs = message.bytes(3).map((pair) => fieldsOf(pair));
    const metadata = new Map(pairs.map((pair) => [pair.text(1), pair.text(2)]));
    found.field = metadata.get("field");
    found.reason = metadata.get("reason");
  } else if (kind === "google.rpc.RetryInfo") {
    const delay = fieldsOf(message.bytes(1)[0] ?? new Uint8Array());
    found.retryDelayMs = delay.number(1) * 1000 + delay.number(2) / 1e6;
  }
}

class Fields {
  readonly #found = new Map<number, (Uint8Array | number)[]>();

  add(field: number, value: Uint8Array | number): void {
    this.#found.set(field, [...(this.#found.get(field) ?? []), value]);
  }

  bytes(field: number): Uint8Array[] {
    return (this.#found.get(field) ?? []).filter((value) => value instanceof Uint8Array);
  }

  text(field: number): string {
    return new TextDecoder().decode(this.bytes(field).at(-1));
  }

  number(field: number): number {
    const value = this.#found.get(field)?.at(-1);
    return typeof value === "number" ? value : 0;
  }
}

const [VARINT, LENGTH_DELIMITED] = [0, 2];

function fieldsOf(message: Uint8Array): Fields {
  const reader = new BinaryReader(message);
  const fields = new Fields();
  while (reader.pos < reader.len) {
    const [field, type] = reader.tag();
    if (type === VARINT) fields.add(field, Number(reader.int64()));
    else if (type === LENGTH_DELIMITED) fields.add(field, reader.bytes());
    else reader.skip(type);
  }
  return fields;
}
