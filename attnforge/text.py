"""Conversion between text and token ids with a bundle's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attnforge.bundle import Bundle
from attnforge.errors import BundleError, UsageError, extra, raised_as

UNFINISHED = "\ufffd"
"""Decoded text of a character whose bytes are incomplete."""


class Tokenizer:
    """The tokenizer of a bundle that was deployed with one.

    Args:
        bundle: the bundle.

    Raises:
        UsageError: the bundle has no tokenizer.
        UnavailableError: the `tokenizers` library is not installed.
        BundleError: the file is not one of that library's.
    """

    def __init__(self, bundle: Bundle) -> None:
        decoding = bundle.manifest.decoding
        if decoding is None or decoding.tokenizer is None:
            raise UsageError(
                f"{bundle.path} has no tokenizer; give token ids (--ids), or deploy with a tokenizer.json (--tokenizer)"
            )
        library = extra("tokenizers", "hf").Tokenizer
        with raised_as(BundleError, f"{bundle.path / decoding.tokenizer} is not a tokenizer"):
            self._library: Any = library.from_str(bundle.read(decoding.tokenizer).decode())

    def ids(self, text: str) -> list[int]:
        """Encode a text to token ids."""
        return list(self._library.encode(text).ids)

    def text(self, ids: list[int]) -> str:
        """Decode token ids to text."""
        return str(self._library.decode(ids))

    def stream(self, prompt: list[int], following: Iterable[int]) -> Iterator[str]:
        """Decode new tokens incrementally and yield the text that each adds. A character that spans several tokens is
        yielded when it is complete. Only the tokens of the previous piece are decoded again, as context: they decide
        about spaces between tokens.

        Args:
            prompt: token ids of the prompt.
            following: new token ids, as they are generated.
        """
        last, new = list(prompt), list[int]()
        shown = text = self.text(last).rstrip(UNFINISHED)
        for token in following:
            new.append(token)
            text = self.text([*last, *new])
            if text.startswith(shown) and text != shown and not text.endswith(UNFINISHED):
                yield text[len(shown) :]
                last, new = new, []
                shown = text = self.text(last)
        if text.startswith(shown) and text != shown:
            yield text[len(shown) :]
