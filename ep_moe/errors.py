"""Errors a user can meet. Each says what was given, what would be accepted and, where there is one,
the switch to change."""


class _Picklable(Exception):
    """Its constructor takes something else than args; a process pool makes it again without."""

    def __reduce__(self) -> tuple:
        return self.__class__.__new__, (self.__class__, *self.args), vars(self)


class _Refused(_Picklable, ValueError):
    """args are (what, got, rule), all strings."""

    verb = "is"

    def __str__(self) -> str:
        what, got, rule = self.args
        return f"{what} {self.verb} {got}, but it must be {rule}"


class ConfigError(_Refused):
    """Says which field is wrong, what it held, and what would be accepted."""

    verb = "="

    def __init__(self, field: str, got: object, rule: str) -> None:
        super().__init__(field, repr(got), rule)


class InputError(_Refused):
    """Says which argument of a call is wrong, what it was, and what would be accepted."""

    def __init__(self, argument: str, got: object, rule: str) -> None:
        super().__init__(argument, str(got), rule)


class BackendUnavailable(RuntimeError):
    """A backend was asked for that cannot run here: says what is missing and what to install or
    choose instead."""


class ReentrantCheckpoint(RuntimeError):
    """A checkpoint with use_reentrant=True around a layer, which would lose gradients in silence:
    use_reentrant=False is the switch."""


class RecomputationMismatch(RuntimeError):
    """Activation checkpointing routed a token differently the second time, so gradients would be
    wrong."""


class PeerLost(_Picklable, RuntimeError):
    """A rank that this one needs is gone: says which, why as far as that is known, and what this
    rank was waiting for. Ranks are global ones."""

    def __init__(self, rank: int, peer: int, *, stage: str, why: str) -> None:
        super().__init__(f"rank {rank} lost rank {peer} at {stage}: rank {peer} {why}")
        self.rank, self.peer, self.stage = rank, peer, stage


class DispatchTimeout(_Picklable, RuntimeError):
    """Somebody waited for longer than the timeout of the group: says who, for what, and where the
    others were. `first` is the rank that gave up first; without it the others cannot go on."""

    def __init__(self, rank: int, first: int, *, stage: str, why: str) -> None:
        reason = f"rank {first} {why}"
        super().__init__(
            reason if first == rank else f"rank {rank} gave up at {stage}, because {reason}"
        )
        self.rank, self.first, self.stage = rank, first, stage


class CallMismatch(RuntimeError):
    """With EP_MOE_CHECK=1: ranks of one group are about to exchange different things, because they
    call their layers in a different order or number."""


class SplitMismatch(_Picklable, RuntimeError):
    """With EP_MOE_CHECK=1: a rank would send another number of rows than its peer expects.

    `bad` holds (source, destination, sent, expected), ranks of the group.
    """

    def __init__(self, bad: list[tuple[int, int, int, int]], stage: str) -> None:
        pairs = "; ".join(
            f"rank {source} sends rank {destination} {sent} rows, which expects {expected}"
            for source, destination, sent, expected in bad
        )
        super().__init__(f"splits disagree at {stage}: {pairs}")
        self.bad = bad
