"""Transfer of KV between workers: reservations, pushes, parts, checksums and transports. A library, not a process."""
