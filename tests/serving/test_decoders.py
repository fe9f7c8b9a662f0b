"""Decoders in servers: whole sequences in a Session, and no graphs whose caches the server would not keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnforge.errors import UnavailableError
from attnforge.serving.polygraphy.folder import package as for_polygraphy
from attnforge.serving.triton.options import Packaging
from attnforge.serving.triton.repository import package
from tests.support.decoders import DeployDecoder


def test_triton_serves_whole_sequences(decoders: DeployDecoder, tmp_path: Path) -> None:
    (made,) = package([decoders("rotary", "fp32")], tmp_path / "models", Packaging(preferred=()))
    assert made.max_batch == 4 and made.apart is None
    config = (tmp_path / "models" / made.name / "config.pbtxt").read_text(encoding="utf-8")
    assert "input_ids" in config and "cache" not in config and "past" not in config


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_a_backend_of_triton_that_keeps_no_caches_is_refused(
    decoders: DeployDecoder, tmp_path: Path, backend: str
) -> None:
    with pytest.raises(UnavailableError, match=rf"is a decoder, whose caches Triton's {backend} backend does not keep"):
        package([decoders("rotary", "fp32")], tmp_path / "models", Packaging(backend=backend, preferred=()))
    assert not (tmp_path / "models").exists()


def test_polygraphy_compares_the_session_alone(decoders: DeployDecoder, tmp_path: Path) -> None:
    made = for_polygraphy(decoders("rotary", "fp32"), tmp_path / "held")
    assert list(made.commands) == ["attnforge"]
