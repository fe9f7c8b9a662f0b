"""Text output of the commands. Rows that are alike are merged, and lines fit 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from attnforge.cli.terminal import escape, out, print_table, say, say_path, say_reasons
from attnforge.report.render import error, interval, percent, rounded, sizes_text

if TYPE_CHECKING:
    from attnforge.bench.results import Contender, DecodingResults, Environment, Model, Results
    from attnforge.bundle import Bundle, Certificate, Manifest, Quantised, QuantisedProduct, SiteRecord, TargetRecord
    from attnforge.certificate import SiteMask, SiteTarget
    from attnforge.export.diagnosis.diagnose import Diagnosis
    from attnforge.report.quantising import QuantisingCost
    from attnforge.runtime.parity.verify import Report


# --- a bundle ---------------------------------------------------------------------------------------------------------


def summary(bundle: Bundle) -> dict[str, Any]:
    """Return the manifest as `inspect --json` and `deploy --json` print it: with the number of cases and the names of
    files."""
    manifest = bundle.manifest.model_dump(exclude={"cases", "files"})
    manifest["total"] = bundle.manifest.total.model_dump()
    files = {"files": list(bundle.manifest.files), "unlisted": bundle.unlisted()}
    return {**manifest, "cases": len(bundle.manifest.cases), **files, "signature": bundle.signature}


def print_bundle(bundle: Bundle, verbose: bool = True) -> None:
    """Print a bundle's contents and how each attention site was lowered, and with `verbose` what deploying it cost."""
    manifest = bundle.manifest
    out.print(f"[bold]{escape(manifest.name)}[/] {manifest.precision} in {escape(str(bundle.path))}", soft_wrap=True)
    for line in manifest.interface:
        say(line, indent=2)
    if (decoding := manifest.decoding) is not None:
        size = decoding.bytes_a_sample
        text = f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
        say(f"decodes: caches of {decoding.places} tokens, {text} for each sample", indent=2)
    for record in manifest.targets.values():
        _print_engines(record)
    if manifest.source.random_weights is not None:
        say(f"random weights, {manifest.source.random_weights.removeprefix('all, ')}", "yellow")
    say(f"reference: {manifest.reference}, and float64")
    if bundle.signature != "none":
        say(f"signature: {bundle.signature}{'' if bundle.trusted else '; --trusted KEY checks it'}")
    if (mixed := manifest.mixed) is not None:
        share = f"{mixed.low_flops:.1%} of the operations of products in {mixed.low}"
        say(f"precisions chosen: {share}; error {error(mixed.error)}, {mixed.trials} assignments tried")
        for region in mixed.regions:
            say(f"fp32 in {region.module}: {', '.join(region.nodes)}", indent=2)
            say(region.why, "dim", indent=4)
    if manifest.quantised is not None:
        _print_quantised(manifest.quantised, manifest.targets)
    print_sites(manifest.attention)
    for name, record in manifest.targets.items():
        if record.tuning is not None:
            at = sizes_text(record.tuning.sizes, "fixed sizes")
            say(f"{name}: forms measured at {at}, on {record.tuning.processors} processors", "dim")
    if (choice := manifest.choice) is not None:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in choice.milliseconds.items())
        where = f"on the {choice.machine.processor} that deployed it"
        what = "" if manifest.decoding is None else ", for a prompt and as many steps"
        say(f"auto loads {choice.picked or 'by rule'} {where}{what}: {times}")
        say_reasons(choice.dropped, "not {}", "dim")
    if manifest.doubt is not None:
        say(manifest.doubt, "red")
    say_reasons(manifest.skipped, "not built for {}", "dim")
    if verbose:
        _print_cost(manifest)
    if others := bundle.unlisted():
        from attnforge.bundle import unlisted_text

        say(unlisted_text(bundle.path, others), "yellow")


def _print_cost(manifest: Manifest) -> None:
    """Print what each stage of deploying cost; older bundles record only seconds."""
    if manifest.seconds:
        stages = ", ".join(f"{name} {cost.text()}" for name, cost in manifest.stages.items())
        say(f"deployed in {manifest.total.text()}: {stages}", "dim")
    if manifest.reused:
        say(f"reused from an earlier deploy of the same model: {', '.join(manifest.reused)}", "dim")
    for name, cost in manifest.children.items():
        say(f"{name}, in a separate process: {cost.text()}", "dim")


