# Images of pdmesh. No step needs a secret; packages come from pip's index and Debian's; torch from the index in TORCH_INDEX.
#
#   docker build --target router -t pdmesh-router:0.1.0 .              # router, command line, load test: no torch
#   docker build --target autoscaler -t pdmesh-autoscaler:0.1.0 .      # with the Kubernetes client: no torch
#   docker build --target worker-cpu --build-arg TORCH_INDEX=… -t pdmesh-worker-cpu:0.1.0 .   # torch's index of CPU builds
#   docker build --target worker-cuda -t pdmesh-worker-cuda:0.1.0 .
#   docker build --target worker-vllm -t pdmesh-worker-vllm:0.1.0 .    # for GPUs, with vLLM as the engine
#   docker build --target model-smollm2 -t pdmesh-model-smollm2:0.1.0 .
#
# tests/cluster/images runs these steps in plain folders and starts the results, where there is no Docker.
#
# Packages are pinned by requirements.lock (torch pins CUDA's itself), and each image lists its own in /opt/pdmesh/sbom.cdx.json
# (SECURITY.md). They are installed before the code is copied, so that another version of the code is a small layer. The longer steps are in k8s/docker/, where they run without Docker, too.

ARG PYTHON=3.13

FROM python:${PYTHON}-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PATH=/opt/pdmesh/bin:$PATH
# By name, too: some libraries look up their user. A pod's root file system is read-only, its /tmp is not.
RUN groupadd --gid 10001 pdmesh \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin pdmesh

FROM base AS packages
WORKDIR /src
COPY pyproject.toml requirements.lock ./
COPY k8s/docker k8s/docker

# Router, command line, load test.

FROM packages AS router-build
RUN sh k8s/docker/install.sh /opt/pdmesh services,loadtest
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation . && python k8s/docker/sbom.py

FROM base AS router
COPY --from=router-build /opt/pdmesh /opt/pdmesh
USER 10001:10001
EXPOSE 8100 8000
CMD ["python", "-m", "router"]

# Autoscaler.

FROM packages AS autoscaler-build
RUN sh k8s/docker/install.sh /opt/pdmesh autoscaler
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation . && python k8s/docker/sbom.py

FROM base AS autoscaler
COPY --from=autoscaler-build /opt/pdmesh /opt/pdmesh
USER 10001:10001
EXPOSE 50061
CMD ["python", "-m", "pdmesh.autoscaler"]

# Native code for every CPU of this architecture: a pod compiles nothing, and its image has no compiler.

FROM packages AS kernels
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m pip install --no-cache-dir -c requirements.lock numpy
COPY . .
RUN python -m pdmesh.engine.kernels.cpu.build --all --output /opt/pdmesh-kernels \
 && python -m kvtransfer.native.library --output /opt/pdmesh-kernels

# Workers.

FROM packages AS worker-cpu-build
# A package index with CPU builds of torch; without it torch brings CUDA along, and the image is gigabytes larger.
ARG TORCH_INDEX=
RUN sh k8s/docker/install.sh /opt/pdmesh worker
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation . && python k8s/docker/sbom.py

FROM base AS worker-cpu
COPY --from=kernels /opt/pdmesh-kernels /opt/pdmesh-kernels
COPY --from=worker-cpu-build /opt/pdmesh /opt/pdmesh
ENV PDMESH_KERNELS_DIR=/opt/pdmesh-kernels PDMESH_CACHE=/var/cache/pdmesh
USER 10001:10001
EXPOSE 50051 50052
CMD ["python", "-m", "pdmesh.worker"]

FROM packages AS worker-cuda-build
RUN sh k8s/docker/install.sh /opt/pdmesh worker
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation . && python k8s/docker/sbom.py

# When a worker starts, Triton compiles its kernel launchers in C; the cache keeps them.
FROM base AS with-compiler
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# CUDA's libraries come with torch; the driver's come from the node, through NVIDIA's container runtime.
FROM with-compiler AS worker-cuda
COPY --from=kernels /opt/pdmesh-kernels /opt/pdmesh-kernels
COPY --from=worker-cuda-build /opt/pdmesh /opt/pdmesh
ENV PDMESH_KERNELS_DIR=/opt/pdmesh-kernels PDMESH_CACHE=/var/cache/pdmesh
ENV TRITON_CACHE_DIR=/var/cache/pdmesh/triton
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 50051 50052
CMD ["python", "-m", "pdmesh.worker"]

# With vLLM as the engine. It pins torch and others by itself, so it has an environment of its own.

FROM packages AS worker-vllm-build
RUN PYTHON=python sh k8s/docker/install_vllm.sh /opt/pdmesh vllm==0.32.0 worker
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation . && python k8s/docker/sbom.py

# When a worker starts, torch compiles the model's graphs: host code in C++.
FROM with-compiler AS with-cxx
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# FlashInfer's sampler would compile with nvcc, which is not here: vLLM's own draws.
FROM with-cxx AS worker-vllm
COPY --from=kernels /opt/pdmesh-kernels /opt/pdmesh-kernels
COPY --from=worker-vllm-build /opt/pdmesh /opt/pdmesh
ENV PDMESH_ENGINE=vllm PDMESH_KERNELS_DIR=/opt/pdmesh-kernels PDMESH_CACHE=/var/cache/pdmesh
ENV VLLM_CACHE_ROOT=/var/cache/pdmesh/vllm VLLM_CONFIG_ROOT=/tmp/vllm VLLM_USE_FLASHINFER_SAMPLER=0
ENV TRITON_CACHE_DIR=/var/cache/pdmesh/triton TORCHINDUCTOR_CACHE_DIR=/var/cache/pdmesh/inductor
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 50051 50052
CMD ["python", "-m", "pdmesh.worker"]

# A model's folder as /model, to be copied by an init container. This one is SmolLM2-135M-Instruct (Apache-2.0).

FROM worker-cpu-build AS model-build
RUN python -m pip install --no-cache-dir -c requirements.lock transformers sentencepiece
RUN PDMESH_CACHE=/cache python -m pdmesh.models fetch smollm2-135m-instruct

FROM base AS model-smollm2
COPY --from=model-build /cache/models/smollm2-135m-instruct /model
USER 10001:10001
CMD ["ls", "-l", "/model"]
