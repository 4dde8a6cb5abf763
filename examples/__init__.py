"""Programs that call a mesh, each complete and short enough to be copied: `python -m examples.async_stream 127.0.0.1:8100`.

`pdmesh up` starts a mesh and prints the address of its router. With the client library (`pip install pdmesh`): async_stream,
sync_stream, deadline, cancel, retry. With the generated stubs alone: plain_grpc. With neither: reflection, and shell.sh.
"""