def _print_engines(record: TargetRecord) -> None:
    for engine in record.engines:
        contents = f"{engine.layers} layers, {engine.size / 1e6:.1f} MB, for {', '.join(engine.compute_capabilities)}"
        memory = "" if engine.activation_memory is None else f"; activations {_megabytes(engine.activation_memory)}"
        say(f"{engine.file}: {engine.flavour} {engine.version}, {contents}{memory}", indent=2)
    if record.attention_precision is not None and record.without is not None:
        plain = f"{record.without.layers} layers, activations {_megabytes(record.without.activation_memory)}"
        say(f"attention alone in {record.attention_precision}; without that {plain}", indent=2)


def _megabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:.1f} MB"


def _print_quantised(quantised: Quantised, targets: Mapping[str, TargetRecord]) -> None:
    share = f"{quantised.share:.1%} of the operations of products, in {len(quantised.products)} products; "
    say(f"{quantised.type}: {share if quantised.products else ''}error {error(quantised.error)}")
    forms: dict[str, list[QuantisedProduct]] = {}
    for product in quantised.products:
        by = f"in blocks of {product.block}" if product.block else f"by {product.by}"
        forms.setdefault(f"{by}{', balanced' if product.balanced else ''}", []).append(product)
    for form, alike in forms.items():
        worst = max(alike, key=lambda product: product.error)
        say(f"{form}: {len(alike)} products; largest error {error(worst.error)}, of {worst.name}", indent=2)
    for text, errors in (
        ("stored by row: {} tables", quantised.tables),
        ("attention: {} sites", quantised.attention),
        ("caches: {} sites", quantised.caches),
        ("openvino: queries × keys in int8 at {} sites", quantised.scores),
    ):
        if errors:
            name, largest = max(errors.items(), key=lambda item: item[1])
            say(f"{text.format(len(errors))}; largest error {error(largest)}, of {name}", indent=2)
    for name, record in targets.items():
        if record.low_bit is not None:
            say(f"{name}: {record.low_bit} of {len(quantised.products)} products multiplied as stored", indent=2)
        if record.low_bit_attention is not None:
            fused = f"{record.low_bit_attention} of {len(quantised.attention)} attention sites"
            say(f"{name}: {fused} fused in {quantised.type}", indent=2)
    say_reasons(quantised.kept, f"not in {quantised.type}, {{}}", "dim", indent=2)


# --- attention sites --------------------------------------------------------------------------------------------------


def print_sites(attention: Certificate) -> None:
    """Print how many sites are fused, and each group of alike sites once."""
    fused = ", ".join(
        f"{count} of {attention.sites} fused by {name}{_faster_unfused(attention, name)}"
        for name, count in attention.fused.items()
    )
    say(f"attention: {attention.sites} sites, {attention.canonical} canonical; {fused}")
    for sites in alike(attention.details):
        _print_group([site.site for site in attention.details], sites)
    say_reasons(attention.other_softmaxes, "softmax, but no attention, in {}", "dim", indent=2)


def _faster_unfused(attention: Certificate, target: str) -> str:
    """Return how many sites have an unfused form because it took less time than the fused ones; empty if none has."""
    lowered = (site.targets[target] for site in attention.details if target in site.targets)
    faster = sum(map(_is_faster_unfused, lowered))
    return f" ({faster} faster unfused)" if faster else ""


def _is_faster_unfused(target: SiteTarget) -> bool:
    """Return whether an unfused form was chosen among others that gave the same answers."""
    is_measured = target.reason is not None and target.reason.startswith("measured")
    return target.kernel is None and is_measured and len(target.measured) > 1 and not target.dropped


def alike(sites: Iterable[SiteRecord]) -> list[list[SiteRecord]]:
    """Group sites that were lowered alike on every target; numbers in kernel names and reasons may differ."""
    groups: dict[object, list[SiteRecord]] = {}
    for site in sites:
        became = re.sub(r"(0x[0-9a-f]+|\d+(\.\d+)?)", "#", str(site.targets))
        key = (site.written_as, site.canonical, site.form, site.reason, str(site.mask), became)
        groups.setdefault(key, []).append(site)
    return list(groups.values())


