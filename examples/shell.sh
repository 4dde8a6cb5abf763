#!/bin/sh
# Calls a mesh from the shell, with grpcurl or with buf, whichever is there; neither needs our .proto files: the router describes itself.
#
#   sh examples/shell.sh 127.0.0.1:8100
set -eu
router=${1:?give the address of a router, such as 127.0.0.1:8100}
body='{"text": "Once upon a time", "sampling": {"max_tokens": 8, "seed": "7"}}'

if command -v grpcurl >/dev/null; then
    grpcurl -plaintext "$router" list
    grpcurl -plaintext "$router" describe pdmesh.v1.Mesh
    grpcurl -plaintext -max-time 60 -d "$body" "$router" pdmesh.v1.Mesh/Generate
elif command -v buf >/dev/null; then
    buf curl --protocol grpc --http2-prior-knowledge "http://$router" --list-methods
    buf curl --protocol grpc --http2-prior-knowledge --data "$body" "http://$router/pdmesh.v1.Mesh/Generate"
else
    echo "neither grpcurl nor buf is here; python -m examples.reflection does the same" >&2
    exit 3
fi
