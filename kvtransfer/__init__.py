"""Movement of KV between workers: reservations, sessions, parts, checksums and transports. A library, no process."""
