"""What can be wrong with a model before it serves: every error names the offending value and says what to do.

RuntimeServiceError
└── ModelError                 our operator's fault: --model names something that cannot be served
    ├── ModelConfigError       config.json or generation_config.json cannot be used: a bad file, key or value
    ├── UnsupportedModelError  a model that is well described but not of a kind that is implemented
    └── WeightsError           the safetensors files are absent, damaged, or not those that config.json describes
"""

from __future__ import annotations

from pathlib import Path

from runtime_service.errors import RuntimeServiceError


class ModelError(RuntimeServiceError):
    """A model cannot be served."""


class ModelConfigError(ModelError):
    """A model's description is missing, damaged or contradictory.

    Attributes:
        path: the file, or a word for a description that came from no file.
        key: the key at fault, dotted for nested ones; empty when the file as a whole is.
    """

    def __init__(self, path: Path | str, key: str, problem: str) -> None:
        self.path = path
        self.key = key
        self.problem = problem
        super().__init__(f"{path}: {key + ': ' if key else ''}{problem}")


class UnsupportedModelError(ModelError):
    """A kind of model that is not implemented.

    Attributes:
        path: the file that says so.
        key: its key.
        value: what it asks for.
        supported: what there is instead.
    """

    def __init__(self, path: Path | str, key: str, value: object, supported: str) -> None:
        self.path = path
        self.key = key
        self.value = value
        self.supported = supported
        super().__init__(f"{path}: {key} {value!r} is not supported; supported: {supported}")


class WeightsError(ModelError):
    """Weights cannot be read, or are not those of the model.

    Attributes:
        path: the directory or file.
        problem: what is wrong.
        remedy: what to do.
    """

    def __init__(self, path: Path, problem: str, remedy: str) -> None:
        self.path = path
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{path}: {problem}. What to do: {remedy}.")
