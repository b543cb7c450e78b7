"""Typed access to a JSON object of a model's description."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime_service.models.errors import ModelConfigError, UnsupportedModelError


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelConfigError: it cannot be read, or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(path, "", f"cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelConfigError(path, "", f"holds a {type(data).__name__}, not an object")
    return data


class ConfigReader:
    """Typed access to one JSON object; every complaint names file, key and value."""

    def __init__(self, path: Path | str, data: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.data = data
        self.prefix = prefix

    def fail(self, key: str, problem: str) -> ModelConfigError:
        """The error that this key is wrong."""
        return ModelConfigError(self.path, self.prefix + key, problem)

    def unsupported(self, key: str, value: object, supported: str) -> UnsupportedModelError:
        """The error that this value is not implemented."""
        return UnsupportedModelError(self.path, self.prefix + key, value, supported)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` when the key is absent or null."""
        value = self.data.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1; without a default the key must be there."""
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "missing, an integer of at least 1 is needed")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, f"{value!r} is not an integer of at least 1")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; without a default the key must be there."""
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "missing, a number above 0 is needed")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, f"{value!r} is not a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"{value!r} is neither true nor false")
        return value

    def section(self, key: str) -> ConfigReader | None:
        """The object under `key`; None when it is absent, null or empty."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"{value!r} is not an object")
        return ConfigReader(self.path, value, f"{self.prefix}{key}.")
