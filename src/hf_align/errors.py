"""What can go wrong, by what the user must do about it. Every message is one line; the command line exits with 2."""


class HfAlignError(Exception):
    """Base of all errors that the user can mend."""

    shared = False
    """Raised in all processes of a run at once, so that one of them says it."""


class IncompatibleModels(HfAlignError):
    """The two models do not merge, or an architecture cannot be built or traced: choose other models."""


class CheckpointError(HfAlignError):
    """A checkpoint is missing, damaged or unsupported: fetch or convert it again."""


class OutputError(HfAlignError):
    """The output cannot be written: choose another folder, or make room."""
