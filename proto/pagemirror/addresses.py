"""Addresses to listen on or to call: `host:port`, `[ipv6]:port` or `unix:/path`."""

from __future__ import annotations

import ipaddress


def is_local(address: str) -> bool:
    """Whether only this machine can reach `address`: a unix socket, or a loopback host with a port."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
