"""The Dockerfile's steps, carried out without Docker: layers are folders, RUN is a chroot. Needs root.

python -m tests.cluster.images --cache FOLDER [--bind FOLDER …] [TARGET …]

Prints one line of JSON for each image: what it weighs, and what was seen of its program.
"""
