"""Errors a user can meet. Each says what was given, what would be accepted and, where there is one,
the switch to change."""


class _Refused(ValueError):
    """args are (what, got, rule), all strings, so that a process pool can pickle it."""

    verb = "is"

    def __str__(self) -> str:
        what, got, rule = self.args
        return f"{what} {self.verb} {got}, but it must be {rule}"


class ConfigError(_Refused):
    """Says which field is wrong, what it held, and what would be accepted."""

    verb = "="

    def __init__(self, field: str, got: object, rule: str) -> None:
        super().__init__(field, repr(got), rule)

    def __reduce__(self) -> tuple:
        return self.__class__.__new__, (self.__class__, *self.args)


class InputError(_Refused):
    """Says which argument of a call is wrong, what it was, and what would be accepted."""

    def __init__(self, argument: str, got: object, rule: str) -> None:
        super().__init__(argument, str(got), rule)


class BackendUnavailable(RuntimeError):
    """A backend was asked for that cannot run here: says what is missing and what to install or
    choose instead."""


class RecomputationMismatch(RuntimeError):
    """Activation checkpointing routed a token differently the second time, so gradients would be
    wrong."""
