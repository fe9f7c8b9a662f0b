"""Output of the commands: similar sites are merged, tables fit 80 columns, and numbers have one format."""

from __future__ import annotations

import io
import math
import re
import sys
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from attnforge.bundle import Certificate, SiteRecord, SiteTarget
from attnforge.certificate import SiteMask
from attnforge.cli import printing, terminal
from attnforge.cli.printing import alike, names_in_runs
from attnforge.numbers import scientific
from attnforge.progress import Progress
from attnforge.records import Interval
from attnforge.report import render


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return everything that was printed in 80 columns."""
    screen = io.StringIO()
    console = Console(file=screen, width=80, highlight=False)
    monkeypatch.setattr(terminal, "out", console)
    monkeypatch.setattr(printing, "out", console)
    return screen.getvalue


def site(i: int, heads: int = 12, reason: str = "no fused kernel", kernel: str | None = None) -> SiteRecord:
    target = SiteTarget(form="MatMul·Softmax·MatMul", why="by rule", kernel=kernel, reason=None if kernel else reason)
    name, form = f"layers.{i}.attention.self", f"Attention(heads {heads}, head size 64)"
    return SiteRecord(site=name, written_as="Attention", canonical=True, form=form, targets={"onnxruntime": target})


def certificate(sites: list[SiteRecord]) -> Certificate:
    return Certificate(sites=len(sites), canonical=len(sites), fused={"onnxruntime": 0}, unfused=[], details=sites)


def test_alike_sites_are_one_row(printed: Callable[[], str]) -> None:
    printing.print_sites(certificate([site(i) for i in range(22)]))
    text = printed()
    assert "22 sites alike: layers.0.attention.self … layers.21.attention.self" in text
    assert text.count("MatMul·Softmax·MatMul") == 1 and text.count("not fused: no fused kernel") == 1
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_faster_unfused_is_no_failure(printed: Callable[[], str]) -> None:
    measured = "measured: 0.2 ms against Attention 0.3"
    faster, wrong = [site(i, reason=measured) for i in (1, 2)], site(3, reason="measured: 0.2 ms; not Attention: NaN")
    for record in faster:
        record.targets["onnxruntime"].measured = {"MatMul·Softmax·MatMul": 0.2, "Attention": 0.3}
    wrong.targets["onnxruntime"].dropped = {"Attention": "NaN"}
    printing.print_sites(certificate([site(0), *faster, wrong]))
    text = " ".join(printed().split())
    assert "0 of 4 fused by onnxruntime (2 faster unfused)" in text and " not fused: measured: 0.2 ms; not" in text
    assert f" faster unfused: {measured}" in text and " not fused: no fused kernel" in text


def test_what_masks_leave(printed: Callable[[], str]) -> None:
    window = SiteMask(text="band −255 … 0, residue: padding", regions=[], silent="never", example=0.25, largest=0.0625)
    sites = [site(i).model_copy(update={"mask": mask}) for i, mask in enumerate([window, window, None])]
    printing.print_sites(certificate(sites))
    text = " ".join(printed().split())
    assert "2 sites alike" in text and text.count("sees") == 1
    assert "sees band −255 … 0, residue: padding; of the products 25% at the example, 6.2% at most" in text


def test_other_softmaxes_are_one_line_a_reason(printed: Callable[[], str]) -> None:
    others = {"gate": "an axis of weights", "head": "an axis of weights", "pooler": "it is not used"}
    printing.print_sites(certificate([]).model_copy(update={"other_softmaxes": others}))
    assert [line.strip() for line in printed().splitlines()[1:]] == [
        "softmax, but no attention, in gate, head: an axis of weights",
        "softmax, but no attention, in pooler: it is not used",
    ]


def test_older_bundles_load() -> None:
    older = site(0).model_dump(exclude={"mask"})
    assert "mask" not in older and SiteRecord.model_validate(older).mask is None
    assert Certificate.model_validate(certificate([]).model_dump(exclude={"other_softmaxes"})).other_softmaxes == {}


def test_sites_that_differ_stay_apart() -> None:
    sites = [*(site(i) for i in range(3)), site(3, heads=6), site(4, reason="another reason"), site(5), site(6)]
    assert [[record.site.split(".")[1] for record in group] for group in alike(sites)] == [list("01256"), ["3"], ["4"]]


def test_numbers_in_kernels_names_do_not_set_sites_apart(printed: Callable[[], str]) -> None:
    printing.print_sites(certificate([site(i, kernel=f"_gemm_mha_v2_myl0_{i}") for i in range(12)]))
    assert "12 sites alike" in printed() and "_myl0_0 (the first site's numbers; the others differ)" in " ".join(
        printed().split()
    )


def test_runs_of_names() -> None:
    known = [f"layers.{i}" for i in range(10)]
    assert names_in_runs(known, known) == "layers.0 … layers.9"
    assert names_in_runs([*known[:3], *known[5:7], known[9]], known) == (
        "layers.0 … layers.2, layers.5, layers.6, layers.9"
    )
    assert names_in_runs(known[:1], known) == "layers.0"


def test_a_table_breaks_between_words_and_leaves_empty_columns_out(printed: Callable[[], str]) -> None:
    words = "a sentence of many words that does not fit into what is left of eighty columns after a name"
    rows = [("a-name-in-one-piece", "", "1.25", words), ("b", "", "12", "short")]
    terminal.print_table(("name", "nothing", "number", "why"), rows, wraps=3)
    lines = printed().splitlines()
    assert lines[0].split() == ["name", "number", "why"] and max(map(len, lines)) <= 80
    assert " ".join(printed().split()).count("a-name-in-one-piece 1.25 a sentence of many words") == 1
    assert all(word in words.split() for line in lines[2:-1] for word in line.split())


def test_names_with_one_reason_are_joined(printed: Callable[[], str]) -> None:
    terminal.say_reasons({"tensorrt": "no CUDA device", "openvino": "slow", "cuda": "no CUDA device"}, "{} did not run")
    assert printed().splitlines() == ["tensorrt, cuda did not run: no CUDA device", "openvino did not run: slow"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_stage_case_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    clock = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[-1])
    with terminal.stages_shown(quiet=False) as display:
        assert isinstance(display, Progress)
        errors = io.StringIO()
        monkeypatch.setattr(sys, "stderr", errors)  # as deploy does while torch exports
        display("build vit")
        display.stage("reference", 4, 5)
        display.step("normal-small", 0, 12e9)
        clock.append(1040.0)
        display.step("scaled-16", 8e9, 12e9)
        time.sleep(0.3)  # it is drawn ten times a second
    shown = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", screen.getvalue())]
    last = next(line for line in reversed(shown) if line.strip())
    assert "4/5 reference" in last and "scaled-16, 20 s left" in last and max(map(len, shown)) <= 80
    assert errors.getvalue() == ""


@pytest.mark.parametrize(("quiet", "stream"), [(True, Terminal()), (False, io.StringIO())])
def test_nothing_is_shown_elsewhere(quiet: bool, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with terminal.stages_shown(quiet) as display:
        display("build vit")
        display.stage("reference", 4, 5)
        display.step("normal-small", 0, None)
    assert stream.getvalue() == ""


def test_number_formats() -> None:
    assert [scientific(n, 3) for n in (2.784e-6, 2e-10, 12345.0)] == ["2.78e-6", "2e-10", "1.23e4"]
    assert [render.error(n) for n in (2.1e-7, 1e-6, 0.0, None, math.inf)] == ["2.1e-7", "1e-6", "0", "–", "not finite"]
    assert [render.percent(n) for n in (0.38, 0.0021, 1e-5, 0.0, 1.1, 12.4, None)] == [
        "38%", "0.21%", "<0.1%", "0%", "110%", "12 times", "–",
    ]  # fmt: skip
    assert [render.rounded(n) for n in (33.04, 0.0123, 1234.5, None)] == ["33.0", "0.0123", "1,234", "–"]


def test_a_single_reading_has_no_interval() -> None:
    assert render.with_interval(Interval(value=33.04, low=32.8, high=33.3), 2) == "33.04 (32.80–33.30)"
    assert render.milliseconds(Interval(value=33.04, low=32.8, high=33.3)) == "33.0 ms (95%: 32.8–33.3)"
    assert render.milliseconds(Interval(value=33.04, low=33.04, high=33.04)) == "33.0 ms"
    assert render.with_interval(Interval(value=1.98, low=1.98, high=1.98), 2) == "1.98"
    assert render.interval(Interval(value=1.98, low=1.98, high=1.98)) == ""
