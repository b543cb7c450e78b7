"""What can go wrong in the runtime.

    RuntimeServiceError
    ├── SettingsError      our operator's fault: settings cannot be used
    │   └── SettingError   one setting, or this machine, does not allow what was asked for
    ├── AddressInUseError  our operator's fault: somebody else listens there
    └── Refusal            the scheduler's fault (or, for STEP_FAILED and OUT_OF_MEMORY, ours): an op is not executed

A `Refusal` is also a value: it is what the runtime answers instead of a result.
"""

from __future__ import annotations

from typing import Any, TypeVar

from runtime_service.ops import RefusalCode

_Error = TypeVar("_Error", bound="RuntimeServiceError")

MAX_DETAIL_BYTES = 1024
"""Longest `Refusal.detail` and longest message of a status, in bytes of UTF-8."""
MAX_REQUEST_ID_LEN = 256
"""Longest request id, in characters."""


def shorten(text: str, most: int = MAX_DETAIL_BYTES) -> str:
    """`text`, cut to `most` bytes of UTF-8 with an ellipsis at the end; what UTF-8 cannot say becomes a question mark."""
    data = text.encode("utf-8", "replace")
    return data.decode() if len(data) <= most else data[: most - 3].decode("utf-8", "ignore") + "…"


class RuntimeServiceError(Exception):
    """Base of everything the runtime raises on purpose. Its errors can be copied, and pickled into another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an exception is made again from its text, which is not what these are made of.
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[_Error], args: tuple[object, ...]) -> _Error:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class SettingsError(RuntimeServiceError):
    """One or more settings cannot be used; `str()` has one line for each, with its value and its limit."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class SettingError(SettingsError):
    """A setting has a value that cannot be used; `str()` names the setting, the value and the limit."""

    def __init__(self, setting: str, value: object, limit: str) -> None:
        super().__init__([f"{setting}: {value} {limit}"])
        self.setting = setting
        self.value = value
        self.limit = limit


class AddressInUseError(RuntimeServiceError):
    """The address to listen on is taken, or cannot be bound."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot listen on {address}: {reason}")
        self.address = address
        self.reason = reason


class Refusal(RuntimeServiceError):
    """Why an op was not executed, or failed: one `RefusalCode`, the row and request to blame, and a sentence for people.

    `row` is 0 and `request_id` empty when none is to blame. `detail` names row, request, value and limit, and is cut to
    `MAX_DETAIL_BYTES` of UTF-8. `session_no` and `step` are those of the op.
    """

    def __init__(
        self,
        code: RefusalCode,
        row: int = 0,
        request_id: str = "",
        detail: str = "",
        *,
        session_no: int = 0,
        step: int = 0,
    ) -> None:
        detail = shorten(detail)
        super().__init__(f"{code.name}: {detail}")
        self.code = code
        self.row = row
        self.request_id = request_id
        self.detail = detail
        self.session_no = session_no
        self.step = step
