"""What can happen in a scenario, one class for each kind of event. docs/scenario-files.md is the reference."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, model_validator

VOCAB_SIZE = 997
"""Of the fingerprint model, the only one that scenarios run."""

DEFAULT_MAX_TOKENS = 16


class Strict(BaseModel):
    """No unknown keys, no conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Submit(Strict):
    """A request arrives."""

    step: StrictInt = Field(ge=0)
    submit: str = Field(min_length=1)
    prompt: list[StrictInt]
    max_tokens: StrictInt = DEFAULT_MAX_TOKENS
    eos: list[StrictInt] = Field(default_factory=list)
    priority: StrictInt = 0
    prefix_cache: StrictBool = True
    namespace: str = ""
    output: list[Annotated[StrictInt, Field(ge=0, lt=VOCAB_SIZE)]] = Field(default_factory=list)


class Retract(Strict):
    """A running request loses its row."""

    step: StrictInt = Field(ge=0)
    retract: str = Field(min_length=1)


class Abort(Strict):
    """A client gives up."""

    step: StrictInt = Field(ge=0)
    abort: str = Field(min_length=1)


class Fail(Strict):
    """A request cannot be computed."""

    step: StrictInt = Field(ge=0)
    fail: str = Field(min_length=1)


class StepFailed(Strict):
    """A step in flight, the oldest being 1, could not be computed; a restart of the runtime follows."""

    step: StrictInt = Field(ge=0)
    step_failed: StrictInt = Field(ge=1)
    rows: list[StrictInt] = Field(default_factory=list)
    crashed: StrictBool = False


class ResetPrefixCache(Strict):
    """The prefix cache is emptied."""

    step: StrictInt = Field(ge=0)
    reset_prefix_cache: StrictBool
    force: StrictBool = False


class RestartRuntime(Strict):
    """The runtime comes back with empty memory."""

    step: StrictInt = Field(ge=0)
    restart_runtime: StrictBool


class FlushReleases(Strict):
    """Rows given back are told to the runtime in an op of their own."""

    step: StrictInt = Field(ge=0)
    flush_releases: StrictBool


class TokenBudget(Strict):
    """Steps become smaller, or larger again."""

    step: StrictInt = Field(ge=0)
    token_budget: StrictInt = Field(ge=1)


class Complete(Strict):
    """The scheduler is handed results, the oldest first; once in each step up to `until`."""

    step: StrictInt = Field(ge=0)
    complete: StrictInt = Field(ge=1)
    until: StrictInt | None = None

    @model_validator(mode="after")
    def _ends_after_its_begin(self) -> Complete:
        if self.until is not None and self.until < self.step:
            raise ValueError(f"until is {self.until}, but must be at least {self.step}, its step")
        return self


Event = (
    Submit | Retract | Abort | Fail | StepFailed | ResetPrefixCache | RestartRuntime | FlushReleases | TokenBudget | Complete
)

EVENT_TYPES: dict[str, type[Event]] = {
    "submit": Submit,
    "retract": Retract,
    "abort": Abort,
    "fail": Fail,
    "step_failed": StepFailed,
    "reset_prefix_cache": ResetPrefixCache,
    "restart_runtime": RestartRuntime,
    "flush_releases": FlushReleases,
    "token_budget": TokenBudget,
    "complete": Complete,
}
"""By the key that names the kind; its value is a request's id, true, or a number."""

REQUEST_KEYS = ("submit", "retract", "abort", "fail")
SWITCH_KEYS = ("reset_prefix_cache", "restart_runtime", "flush_releases")
