"""Altered bundle files with updated hashes in the manifest, so that only verification can detect them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from hypothesis import event, given
from hypothesis import strategies as st

from attnforge.bundle import CANONICAL, MANIFEST, PLAIN
from tests.fuzz.budget import tries
from tests.fuzz.changes import changed_bytes
from tests.fuzz.subject import Subject


@tries(few=15, many=2_000)
@given(data=st.data())
def test_a_file_is_accepted_rightly_or_refused_in_one_line(folder: Path, subject: Subject, data: st.DataObject) -> None:
    document = json.loads((folder / MANIFEST).read_text())
    name = data.draw(st.sampled_from(sorted(document["files"])))
    whole, manifest = (folder / name).read_bytes(), (folder / MANIFEST).read_bytes()
    changed = data.draw(changed_bytes(whole))
    try:
        (folder / name).write_bytes(changed)
        document["files"][name] = hashlib.sha256(changed).hexdigest()
        (folder / MANIFEST).write_text(json.dumps(document))
        answer = subject.ask("use_bundle", str(folder), str(folder.parent / "truth.npz"))
        if name in (CANONICAL, PLAIN):
            answer = subject.ask("explain_bundle", str(folder))
    finally:
        (folder / name).write_bytes(whole)
        (folder / MANIFEST).write_bytes(manifest)
    event(f"{name}: {answer.kind}, {answer.text if answer.kind == 'accepted' else ''}")
