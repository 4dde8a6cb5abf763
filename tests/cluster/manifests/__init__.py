"""Everything that the manifests come to, checked by others' tools: Kubernetes' own schemas, and a linter for security.

python -m tests.cluster.manifests --cache FOLDER

Each tool has an environment of its own in the cache, in a version that is pinned here. Prints one line of JSON for each check;
exit code 1 where one finds something.
"""
