# Three images from one file:
#   docker build --target scheduler -t pagemirror-scheduler .     no torch, no compiler; also has the gateway (smg)
#   docker build --target runtime   -t pagemirror-runtime .       torch with CUDA, and a C compiler for Triton
#   docker build --target fetch     -t pagemirror-fetch .         the runtime, and what turns a download into a model folder

FROM python:3.11-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_INPUT=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
WORKDIR /src
COPY constraints.txt ./

# What each image installs, from pyproject.toml. Dependencies come in a layer of their own, which is built anew when these lists
# or the constraints change, not with every change of the project.
FROM base AS requirements
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; e = p['optional-dependencies']; \
write = lambda name, lines: open(name + '.txt', 'w').write('\n'.join(lines)); \
write('scheduler', p['dependencies'] + e['text'] + e['gateway'] + e['events'] + e['tracing'] + e['fast']); \
write('runtime', p['dependencies'] + e['runtime'] + e['tracing']); \
write('fetch', e['convert'])"

# The project's own wheel.
FROM base AS wheel
RUN pip install -c constraints.txt hatchling
COPY pyproject.toml README.md LICENSE ./
COPY proto proto
COPY scheduler_service scheduler_service
COPY runtime_service runtime_service
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM base AS scheduler-env
COPY --from=requirements /src/scheduler.txt ./
RUN pip install -c constraints.txt -r scheduler.txt
COPY --from=wheel /dist /dist
RUN pip install --no-deps /dist/*.whl

FROM base AS runtime-env
# For an index that has a torch without CUDA; see docker-compose.cpu.yml.
ARG PIP_EXTRA_INDEX_URL
COPY --from=requirements /src/runtime.txt ./
RUN pip install -c constraints.txt -r runtime.txt
COPY --from=wheel /dist /dist
RUN pip install --no-deps /dist/*.whl

# What the images have in common: a user without rights, folders that are its own, and ways to ask for health. A volume that is
# new when it is mounted on one of these folders gets the folder's owner, so every image must have them, with the same user.
FROM python:3.11-slim-bookworm AS product
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PATH=/opt/venv/bin:${PATH}
RUN useradd --system --uid 10001 --user-group --create-home --home-dir /var/lib/pagemirror --shell /usr/sbin/nologin pagemirror \
 && install -d -o pagemirror -g pagemirror /models /var/lib/gateway /var/cache/pagemirror /var/cache/pagemirror/triton
COPY deploy/grpc_health_probe.py deploy/http_probe.py deploy/run_gateway.py deploy/join_gateway.py deploy/smoke.py /opt/pagemirror/
WORKDIR /var/lib/pagemirror

FROM product AS runtime
# Triton compiles a small launcher in C for each kernel when it first runs on a GPU. Python.h comes with the base image.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=runtime-env /opt/venv /opt/venv
# It loads what it has compiled as shared objects: the cache must not lie on a file system that is mounted noexec.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OMP_WAIT_POLICY=PASSIVE \
    TRITON_CACHE_DIR=/var/cache/pagemirror/triton
USER pagemirror
EXPOSE 50061
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
  CMD ["python", "/opt/pagemirror/grpc_health_probe.py", "127.0.0.1:50061"]
ENTRYPOINT ["pagemirror", "runtime"]
# A container's network is its own until somebody publishes a port; whoever does gives certificates in place of --insecure.
CMD ["--listen", "0.0.0.0:50061", "--insecure", "--model", "fingerprint"]

# Fetches a small model once, into a volume that the runtime reads: hence the same user, or it could not.
FROM runtime AS fetch
USER root
COPY constraints.txt /src/
COPY --from=requirements /src/fetch.txt /src/
RUN pip install --no-cache-dir --disable-pip-version-check -c /src/constraints.txt -r /src/fetch.txt
COPY tools/make_model.py /opt/pagemirror/make_model.py
USER pagemirror
HEALTHCHECK NONE
ENTRYPOINT ["python", "/opt/pagemirror/make_model.py"]
CMD ["/models/smollm2-135m-instruct"]

# Last, so that it is what a build without --target makes.
FROM product AS scheduler
COPY --from=scheduler-env /opt/venv /opt/venv
USER pagemirror
# GenerationService, the gateway's way in, OpenAI over HTTP where this image runs the gateway, metrics.
EXPOSE 50051 50052 8080 9400
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "/opt/pagemirror/grpc_health_probe.py", "127.0.0.1:50051"]
ENTRYPOINT ["pagemirror", "scheduler"]
CMD ["--listen", "0.0.0.0:50051", "--insecure", "--runtime", "runtime:50061"]
