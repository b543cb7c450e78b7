# Two images from one file:
#   docker build --target scheduler -t pagemirror-scheduler .     no torch, no compiler
#   docker build --target runtime   -t pagemirror-runtime .       torch with CUDA, and a C compiler for Triton
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_INPUT=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
WORKDIR /src
COPY pyproject.toml constraints.txt ./

# The project's own wheel.
FROM base AS wheel
RUN pip install -c constraints.txt hatchling
COPY README.md LICENSE ./
COPY proto proto
COPY scheduler_service scheduler_service
COPY runtime_service runtime_service
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

# Dependencies come in a layer of their own, read from pyproject.toml: a change of the code does not fetch them again.
FROM base AS scheduler-env
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print('\n'.join(p['dependencies'] + p['optional-dependencies']['text']))" > requirements.txt \
 && pip install -c constraints.txt -r requirements.txt
COPY --from=wheel /dist /dist
RUN pip install --no-deps /dist/*.whl

FROM base AS runtime-env
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print('\n'.join(p['dependencies'] + p['optional-dependencies']['runtime']))" > requirements.txt \
 && pip install -c constraints.txt -r requirements.txt
COPY --from=wheel /dist /dist
RUN pip install --no-deps /dist/*.whl

# What both images have in common: a user without rights, and a way to ask for health.
FROM ${PYTHON_IMAGE} AS product
ENV PYTHONUNBUFFERED=1 \
    PATH=/opt/venv/bin:${PATH}
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/pagemirror --shell /usr/sbin/nologin pagemirror
COPY deploy/grpc_health_probe.py /opt/pagemirror/grpc_health_probe.py
WORKDIR /var/lib/pagemirror

FROM product AS runtime
# Triton compiles a small launcher in C for each kernel when it first runs on a GPU.
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY --from=runtime-env /opt/venv /opt/venv
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    OMP_WAIT_POLICY=PASSIVE \
    TRITON_CACHE_DIR=/var/lib/pagemirror/triton
USER pagemirror
EXPOSE 50061
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
  CMD ["python", "/opt/pagemirror/grpc_health_probe.py", "127.0.0.1:50061"]
ENTRYPOINT ["pagemirror", "runtime"]
# A container's network is its own until somebody publishes a port; whoever does gives certificates in place of --insecure.
CMD ["--listen", "0.0.0.0:50061", "--insecure", "--model", "fingerprint"]

# Last, so that it is what a build without --target makes.
FROM product AS scheduler
COPY --from=scheduler-env /opt/venv /opt/venv
USER pagemirror
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "/opt/pagemirror/grpc_health_probe.py", "127.0.0.1:50051"]
ENTRYPOINT ["pagemirror", "scheduler"]
CMD ["--listen", "0.0.0.0:50051", "--insecure", "--runtime", "runtime:50061"]