def names_in_runs(names: Sequence[str], known: Sequence[str]) -> str:
    """Return names with consecutive runs abbreviated as `layers.0 … layers.21`, in the order of `known`; runs of one or
    two are spelt out."""
    consecutive = groupby(enumerate(sorted(map(known.index, names))), lambda pair: pair[1] - pair[0])
    runs = [[known[position] for _, position in run] for _, run in consecutive]
    return ", ".join(f"{run[0]} … {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs)


def _print_group(known: Sequence[str], sites: Sequence[SiteRecord]) -> None:
    first, count = sites[0], len(sites)
    names = names_in_runs([site.site for site in sites], known)
    say(names if count == 1 else f"{count} sites alike: {names}", "bold", indent=2)
    became = (first.form or "") if first.canonical else "left unchanged"
    say(f"written as {first.written_as} → {became}", None if first.canonical else "yellow", indent=4)
    if first.mask is not None:
        say(f"sees {_mask_text(first.mask)}", indent=4)
    if not first.targets:
        say(first.reason or "", "yellow", indent=4)
    for name, target in first.targets.items():
        versions = [site.targets[name] for site in sites]
        say(f"{name}: {target.form}", indent=4)
        if target.kernel is not None:
            say(f"fused: {_first_of([v.kernel for v in versions])}", "green", indent=6)
        elif target.reason is not None:
            text, style = ("faster unfused", None) if _is_faster_unfused(target) else ("not fused", "yellow")
            say(f"{text}: {_first_of([v.reason for v in versions])}", style, indent=6)
        if target.kernel is not None or target.reason is None:
            say(_first_of([v.why for v in versions]), "dim", indent=6)


def _mask_text(mask: SiteMask) -> str:
    """Describe what is proved about a mask, with the share of products that remains if it is less than all."""
    shares = (("the example", mask.example), ("most", mask.largest))
    left = ", ".join(f"{percent(share)} at {sizes}" for sizes, share in shares if share is not None and share < 1)
    return f"{mask.text}; of the products {left}" if left else mask.text


def _first_of(texts: Sequence[str | None]) -> str:
    """Return the first text, with a note if the others differ from it."""
    return (texts[0] or "") + (" (the first site's numbers; the others differ)" if len(set(texts)) > 1 else "")


# --- reports ----------------------------------------------------------------------------------------------------------


def print_report(report: Report, cost: QuantisingCost | None) -> None:
    """Print what quantising costs, what a verification measured, one row per backend, and every failure."""
    if cost is not None:
        say(cost.text, "yellow" if cost.exceeds else None)
    head = ("backend", "", "error", "eager's", "budget", "worst case", "cases")
    rows = [
        (
            name,
            "[green]passed[/]" if backend.passed else "[red]FAILED[/]",
            error(backend.error),
            error(backend.eager_error),
            error(backend.budget),
            escape(backend.case),
            str(backend.cases),
        )
        for name, backend in report.backends.items()
    ]
    print_table(head, rows, words=2, wraps=5)
    for name, backend in report.backends.items():
        for output, figures in backend.outputs.items():
            say(f"{name} {figures.text(output)}", "dim")
        if backend.metric is not None:
            say(f"{name} {backend.metric.text()}")
    for name, backend in report.backends.items():
        for failure in backend.failures:
            say(f"{name} {failure.where}, {failure.output}: {failure.reason}", "red")
            if failure.worst is not None:
                say(failure.worst.text(failure.output), indent=2)
        if backend.reason is not None:
            say(f"{name} {backend.reason}", "red")
    for warning in report.warnings:
        say(warning, "yellow")
    say_reasons(report.skipped, "{} did not run", "dim")
    say(f"checked against {report.reference}, and against float64", "dim")


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print where a deployment first goes wrong, and the tensors whose error grows most."""
    finding = diagnosis.finding
    is_note = diagnosis.healthy and finding.cause == "clipping"
    say(f"{'note: ' if is_note else ''}{finding.text()}", "green" if diagnosis.healthy else "red")
    if finding.line is not None:
        say(finding.line, indent=2)
    if finding.error_without is not None and diagnosis.error is not None:
        without, final = error(finding.error_without), error(diagnosis.error)
        say(f"with this tensor exact, the final error is {without}, not {final}", indent=2)
    for file in finding.reproduction:
        say_path("  written", file)
    rows = [
        (
            f"{tensor.largest:.3g}",
            _error_or_lost(tensor.error_in),
            _error_or_lost(tensor.error),
            f"{tensor.amplification or 0:.1f}",
            f"{escape(tensor.operator)} {escape(tensor.tensor.removeprefix(f'{tensor.module}/'))}\n"
            f"[dim]{escape(tensor.module)}[/]",
        )
        for tensor in diagnosis.tensors
    ]
    print_table(("largest", "error in", "error", "times", "tensor and module"), rows, words=0, wraps=4)
    say_reasons(diagnosis.not_traced, "intermediate tensors of {} could not be examined", "dim")
    same = "; in float64, " + " = ".join(diagnosis.same_function) if diagnosis.same_function else ""
    say(f"{diagnosis.examined} tensors of case {diagnosis.case} ({diagnosis.why}){same}", "dim")


def _error_or_lost(number: float | None) -> str:
    return "lost" if number is None else error(number)


# --- benchmarks -------------------------------------------------------------------------------------------------------


def print_results(results: Results) -> None:
    """Print what a benchmark measured, one table per model."""
    for model in results.models:
        at = escape(sizes_text(model.sizes, "fixed sizes"))
        out.print(f"[bold]{escape(model.name)}[/] at {at}, {_turns(model)}", soft_wrap=True)
        head = ("contender", "median\nms", "95%", "p99", "ratio", "of\nlimit", "error", "start\ns", "extra\nMiB")
        ordered = sorted(model.contenders, key=lambda contender: contender.latency.median.value)
        print_table(head, [_contender_row(contender) for contender in ordered], gap=1)
        say("← what auto loads; ratios are to it, at the same precision", "dim")
        say_reasons(model.wrong, "{} was not timed because its output is wrong", "red")
        for contender in model.contenders:
            if contender.wrong_in is not None:
                say(f"† {contender.key} is wrong in {contender.wrong_in}", "yellow")
            elif contender.partly is not None:
                say(f"{contender.key} was {contender.partly}", "dim")
        say_reasons(model.skipped, "{} did not run", "dim")
    _print_environment(results.environment)


def _print_environment(about: Environment) -> None:
    say(f"{about.threads} threads; {about.machine.processor}; {about.machine.processors} processors", "dim")


def _turns(measured: Model | DecodingResults) -> str:
    """Return the rounds and loads as text, such as `20 rounds in 3 loads`."""
    return f"{measured.rounds} rounds" + (f" in {measured.openings} loads" if measured.openings > 1 else "")


def _contender(name: str, ours: bool) -> str:
    return f"{'[bold]' if ours else '[dim]'}{escape(name)}[/]"


def _contender_row(contender: Contender) -> tuple[str, ...]:
    latency, cold, memory = contender.latency, contender.cold, contender.memory
    marks = (" ←" if contender.picked else "") + (" †" if contender.wrong_in is not None else "")
    return (
        f"{_contender(contender.key, contender.ours)}{marks}",
        rounded(latency.median.value),
        interval(latency.median),
        rounded(latency.p99),
        "" if contender.ratio is None else rounded(contender.ratio.value),
        "" if contender.share is None else percent(contender.share),
        error(contender.error),
        "" if cold is None else rounded(cold.load_s + cold.first_s, 2),
        "" if memory is None else f"{memory.extra_mib:.0f}",
    )


# --- decoding ---------------------------------------------------------------------------------------------------------


def print_decoding(results: DecodingResults) -> None:
    """Print how a bundle and its peers decode: a table per context, then first tokens and memory."""
    samples = "" if results.batch == 1 else f", {results.batch} samples at once"
    out.print(f"[bold]{escape(results.model)}[/] {results.precision}{samples}, {_turns(results)}", soft_wrap=True)
    head = ("contender", "ms a\ntoken", "95%", "tokens\na second", "ratio", "of\nlimit", "error")
    for context in results.contexts:
        timed = [(step, c) for c in results.contenders if (step := c.at(context)) is not None]
        timed.sort(key=lambda pair: pair[0].latency.median.value)
        heading = f"after {context:,} tokens"
        if (limit := results.limits.get(context)) is not None:
            heading += f"; copying the bytes of a step takes {rounded(limit.latency.median.value)} ms"
        say(heading)
        rows = [
            (
                _contender(contender.name, contender.ours),
                rounded(step.latency.median.value),
                interval(step.latency.median),
                rounded(step.per_second.value),
                "" if step.ratio is None else rounded(step.ratio.value),
                "" if step.share is None else percent(step.share.value),
                error(contender.error),
            )
            for step, contender in timed
        ]
        print_table(head, rows, gap=1)
    _print_first_tokens(results)
    say_reasons(results.wrong, "{} was not timed because its output is wrong", "red")
    for contender in results.contenders:
        for note in contender.notes:
            say(f"{contender.name}: {note}", "dim")
    say_reasons(results.skipped, "{} did not run", "dim")
    say(f"logits checked against {results.held_to}; ratios are to the bundle's own", "dim")
    _print_environment(results.environment)


def _print_first_tokens(results: DecodingResults) -> None:
    if not results.prompts:
        return
    say("milliseconds to the first token, by prompt length in tokens, and bytes that a step adds")
    rows = [
        (
            _contender(contender.name, contender.ours),
            *(rounded(first.latency.median.value) for first in contender.first_tokens),
            "" if contender.growth is None else f"{contender.growth:,.0f}",
        )
        for contender in results.contenders
    ]
    print_table(["contender", *(f"{prompt:,}" for prompt in results.prompts), "bytes\na step"], rows, gap=1)
