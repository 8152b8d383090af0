"""Errors a user can meet. Each says what was given, what would be accepted and, where there is one,
the switch to change."""


class ConfigError(ValueError):
    """Says which field is wrong, what it held, and what would be accepted."""

    def __init__(self, field: str, got: object, rule: str) -> None:
        super().__init__(f"{field} = {got!r}, but it must be {rule}")


class InputError(ValueError):
    """Says which argument of a call is wrong, what it was, and what would be accepted."""

    def __init__(self, argument: str, got: object, rule: str) -> None:
        super().__init__(f"{argument} is {got}, but it must be {rule}")


class BackendUnavailable(RuntimeError):
    """A backend was asked for that cannot run here: says what is missing and what to install or
    choose instead."""


class RecomputationMismatch(RuntimeError):
    """Activation checkpointing routed a token differently the second time, so gradients would be
    wrong."""
