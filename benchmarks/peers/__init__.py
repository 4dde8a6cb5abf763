"""Other engines and systems to measure against, each in an environment and in processes of its own: the one way to run them.

`environments` says who takes part and installs them, `weights` makes the model files that they read. `servers` runs their servers
(with `keeper`, which leaves nothing of them behind) and drives child processes over JSON lines; `systems` are servers as a load
test asks them. `children` and `llama` run under the peers' own Pythons: beside the peer they import only `child`, the protocol.
"""
