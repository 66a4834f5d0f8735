"""Descriptors: a served value as an attribute of an envoy."""

from __future__ import annotations

from typing import Any

from nnsight.intervention.eproperty import eproperty
from nnsight.intervention.interleaver import Mediator

from ..errors import ArgumentError
from ..mixers import fitting
from .order import check_in_time, describe


class CallValue:
    """A value of a mixer's held call: read or assigned while the call is open, in any order.

    Args:
        doc: one line: shape and meaning.
        field: the name in the call, if it is not the attribute's.
        instead: for a value that is only read, what to use to write it.
    """

    def __init__(self, doc: str, field: str | None = None, instead: str | None = None) -> None:
        self.__doc__ = doc
        self.field = field or ""
        self.instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.field = self.field or name

    def __get__(self, envoy: Any, owner: type | None = None) -> Any:
        if envoy is None:
            return self
        call = envoy._call(self.name)
        return getattr(call, self.field) if self.instead else call.read(self.field)

    def __set__(self, envoy: Any, value: Any) -> None:
        if self.instead:
            raise ArgumentError(f"{describe(envoy)}.{self.name} is read-only: {self.instead}")
        envoy._call(self.name).write(self.field, value)


class InTime(eproperty):
    """A value that nnsight serves of any module, and never the next step's in silence."""

    @classmethod
    def of(cls, theirs: eproperty) -> InTime:
        ours = cls(theirs.key, theirs.description)
        ours.__dict__.update(theirs.__dict__)
        ours.__doc__ = theirs.__doc__
        return ours

    def __get__(self, envoy: Any, owner: Any = None) -> Any:
        if envoy is not None:
            check_in_time(envoy, self.key, self.name)
        return super().__get__(envoy, owner)

    def __set__(self, envoy: Any, value: Any) -> None:
        check_in_time(envoy, self.key, self.name)
        super().__set__(envoy, value)


class ModuleValue(eproperty):
    """The output of a module under its standard name, and never the next step's in silence.

    A module that returns a tuple is served, and written, by its first element. Where a norm stands between the module
    and the residual stream, it is the norm's output: what is added.
    """

    def __init__(self, doc: str) -> None:
        super().__init__(key="output", description=None)
        self.__doc__ = doc
        self._preprocess = lambda _, value: value[0] if isinstance(value, tuple) else value

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, envoy: Any, owner: Any = None) -> Any:
        if envoy is None:
            return self
        check_in_time(envoy, "output", self.name, at=_added_by(envoy))
        return super().__get__(_added_by(envoy), owner)

    def __set__(self, envoy: Any, value: Any) -> None:
        check_in_time(envoy, "output", self.name, at=_added_by(envoy))
        location = self._location(_added_by(envoy))
        served = Mediator.value(location)
        like = served[0] if isinstance(served, tuple) else served
        value = fitting(f"{describe(envoy)}.{self.name}", value, like.shape, like.dtype, like.device)
        Mediator.swap(location, (value, *served[1:]) if isinstance(served, tuple) else value)


def _added_by(envoy: Any) -> Any:
    """The envoy whose output is added to the residual stream: its own, or a norm's after it."""
    return vars(envoy).get("post_norm", envoy)
