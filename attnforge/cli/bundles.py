"""The commands that take one bundle: `attnforge run | generate | verify | diagnose | inspect | sign`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

import attnforge
from attnforge.atomic import check_writable
from attnforge.cli import printing
from attnforge.cli.options import Backend, Backends, BundleArgument, Force, Json, TrustedKeys, whole_numbers
from attnforge.cli.terminal import Answer, out, say, say_path, stages_shown
from attnforge.errors import UsageError, plain
from attnforge.report.render import check_page


def run(
    bundle: BundleArgument,
    inputs: Annotated[list[str], typer.Argument()],
    out_file: Annotated[Path, typer.Option("--out")] = Path("outputs.npz"),
    backend: Backend = "auto",
    force: Force = False,
    rebuild: Annotated[bool, typer.Option("--rebuild")] = False,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Run a bundle on files and write its outputs.

    An image becomes a batch of one, as the model's image processor prepares it, or if the bundle has none, with values
    from 0 to 1 and the model's channels and size.

    Example: `attnforge run patch-attention-fp32 photograph.jpg --out tokens.npz`

    Example: `attnforge run cross-attention-fp32 query=q.npy memory=m.npy key_padding_mask=mask.npy`

    Args:
        inputs: An .npy file, an image, a .txt file with a text on each line, an .npz of all inputs, or name=file for
            each input.
        out_file: Output file (.npz).
        rebuild: Rebuild the TensorRT plan if this machine cannot load it.
    """
    import numpy as np

    from attnforge.bundle import PROCESSOR
    from attnforge.input_files import read_inputs, write_outputs
    from attnforge.text import read_texts

    check_writable(out_file, force)
    with attnforge.load(bundle, backend, rebuild=rebuild, trusted=trusted) as session:
        if len(inputs) == 1 and inputs[0].endswith(".txt"):
            feeds = session.tokenize(read_texts(Path(inputs[0])))
        else:
            opened = session.bundle
            settings = opened.read(PROCESSOR) if PROCESSOR in opened.manifest.files else None
            feeds = read_inputs(session.inputs, inputs, settings=settings)
        start = time.perf_counter()
        outputs = session.run(feeds)
        seconds = time.perf_counter() - start
    write_outputs(out_file, outputs)
    described = {
        name: {"shape": list(a.shape), "dtype": a.dtype.name, "finite": bool(np.isfinite(a.astype(np.float64)).all())}
        for name, a in outputs.items()
    }
    document = {"backend": session.backend, "seconds": seconds, "outputs": described, "written": str(out_file)}

    def view() -> None:
        for name, output in described.items():
            line = f"{name}: {output['dtype']}{output['shape']}"
            say(line if output["finite"] else f"{line} with NaN or infinity", None if output["finite"] else "red")
        say_path(f"ran on {session.backend} in {1e3 * seconds:.1f} ms; written to", out_file)

    return Answer(document, view)


def generate(
    bundle: BundleArgument,
    text: Annotated[str | None, typer.Argument()] = None,
    ids: str | None = None,
    max_new_tokens: int | None = None,
    backend: Backend = "auto",
    trusted: TrustedKeys = None,
    as_json: Json = False,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: str | None = None,
) -> Answer:
    """Generate text from a decoder bundle and stream it.

    The bundle must have been deployed with --cache-tokens. Without a tokenizer, give the prompt with --ids; new tokens
    are then printed as ids.

    Example: `attnforge generate llama-fp16 "Once upon a time" --max-new-tokens 100 --temperature 0.8 --top-p 0.95`

    Example: `attnforge generate llama-fp16 --ids 1,450,3118 --json`

    Args:
        text: Prompt, encoded by the bundle's tokenizer.
        ids: Prompt as token ids, comma-separated.
        max_new_tokens: Maximum number of new tokens (default: 64, or what the cache has room for).

    Sampling:
        temperature: Sampling temperature; 0 selects the most likely token.
        top_k: Sample from this many most likely tokens.
        top_p: Sample from the most likely tokens up to this total probability.
        seed: Random seed for sampling.
        stop: Stop token ids, comma-separated (default: the bundle's).
    """
    if (text is None) == (ids is None):
        raise UsageError("give either a prompt text or token ids with --ids")
    with attnforge.load(bundle, backend, trusted=trusted) as session:
        tokenizer = session.tokenizer if text is not None else None
        prompt = whole_numbers(ids or "", "--ids") if tokenizer is None else tokenizer.ids(text or "")
        if not prompt:
            raise UsageError("the prompt has no tokens; give a longer text")
        ends = None if stop is None else whole_numbers(stop, "--stop")
        start = time.perf_counter()
        tokens = session.generate(
            [prompt], max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=ends
        )
        chosen, times = list[int](), list[float]()

        def following() -> Iterator[int]:
            for token in tokens:
                times.append(time.perf_counter() - start)
                chosen.append(int(token[0]))
                yield chosen[-1]

        if tokenizer is None:
            pieces: Iterator[str] = (f"{token} " for token in following())
        else:
            pieces = chain([tokenizer.text(prompt)], tokenizer.stream(prompt, following()))
        for piece in chain(pieces, "\n"):
            if not as_json:
                shown = "\n".join(map(plain, piece.split("\n")))  # without other control characters
                out.print(shown, end="", markup=False, soft_wrap=True)
        seconds = time.perf_counter() - start
    first = times[0] if times else 0.0
    rate = (len(chosen) - 1) / (seconds - first) if seconds > first and len(chosen) > 1 else None
    document = {
        "backend": session.backend,
        "prompt": prompt,
        "tokens": chosen,
        "text": tokenizer.text([*prompt, *chosen]) if tokenizer is not None else None,
        "seconds_to_first_token": first,
        "tokens_per_second": rate,
    }
    speed = f", then {rate:.1f} tokens a second" if rate is not None else ""
    timing = f"{len(chosen)} tokens on {session.backend}; the first after {1e3 * first:.0f} ms{speed}"
    return Answer(document, lambda: say(timing, "dim"))


