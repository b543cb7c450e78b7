"""Ask a gRPC server for its health: exit status 0 if it says SERVING, 1 otherwise. For container health checks.

usage: grpc_health_probe.py HOST:PORT|unix:/PATH [SERVICE]

For a server with TLS set PROBE_TLS_CA to the file of its authority, where it asks for a client certificate also PROBE_TLS_CERT
and PROBE_TLS_KEY, and where the certificate is not for HOST the name that it is for as PROBE_TLS_NAME. No token is needed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def probe(address: str, service: str = "") -> str:
    """The server's status by name, for instance SERVING; the reason in words when it does not answer."""
    with channel(address) as connection:
        try:
            stub = health_pb2_grpc.HealthStub(connection)
            question = health_pb2.HealthCheckRequest(service=service)
            answer = stub.Check(question, timeout=TIMEOUT_S, wait_for_ready=True)  # type: ignore[attr-defined]  # not in the stubs
        except grpc.RpcError as error:
            return f"no answer from {address} within {TIMEOUT_S:g} s: {error.code().name}"
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def channel(address: str) -> grpc.Channel:
    """A channel to the server, with TLS where the environment names an authority."""
    # Proxy variables of the container must not send a loopback call elsewhere.
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    ca, cert, key = (pem(f"PROBE_TLS_{name}") for name in ("CA", "CERT", "KEY"))
    if ca is None:
        return grpc.insecure_channel(address, options=options)
    if name := os.environ.get("PROBE_TLS_NAME"):
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def pem(variable: str) -> bytes | None:
    """What is in the file that an environment variable names; None where it names none."""
    path = os.environ.get(variable)
    return Path(path).read_bytes() if path else None


def main() -> None:
    if len(sys.argv) not in {2, 3}:
        raise SystemExit(__doc__)
    status = probe(*sys.argv[1:])
    print(status)
    raise SystemExit(0 if status == "SERVING" else 1)


if __name__ == "__main__":
    main()
