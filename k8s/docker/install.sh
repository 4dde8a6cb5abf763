#!/bin/sh
# install.sh VENV EXTRAS: a virtual environment at VENV with what pdmesh[EXTRAS] needs, in the versions of requirements.lock. Runs in
# the folder that holds pyproject.toml, requirements.lock and this folder k8s/docker. TORCH_INDEX names a package index for torch;
# without it torch comes from the usual one, which on Linux brings CUDA along.
set -eu
venv=$1
extras=$2
needed=$(mktemp)

pip_install() { "$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check "$@"; }

python -m venv "$venv"
# torch goes first and alone: resolved together with others it may become another build.
case ",$extras," in
  *,worker,*) pip_install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements.lock)" ;;
esac
"$venv/bin/python" k8s/docker/requirements.py "$extras" > "$needed"
pip_install -c requirements.lock setuptools -r "$needed"
rm "$needed"
