"""What all APIs over HTTP share: server, connections, headers, bodies as types, errors, and a request's way to its response."""
