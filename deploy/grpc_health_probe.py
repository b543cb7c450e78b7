"""Ask a gRPC server for its health: exit status 0 if it says SERVING, 1 otherwise. For container health checks.

usage: grpc_health_probe.py HOST:PORT|unix:/PATH [SERVICE]
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def probe(address: str, service: str = "") -> str:
    """The server's status by name, for instance SERVING; the reason in words when it does not answer."""
    # Proxy variables of the container must not send a loopback call elsewhere.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            question = health_pb2.HealthCheckRequest(service=service)
            answer = stub.Check(question, timeout=TIMEOUT_S, wait_for_ready=True)  # type: ignore[attr-defined]  # not in the stubs
        except grpc.RpcError as error:
            return f"no answer from {address} within {TIMEOUT_S:g} s: {error.code().name}"
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main() -> None:
    if len(sys.argv) not in {2, 3}:
        raise SystemExit(__doc__)
    status = probe(*sys.argv[1:])
    print(status)
    raise SystemExit(0 if status == "SERVING" else 1)


if __name__ == "__main__":
    main()
