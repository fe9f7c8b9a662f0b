"""Base class of records stored as JSON, and an estimate with its interval."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A record with typed, validated fields; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class Interval(Record):
    """An estimate and its 95% interval; with a single reading both ends equal the value."""

    value: float
    low: float
    high: float
