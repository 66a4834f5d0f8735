"""The errors of statetap. Each message says what was wrong, where, and what to do.

`OutOfOrderError`, which is nnsight's too, is defined in `statetap.tracing`.
"""


class Error(Exception):
    """Anything that statetap raises on purpose."""


class ArgumentError(Error, ValueError):
    """An argument of the wrong type, shape, dtype or value; the message names it, what it got and what it needs."""


class OutOfRange(ArgumentError, IndexError):
    """An index outside of what there is, or of no kind that indexes."""


class Unavailable(Error):
    """A value that this layer, or the way it was loaded, does not have; the message has the reason."""


class UnsupportedCall(Error):
    """A backend that was asked for by name cannot take this call."""


class UnsupportedFamily(Error):
    """No family for this model, or its kernels are not in the installed transformers."""


class CaptureError(Error):
    """A sweep cannot go on: a bad input line, a full disk, a changed specification, a damaged shard."""
