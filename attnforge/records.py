"""The base class of records that are stored as JSON."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A record whose fields are typed and checked; fields that it does not have are refused."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