def verify(
    bundle: BundleArgument,
    backend: Backends = None,
    html: Path | None = None,
    force: Force = False,
    metric: str | None = None,
    least: float | None = None,
    results: Path | None = None,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Check every available backend against a float64 reference.

    Needs only the bundle: neither torch nor the model's source. Exits with 1 if a backend exceeds the parity budget or
    none could run. With --results, --backend names the model that Polygraphy ran.

    Example: `attnforge verify vit-fp16 --html vit-fp16.html`

    Example: `attnforge verify vit-fp16 --results run.json`

    Args:
        html: Write a page with charts to this file.
        metric: Task metric on the bundle's data: accuracy or cosine.
        least: Minimum value of the metric (default: about float64's).
        results: Check outputs saved by `polygraphy run --save-outputs` instead of running the bundle.
    """
    if results is not None and len(backend or ()) > 1:
        raise UsageError(f"--results takes one backend, and {len(backend or ())} were given; name one, or none")
    if html is not None:
        check_page(html, force)
    with stages_shown(as_json) as progress:
        progress(f"verify {bundle}")
        if results is not None:
            from attnforge.runtime.parity.results import verify_results

            model = backend[0] if backend else None
            report = verify_results(bundle, results, model, metric=metric, least=least, trusted=trusted)
        else:
            report = attnforge.verify(bundle, backend, metric=metric, least=least, trusted=trusted)
        if html is not None:
            from attnforge.report.verify_page import write_page

            progress(f"write {html}")
            write_page(report, attnforge.Bundle(bundle, trusted=trusted), html, force=force)

    def view() -> None:
        from attnforge.report.quantising import cost_of_quantising

        opened = attnforge.Bundle(bundle, lazily=True, trusted=trusted)
        printing.print_report(report, cost_of_quantising(report, opened.manifest))
        if html is not None:
            say_path("page", html)

    return Answer(report.model_dump() | ({"page": str(html)} if html is not None else {}), view, report.passed)


def diagnose(
    bundle: BundleArgument,
    backend: Backends = None,
    case: str | None = None,
    out_folder: Annotated[Path | None, typer.Option("--out")] = None,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Find the rewrite, or the tensor and precision, where a deployment first goes wrong.

    Needs only the bundle. Exits with 1 if a backend fails verification, a rewrite changed the function, or a tensor
    adds more error than rounding explains, even within the budget. Values clipped by a quantised range are only a note
    while all backends pass and clipping costs no more than quantisation may.

    Example: `attnforge diagnose vit-fp16`

    Args:
        case: Reference case to examine (default: the failing one, or the least accurate).
        out_folder: Write files that reproduce a wrong rewrite to this folder.
    """
    with stages_shown(as_json) as progress:
        progress(f"diagnose {bundle}")
        diagnosis = attnforge.diagnose(bundle, backend, case=case, out=out_folder, trusted=trusted)
    return Answer(diagnosis.model_dump(), lambda: printing.print_diagnosis(diagnosis), diagnosis.healthy)


def inspect(
    bundle: BundleArgument,
    verbose: Annotated[bool, typer.Option("--verbose")] = False,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Show a bundle's contents and how each attention site was lowered.

    Example: `attnforge inspect vit-fp16 --json`

    Args:
        verbose: Add the cost of each deploy stage.
    """
    opened = attnforge.Bundle(bundle, trusted=trusted)
    return Answer(printing.summary(opened), lambda: printing.print_bundle(opened, verbose=verbose))


def sign(
    bundle: BundleArgument,
    key: Annotated[Path, typer.Option("--key")],
    force: Force = False,
    as_json: Json = False,
) -> Answer:
    """Sign a bundle: write `model.sig` into it.

    Create a private key with `openssl ecparam -name prime256v1 -genkey -noout -out my.key`, and the public key that
    others pass as `--trusted my.pub` with `openssl ec -in my.key -pubout -out my.pub`. Needs `attnforge[signing]`.

    Example: `attnforge sign vit-fp16 --key my.key`

    Args:
        key: Elliptic-curve private key, in PEM format.
    """
    file = attnforge.sign(bundle, key, force=force)
    return Answer({"bundle": str(bundle), "signature": str(file)}, lambda: say_path("signed", file))
