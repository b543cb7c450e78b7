"""The runtime's certificates, and what is said of one that cannot be used."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from pagemirror.certificates import ServerCertificates
from runtime_service.errors import SettingError


class TlsFiles(ServerCertificates):
    """With `ca`, schedulers must show a certificate that descends from it; without, whoever connects is served. What uses the
    files raises SettingError, which names the option.
    """

    @staticmethod
    @override
    def fail(role: str, path: Path, reason: str) -> SettingError:
        return SettingError(f"--tls-{role}", path, reason)
