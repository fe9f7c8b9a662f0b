"""Records that are stored as JSON: their base class, and an estimate."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A record whose fields are typed and checked; fields that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class Interval(Record):
    """An estimate and its 95% interval; both ends are the value itself where there is a single reading."""

    value: float
    low: float
    high: float
