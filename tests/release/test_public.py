"""What is public stays: a name, field, flag or JSON key that goes needs an alias, as CONTRIBUTING.md says."""

from __future__ import annotations

import json
import re

import pytest

import attnforge
from attnforge.keywords import ALIASES
from tests.release.public import COMMAND, FILE, public

pytestmark = pytest.mark.xdist_group("cli")  # it changes the working directory


def has_alias(entry: str, now: set[str]) -> bool:
    """Whether an entry that is gone still works: a keyword by another name, or a name that is still imported."""
    if match := re.fullmatch(r"(python: .*)\((\w+)\)", entry):
        return f"{match[1]}({ALIASES.get(match[2])})" in now
    name = entry.removeprefix("python: ")
    return name.isidentifier() and hasattr(attnforge, name)


def compared(kept: set[str], now: set[str]) -> str:
    """What to do about the differences; empty if there is none."""
    gone = sorted(entry for entry in kept - now if not has_alias(entry, now))
    if gone:
        return f"public and gone, without an alias: {', '.join(gone)}; see `Deprecation` in CONTRIBUTING.md"
    return f"not in {FILE.name} as it is now: {', '.join(sorted(kept ^ now))}; run {COMMAND}" if kept != now else ""


def test_nothing_public_is_gone_and_the_snapshot_is_complete() -> None:
    assert not compared(set(json.loads(FILE.read_text(encoding="utf-8"))), set(public()))


def test_an_entry_may_go_only_if_its_alias_is_there() -> None:
    kept = {"python: load(bundle)", "command: verify --html", "python: deploy(target)", "python: bench"}
    now = {"python: load(bundle)", "command: verify --page", "python: deploy(targets)"}
    assert compared(kept, now).startswith("public and gone, without an alias: command: verify --html;")
    added = compared(kept, now | {"command: verify --html"})
    assert added.endswith(COMMAND) and "command: verify --page" in added and "gone" not in added
    assert not compared(now, now)
