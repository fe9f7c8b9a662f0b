"""The laboratory: experiments that measure attnforge, run from a checkout. It is not part of the package."""
