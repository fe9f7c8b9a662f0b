"""Texts and token ids, by the tokenizer that a bundle keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attnforge.bundle import Bundle
from attnforge.errors import BundleError, UsageError, extra, raised_as

UNFINISHED = "\ufffd"
"""What a tokenizer shows for a letter of which some bytes are still to come."""


class Tokenizer:
    """The tokenizer of a bundle that was deployed with one.

    Args:
        bundle: with the file.

    Raises:
        UsageError: the bundle has none.
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
        with raised_as(BundleError, f"{bundle.path / decoding.tokenizer} is no tokenizer"):
            self._library: Any = library.from_str(bundle.read(decoding.tokenizer).decode())

    def ids(self, text: str) -> list[int]:
        """The ids of a text."""
        return list(self._library.encode(text).ids)

    def text(self, ids: list[int]) -> str:
        """The text of some ids."""
        return str(self._library.decode(ids))

    def stream(self, prompt: list[int], following: Iterable[int]) -> Iterator[str]:
        """What every further token adds to the text of a prompt. A letter whose bytes come in several tokens comes when
        it is whole. Of the tokens before, those of the last piece alone are decoded again: they decide what stands
        between two tokens.

        Args:
            prompt: its ids.
            following: ids as they come.
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
