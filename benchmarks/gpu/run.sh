#!/bin/sh
# Correctness and speed on one GPU, in 8 minutes, on a machine from which nothing can be fetched:
#
#     benchmarks/gpu/run.sh [--only PART[,PART]] [--output FILE] [--resume] [--limit SECONDS]
#
# Needed there: Python 3.12 (PYTHON=, by default python3) with torch, Triton and transformers. The rest comes from the wheels that
# `make bench-gpu` put into benchmarks/gpu/wheels/ elsewhere; they go to a folder of their own, and away at the end. Triton wants a
# C compiler; what it compiles stays in its cache (TRITON_CACHE_DIR). With --only, name `compile` before parts that find none there.
# Exit status: 0, 1 (something is not equal, or a part failed), 3 (what is missing stands in one line).
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
started=$(date +%s)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
child=
trap '[ -z "$child" ] || { kill -TERM "$child"; wait "$child" || true; }; exit 143' TERM INT
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "missing: $python is no Python >= 3.11; give PYTHON=" >&2
    exit 3
fi
tag=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$tag" = 3.12 ] && ls benchmarks/gpu/wheels/*.whl >/dev/null 2>&1; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links benchmarks/gpu/wheels --no-deps \
        --no-compile --no-cache-dir --target "$scratch/site" benchmarks/gpu/wheels/*.whl
    PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 "$python" -m benchmarks.gpu --started "$started" "$@" &
child=$!
status=0
wait "$child" || status=$?
exit "$status"
