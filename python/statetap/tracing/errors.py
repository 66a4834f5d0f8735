"""The one error that is nnsight's too, so it cannot live in `statetap.errors`."""

from nnsight.intervention.interleaver import OutOfOrderError as NnsightOutOfOrderError

from ..errors import Error


class OutOfOrderError(Error, NnsightOutOfOrderError):
    """A value was asked for after the model had passed it. Says which, where, at which step, and what to move."""
