"""What every stored record is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Typed, checked, and nothing in it that the schema does not know."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)
