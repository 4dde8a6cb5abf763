"""Other engines to measure against, each in an environment and a process of its own.

`catalogue` says who takes part, `environments` installs them, `weights` makes the model files that they read, `process` drives
a child over JSON lines. The `child_*` modules run under the peers' own Pythons: beside the peer they import only `child`.
"""
