"""The page of a benchmark: its first lines, that its numbers equal the results, and how a browser shows it. The figures
are made up."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from attnforge.bench import plots
from attnforge.bench.limits import Ceilings, Work, limit_seconds
from attnforge.bench.page import write_page
from attnforge.bench.results import (
    Cases,
    Cold,
    Contender,
    Deployed,
    Environment,
    Fit,
    Growth,
    Interval,
    Latency,
    MemoryUse,
    Model,
    Results,
    Series,
    Throughput,
)
from attnforge.errors import UnavailableError, UsageError
from attnforge.machine import Machine
from benchmarks import growth as of_growth
from benchmarks.experiments.suite import table
from benchmarks.growth import growth_table
from tests.support.html_pages import Parsed, inaccessible, of_size

pytestmark = pytest.mark.xdist_group("bench-page")

CEILINGS = Ceilings(
    threads=2, flops={"fp32": 1.9e11, "bf16": 7.1e11, "fp16": 1.8e11}, bandwidth=2.1e10, exponentials=1.4e9
)
ERRORS = {"fp32": (2.1e-7, 1e-6), "bf16": (2.9e-3, 8e-3), "fp16": (4e-4, 1e-3)}
WHATS = {
    "onnxruntime-cpu": "the bundle's fused graph in ONNX Runtime",
    "openvino": "the bundle's graph in OpenVINO",
    "eager": "the module in PyTorch, as its author wrote it",
    "torch-compile": "torch.compile with the inductor, max-autotune",
    "onnxruntime-plain": "ONNX Runtime on the plain export",
    "ort-fusions": "ONNX Runtime on what onnxscript's ort_fusions make of the plain export",
    "openvino-plain": "OpenVINO on the plain export",
}
OURS = ("onnxruntime-cpu", "openvino")


def interval(value: float, part: float = 0.008) -> Interval:
    return Interval(value=value, low=value * (1 - part), high=value * (1 + part))


def latency(median: float, rounds: int = 20, calls: int = 3) -> Latency:
    draw = random.Random(median)
    found = [[median * (1 + abs(draw.gauss(0, 0.03)) - 0.02) for _ in range(calls)] for _ in range(rounds)]
    ordered = sorted(ms for calls in found for ms in calls)
    return Latency(
        rounds=found,
        median=interval(median),
        min=ordered[0],
        p90=ordered[int(0.9 * len(ordered))],
        p99=ordered[-1],
        samples=len(ordered),
    )


def contender(name: str, precision: str, median: float, picked: float | None = None, **changed: Any) -> Contender:
    """`picked` is the median of the picked contender."""
    error, budget = ERRORS[precision]
    given: dict[str, Any] = {
        "ours": name in OURS,
        "picked": picked == median,
        "what": WHATS.get(name, "something else"),
        "error": error,
        "budget": budget,
        "latency": latency(median),
        "ratio": interval(median / picked, 0.004) if picked is not None else None,
        "throughput": [
            Throughput(batch=batch, callers=callers, per_second=interval(900 * batch * callers**0.6 / median))
            for batch, callers in ((1, 1), (1, 2), (8, 1))
        ],
        "cold": Cold(import_s=0.9, load_s=0.0123 * median, first_s=0.0021 * median),
        "memory": MemoryUse(loaded_mib=151 + median, peak_mib=171.4 + median, extra_mib=18.6 + median / 7),
        "size_mb": 0.61,
    }
    return Contender(name=name, precision=precision, **(given | changed))


def model(name: str, medians: dict[str, dict[str, float]], flops: float = 2.4e9, **changed: Any) -> Model:
    """`medians` has the contenders of every precision, the picked one first."""
    work = {
        p: Work(
            products={p: int(flops)}, others=10**7, exponentials=10**6, weights=int(5e6), inputs=602112, outputs=10**6
        )
        for p in medians
    }
    limit = {p: limit_seconds(one, CEILINGS) for p, one in work.items()}
    contenders = [
        contender(one, p, median, next(iter(named.values())), share=limit[p].share(median / 1e3))
        for p, named in medians.items()
        for one, median in named.items()
    ]
    given: dict[str, Any] = {
        "sizes": {"batch": 1, "tokens": 3136},
        "inputs": {"image": "float32 (1, 3, 224, 224)"},
        "rounds": 20,
        "deployed": [
            Deployed(
                precision=p,
                bundle=f"{name}-{p}",
                source=f"{name} max_image_size=448",
                seconds={"export": 3.31, "canonicalize": 0.021, "lower": 0.034, "tune": 8.4, "check": 0.71},
                size_mb=1.93,
            )
            for p in medians
        ],
        "work": work,
        "limit": limit,
        "contenders": contenders,
    }
    return Model(name=name, **(given | changed))


def series(name: str, precision: str, sizes: list[int], ms: float, time: float, mib: float, memory: float) -> Series:
    base = sizes[0]
    return Series(
        name=name,
        precision=precision,
        ours=name in OURS,
        ms=[ms * (size / base) ** time for size in sizes],
        extra_mib=[mib * (size / base) ** memory for size in sizes],
        time=Fit(exponent=interval(time, 0.02), last=time + 0.03),
        memory=Fit(exponent=interval(memory, 0.01), last=memory),
    )


def results(models: list[Model], **changed: Any) -> Results:
    sizes = [784, 3136, 6241, 12544]
    lines = [
        series("onnxruntime-cpu", "fp32", sizes, 2.7, 1.71, 4.1, 1.0),
        series("onnxruntime-cpu", "bf16", sizes, 3.1, 1.68, 4.4, 1.0),
        series("onnxruntime-plain", "fp32", sizes, 3.4, 1.93, 9.2, 1.98),
        series("eager", "fp32", sizes, 11, 1.97, 14, 1.99),
    ]
    lines[3].ms[-1] = lines[3].extra_mib[-1] = None
    lines[3].notes.append("12,544 tokens: takes more than the 60 s that it may")
    given: dict[str, Any] = {
        "command": "attnforge bench --models all --out benchmarks/results/bench.json",
        "created": "2025-06-01T10:00:00+00:00",
        "seconds": 912.4,
        "environment": Environment(
            machine=Machine(
                system="Linux x86_64",
                processor="AMD EPYC 9B14",
                processors=2,
                instructions=["avx2", "fma", "avx512f", "avx512_bf16"],
                gpus=[],
            ),
            versions={"attnforge": "0.1.0", "torch": "2.11.0", "onnxruntime": "1.24.1", "openvino": "2026.0"},
            threads=2,
            governor="performance",
            load_before=0.12,
            load_after=1.87,
        ),
        "ceilings": CEILINGS,
        "models": models,
        "growth": [Growth(model="patch-attention", along="tokens", sizes=sizes, series=lines)],
        "left_out": {"vit in fp16": "the time allowed was spent"},
    }
    return Results(**(given | changed))


PATCH = {
    "fp32": {
        "onnxruntime-cpu": 33.04, "openvino": 38.6, "onnxruntime-plain": 46.6, "ort-fusions": 41.3,
        "openvino-plain": 52.7, "torch-compile": 72.9, "eager": 184.8,
    },
    "bf16": {"onnxruntime-cpu": 36.2, "openvino": 24.9, "torch-compile": 61.2, "eager": 143.5},
}  # fmt: skip
VIT = {
    "fp32": {"onnxruntime-cpu": 5.31, "openvino": 5.29, "onnxruntime-plain": 6.02, "ort-fusions": 4.87, "eager": 9.93},
    "bf16": {"onnxruntime-cpu": 5.92, "openvino": 6.4, "eager": 11.3},
}


def usual() -> Results:
    """Two models in two precisions: one is best in most respects, one has a faster peer."""
    wrong = {"openvino-plain bf16": "error 4.1e-02, 8.0e-03 is allowed"}
    skipped = {"tensorrt": "no CUDA device", "torch-compile fp32": "no C++ compiler"}
    first = model("patch-attention", PATCH, wrong=wrong, skipped=skipped)
    first.contenders[1].notes.append("memory could not be measured twice")
    return results([first, model("vit", VIT, 4e8)])


def parsed(found: Results, file: Path, **given: Any) -> Parsed:
    (of_growth.write_page if found.growth else write_page)(found, file, **given)
    return Parsed(file.read_text(encoding="utf-8"))


def said(page: Parsed) -> str:
    return " ".join(page.text.split())


def answer(page: Parsed, name: str, precision: str) -> str:
    """Return the first lines about one model at one precision."""
    lines = said(page).partition("and what it costs ")[2].partition("What a precision gains")[0]
    _, found, rest = lines.partition(f"{name}batch 1, tokens 3,136 ")
    assert found
    _, found, rest = rest.partition(f"{precision}: ")
    assert found
    return re.split(r"(?:fp32|bf16): |[\w-]+batch 1,", rest)[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Path]:
    file = tmp_path_factory.mktemp("bench") / "new" / "bench.html"
    example = usual()
    of_growth.write_page(example, file, compared=["vit, onnxruntime-cpu fp32: 1.07× as fast as before (1.05–1.08)"])
    return example, file


@pytest.fixture(scope="module")
def page(written: tuple[Results, Path]) -> Parsed:
    return Parsed(written[1].read_text(encoding="utf-8"))


# --- the answer -------------------------------------------------------------------------------------------------------


def test_the_first_lines_say_what_to_ship_and_what_it_costs(page: Parsed) -> None:
    answered = answer(page, "patch-attention", "fp32")
    assert "ship onnxruntime-cpu — 33.0 ms a call (95%: 32.8–33.3)" in answered
    assert "1.41× as fast as ONNX Runtime on the plain export" in answered
    assert "1.25× as fast as ort-fusions, the fastest peer" in answered
    assert "error 2.1e-7 of the 1e-6 allowed" in answered
    assert "costs: 0.41 s to load, 204 MiB, 0.61 MB on disk, deploys in 12 s" in answered
    assert "faster" not in answered and "picks" not in answered


def test_a_slow_pick_and_faster_peers_are_said(page: Parsed) -> None:
    slow_pick = answer(page, "patch-attention", "bf16")
    assert "ship openvino — 24.9 ms" in slow_pick and '"auto" picks onnxruntime-cpu, at 36.2 ms' in slow_pick
    close = answer(page, "vit", "fp32")
    assert "ship onnxruntime-cpu" in close and "openvino takes 5.29 ms (95%: 5.25–5.33), which may be chance" in close
    assert "A peer is faster: ort-fusions takes 4.87 ms (95%: 4.83–4.91), 1.09× as fast." in close
    assert "the fastest peer" not in close
    assert "ship" in answer(page, "vit", "bf16") and "faster" not in answer(page, "vit", "bf16")


def test_what_a_precision_gains_and_costs(page: Parsed) -> None:
    rows = [row for row in page.tables["precisions"] if len(row) > 2]
    by_column = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [(row["Precision"], row["Speed"], row["Backend"]) for row in by_column] == [
        ("fp32", "1×", "onnxruntime-cpu"), ("bf16", "1.33× fp32", "openvino"),
        ("fp32", "1×", "onnxruntime-cpu"), ("bf16", "0.90× fp32", "onnxruntime-cpu"),
    ]  # fmt: skip
    assert by_column[1]["ms a call"] == "=24.9 24.90" and by_column[1]["Error"] == "=0.0029 2.9e-3"
    assert by_column[1]["Peak MiB"] == "196" and by_column[1]["Deploy s"] == "12"


def test_ratios_that_pair_rounds_tell_more_than_times(tmp_path: Path) -> None:
    """Intervals of the times overlap; those of the ratios do not cross 1."""
    close = model("m", {"fp32": {"onnxruntime-cpu": 10.0, "openvino": 9.9, "eager": 9.92}})
    first = answer(parsed(results([close], growth=[]), tmp_path / "a.html"), "m", "fp32")
    assert "ship onnxruntime-cpu" in first and "openvino is a little faster: 9.90 ms" in first
    assert "A peer is faster: eager takes 9.92 ms" in first
    for one in close.contenders[1:]:
        one.ratio = interval(0.99, 0.02)
    second = answer(parsed(results([close], growth=[]), tmp_path / "b.html"), "m", "fp32")
    assert "may be chance" in second and "faster:" not in second


def test_what_is_over_its_budget_is_not_shipped(tmp_path: Path) -> None:
    example = model("m", {"fp32": {"onnxruntime-cpu": 10.0, "openvino": 20.0}, "bf16": {"eager": 30.0}})
    example.contenders[0].error = 1.1e-6
    page = parsed(results([example], growth=[]), tmp_path / "page.html")
    assert "ship openvino — 20.0 ms" in answer(page, "m", "fp32")
    assert "nothing to ship" in answer(page, "m", "bf16")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count('class="n over-budget"') == 1


def test_what_is_wrong_in_another_case_is_not_shipped(tmp_path: Path) -> None:
    example = model("m", {"fp32": {"onnxruntime-cpu": 10.0, "openvino": 8.0, "openvino-plain": 9.0, "eager": 9.5}})
    wrong = Cases(held=6, of=14, wrong="scaled-16, output: error 2e-06 is over the budget of 1e-06")
    for one in example.contenders[1:3]:
        one.cases = wrong
    example.contenders[3].cases = Cases(held=2, of=14)
    page = parsed(results([example], growth=[]), tmp_path / "page.html")
    first = answer(page, "m", "fp32")
    assert "ship onnxruntime-cpu — 10.0 ms" in first and "A peer is faster: eager takes 9.50 ms" in first
    assert "1.05× as fast, checked in 2 of 14 cases." in first
    for name, speed in (("openvino", "1.25"), ("openvino-plain", "1.11")):
        assert f"Not {name}, {speed}× as fast: it is wrong in scaled-16, output: error 2e-06" in first
    assert "| openvino-plain † | fp32 |" in table(example) and "† openvino-plain fp32 is wrong in scaled-16" in table(
        example
    )
    example.contenders[3].latency = latency(12.0)
    example.contenders[3].ratio = interval(1.2, 0.004)
    first = answer(parsed(results([example], growth=[]), tmp_path / "slower.html"), "m", "fp32")
    assert "1.20× as fast as the module in PyTorch, as its author wrote it" in first and "A peer is faster" not in first
    example.contenders[0].cases = wrong
    none = answer(parsed(results([example], growth=[]), tmp_path / "none.html"), "m", "fp32")
    assert "nothing to ship" in none and "Not onnxruntime-cpu: it is wrong in scaled-16" in none


def test_the_usual_peer_stays_and_the_fastest_is_one_that_is_right(page: Parsed, tmp_path: Path) -> None:
    example = model(
        "m", {"fp32": {"onnxruntime-cpu": 10.0, "onnxruntime-plain": 10.01, "ort-fusions": 11.0, "eager": 24.0}}
    )
    example.contenders[1].cases = Cases(held=6, of=14, wrong="scaled-16, output: error 2 is over the budget of 1")
    held = parsed(results([example], growth=[]), tmp_path / "page.html")
    first = answer(held, "m", "fp32")
    assert "1.00× as fast as ONNX Runtime on the plain export" in first
    assert "as fast as ONNX Runtime on the plain export, which is wrong in another case" in first
    assert "1.10× as fast as ort-fusions, the fastest peer not known to be wrong" in first
    assert "peers as fast, were checked in every reference case" in said(held)
    assert "in every reference case" not in said(page)


def test_that_what_auto_picks_is_wrong_is_a_warning(tmp_path: Path) -> None:
    """It does not matter whether it is faster or slower than the right one."""
    for other in (8.0, 12.0):
        example = model("m", {"fp32": {"openvino": 10.0, "onnxruntime-cpu": other}})
        example.contenders[0].cases = Cases(held=14, of=14, wrong="scaled-16, output: error 2 is over the budget of 1")
        first = answer(parsed(results([example], growth=[]), tmp_path / f"{other}.html"), "m", "fp32")
        assert f"ship onnxruntime-cpu — {other:.2f}"[:-1] in first and "Not openvino" not in first
        warning = (
            '"auto" picks openvino, which is wrong in scaled-16, output: error 2 is over the budget of 1: name onnx'
        )
        assert warning in first


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_numbers_are_the_results(written: tuple[Results, Path], page: Parsed) -> None:
    found = written[0]
    rows = [row for row in page.tables["contenders"] if row[0] != "Contender"]  # of both models
    contenders = [
        one
        for m in found.models
        for p in ("fp32", "bf16")
        for one in sorted(m.contenders, key=lambda c: c.latency.median.value)
        if one.precision == p
    ]
    assert len(rows) == len(contenders) == 19
    for row, one in zip(rows, contenders, strict=True):
        assert row[0].startswith(one.name) and one.what in row[0] and ("picked" in row[0]) == one.picked
        assert row[1] == one.precision
        for cell, value in ((row[2], one.latency.median.value), (row[6], one.ratio.value), (row[8], one.error)):  # type: ignore[union-attr]
            assert float(cell.split()[0].removeprefix("=")) == value
        assert row[2].split()[1].startswith(f"{one.latency.median.value:.2f}"[:4])
        for cell, number in zip(row[3:6], (one.latency.p90, one.latency.p99, one.latency.min), strict=True):
            assert float(cell) == pytest.approx(number, abs=0.051)
        assert one.share is not None and float(row[7].removesuffix("%")) == float(f"{100 * one.share:.2g}")
        assert row[8].endswith("21%" if one.precision == "fp32" else "36%")
    rates = [row for row in page.tables["throughput"] if row[0] != "Samples a second"]
    assert [float(row[2].split()[0][1:]) for row in rates] == [c.throughput[0].per_second.value for c in contenders]


def test_everything_else_is_there(page: Parsed) -> None:
    text = said(page)
    for sentence in (
        "vit, onnxruntime-cpu fp32: 1.07× as fast as before (1.05–1.08)",
        "Not timed because of wrong output: openvino-plain bf16 of patch-attention.",
        "openvino-plain bf16: error 4.1e-02, 8.0e-03 is allowed",
        "tensorrt: no CUDA device",
        "torch-compile fp32: no C++ compiler",
        "openvino fp32: memory could not be measured twice",
        "eager fp32: 12,544 tokens: takes more than the 60 s that it may",
        "vit in fp16: the time allowed was spent",
        "copied 21.0 GB/s, computed 1.40·10⁹ exponentials per second, and multiplied matrices at 190 GFLOP/s in fp32",
        "AMD EPYC 9B14, 2 processors, Linux x86_64",
        "avx2, fma, avx512f, avx512_bf16",
        "0.12 before, 1.87 after",
        "torch 2.11.0",
        "attnforge bench --models all --out benchmarks/results/bench.json",
    ):
        assert sentence in text
    growth = page.tables["growth"]
    assert growth[1][:3] == ["onnxruntime-cpu", "fp32", "2.7"] and growth[4][5] == "–"
    assert growth[1][6] == "=1.71 1.71 1.68–1.74" and growth[1][7] == "1.74"
    assert page.tables["deployed"][1][-1] == "12.48"


def test_the_page_needs_nothing_else_and_can_be_read_aloud(written: tuple[Results, Path], page: Parsed) -> None:
    text = written[1].read_text(encoding="utf-8")
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    for _, attrs in page.tags:
        assert (attrs.get("src") or "data:").startswith("data:")
        assert re.match("data:|#", attrs.get("href") or "#")
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {(a.get("href") or "#").removeprefix("#") for t, a in page.tags if t == "a"} <= set(ids)
    style = re.sub(r"data:[\w/+;]*base64,[\w/+=]*", "", text)
    assert "url(" not in style and "@import" not in style and "http" not in style
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    alts = [attrs["alt"] or "" for tag, attrs in page.tags if tag == "img"]
    assert len(set(alts)) == len(alts) == 7 and all(len(alt) > 60 for alt in alts)
    assert "onnxruntime-cpu fp32 33.0 ms (95%: 32.8–33.3)" in alts[0]
    assert "eager fp32 5.59 (5.57–5.62)" in alts[1]
    assert "190 GFLOP/s in fp32" in alts[4] and "patch-attention has 364 operations per byte" in alts[4].replace(
        "360", "364"
    )
    assert "2.70 at 784, 309 at 12,544: ~ tokens^1.71 (1.68–1.74)" in alts[5]


def test_hostile_names_are_text(tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script>\"><img src=x onerror=alert(1)> $\\frac{ | "
    one = model(
        hostile, {"fp32": {"onnxruntime-cpu": 10.0, "eager": 20.0}}, sizes={hostile: 3}, inputs={hostile: hostile}
    )
    one.wrong = one.skipped = {hostile: hostile}
    one.work["fp32"].uncounted = [hostile]
    for contender in one.contenders:
        contender.name = contender.what = hostile
        contender.notes = [hostile]
    example = results([one], command=hostile, left_out={hostile: hostile})
    example.growth[0].along = example.growth[0].model = example.growth[0].series[0].name = hostile
    example.growth[0].deploy_seconds = [{hostile: 1.0}]
    example.environment.machine.processor = example.environment.governor = hostile
    page = parsed(example, tmp_path / "page.html", compared=[hostile])
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any("onerror" in attrs for _, attrs in page.tags)
    assert hostile in page.text and hostile not in (tmp_path / "page.html").read_text(encoding="utf-8")
    row = table(one).splitlines()[2]
    assert row.count("|") - row.count("\\|") == 8
    assert len(of_growth.save_plots(example, tmp_path)) == 5 and len(list(tmp_path.glob("*.png"))) == 5


def test_what_was_not_measured_is_a_dash_or_left_out(tmp_path: Path) -> None:
    """In empty results, for a model without contenders, and where all optional figures are missing."""
    bare = model("bare", {"fp32": {"onnxruntime-cpu": 10.0}}, deployed=[], work={}, limit={}, sizes={}, inputs={})
    one = bare.contenders[0]
    one.ratio = one.share = one.cold = one.memory = one.size_mb = None
    one.throughput, one.picked, one.latency.rounds = [], False, []
    empty = model("empty", {}, wrong={"eager fp32": "not finite"})
    page = parsed(results([bare, empty], ceilings=None, growth=[]), tmp_path / "bare.html")
    text = said(page)
    assert "error 2.1e-7 of the 1e-6 allowed" in text and "costs:" not in text
    assert "No contender was timed." in text and "eager fp32: not finite" in text and "None" not in text
    assert page.tables["contenders"][1][6:] == ["–", "–", "=2.1e-07 2.1e-721%", "–", "–", "–", "–"]
    assert table(bare).splitlines()[2].endswith("| – | – | – | 2.1e-7 |") and len(table(empty).splitlines()) == 2

    series = Series(name="eager", precision="fp32", ours=False, ms=[None, 0.0], extra_mib=[])
    growth = [
        Growth(model="m", along="tokens", sizes=[2, 4], series=[series], deploy_seconds=[{}]),
        Growth(model="m", along="layers", sizes=[], series=[]),
    ]
    assert (
        growth_table(growth[0]).splitlines()[2] == "| eager | fp32 | – | 0 | – | – |" and growth_table(growth[1]) == ""
    )
    nothing = results([], growth=growth, left_out={})
    nothing.environment = nothing.environment.model_copy(
        update={"load_before": None, "load_after": None, "versions": {}}
    )
    text = said(parsed(nothing, tmp_path / "nothing.html"))
    assert "No model was measured." in text and "Nothing was measured." in text and "– before, – after" in text
    assert "None" not in text and of_growth.save_plots(nothing, tmp_path) == []


def test_a_page_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bench.html"
    file.write_text("mine")
    nothing = results([], growth=[])
    with pytest.raises(UsageError, match="--force"):
        write_page(nothing, file)
    assert file.read_text() == "mine"
    write_page(nothing, file, force=True)
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnavailableError, match=re.escape("pip install 'attnforge[report]'")):
        write_page(nothing, tmp_path / "new.html")


def test_tables_in_markdown() -> None:
    example = usual()
    lines = table(example.models[0]).splitlines()
    assert len(lines) == 2 + 11 and len({line.count("|") for line in lines}) == 1
    assert lines[2] == ("| **onnxruntime-cpu** | fp32 | 33.0 (32.8–33.3) | 1.00 (1.00–1.00) | 40% | 23 | 2.1e-7 |")
    times, memory = growth_table(example.growth[0]).split("\n\n")
    assert times.splitlines()[0].startswith("| ms per call | precision | 784 tokens | 3,136 tokens |")
    assert times.splitlines()[5] == "| eager | fp32 | 11.0 | 168.8 | 655.0 | – | 1.97 (1.93–2.01) | 2.00 |"
    assert memory.splitlines()[4] == ("| onnxruntime-plain | fp32 | 9 | 143 | 559 | 2,228 | 1.98 (1.96–2.00) | 1.98 |")


def test_plots_are_files(tmp_path: Path) -> None:
    example = results([model("vit", VIT, 4e8), model("vit", {"fp32": {"eager": 3.0}})])
    files = of_growth.save_plots(example, tmp_path / "new")
    assert [file.name for file in files] == [
        "roofline.png", "vit-latency.png", "vit-ratios.png", "vit-latency-2.png", "vit-ratios-2.png",
        "patch-attention-time-over-tokens.png", "patch-attention-memory-over-tokens.png",
    ]  # fmt: skip
    for file in files:
        with Image.open(file) as image:
            assert image.format == "PNG" and image.width > 1000 and 250 < image.height < 2000
            grey = np.asarray(image.convert("L"))
            assert grey.min() < 80 and grey.max() == 255


def test_plots_bear_little_and_odd_numbers() -> None:
    one = contender("eager", "fp32", 2.5, 2.5)
    one.latency = one.latency.model_copy(update={"rounds": [[], [2.5]], "min": 0.0, "p99": 2.5})
    lonely = model("m", {}, contenders=[one])
    for picture in (plots.latencies(lonely), plots.ratios(lonely)):
        assert picture is not None and picture.src.startswith("data:image/svg+xml;base64,") and picture.height > 100
    thin = Series(name="a $\\frac{ b", precision="int8", ours=True, ms=[3.0], extra_mib=[-1.0])
    grown = Growth(model="m", along="$tokens", sizes=[7], series=[thin])
    assert of_growth.growth_plot(grown, "time") is not None and of_growth.growth_plot(grown, "memory") is None
    assert plots.roofline(results([lonely])) is None
    flat = Ceilings(threads=1, flops={}, bandwidth=1e9, exponentials=1e9)
    assert plots.roofline(results([model("m", {"fp32": {"eager": 1.0}})], ceilings=flat)) is not None


# --- in a browser -----------------------------------------------------------------------------------------------------

SEEN = """
const root = document.documentElement, box = e => e.getBoundingClientRect();
const contenders = document.querySelector('.contenders'), around = contenders.closest('.scroll');
around.scrollLeft = 9999;
return {
  scroll: root.scrollWidth, client: root.clientWidth, width: window.innerWidth, height: window.innerHeight,
  heading: box(document.querySelector('h1')).bottom,
  answers: [...document.querySelectorAll('.answer')].map(e => [box(e).top, box(e).bottom]),
  precisions: box(document.querySelector('.precisions')).bottom,
  stays: box(contenders.querySelector('tbody th')).left - box(around).left,
  pictures: [...document.querySelectorAll('img')].map(
    p => [box(p).width, box(p).height, box(p).right, p.naturalWidth, p.complete, p.alt]),
  wide: [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll')
    && box(e).right > root.clientWidth + 1).map(e => e.outerHTML.slice(0, 80)),
  clipped: [...document.querySelectorAll('th, td')].filter(e => e.scrollWidth > e.clientWidth + 1).length,
  text: document.body.innerText, ground: getComputedStyle(document.body).backgroundColor,
};
"""


def test_a_browser_shows_it(browser: Any, written: tuple[Results, Path]) -> None:
    file, grounds = written[1], set()
    for width, height, scheme in ((1280, 800, "dark"), (1280, 800, "light"), (390, 844, "light")):
        of_size(browser, width, height)
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(file.as_uri())
        assert inaccessible(browser) == []
        seen = browser.execute_script(SEEN)
        grounds.add(seen["ground"])
        assert (seen["width"], seen["height"]) == (width, height)
        assert seen["scroll"] <= seen["client"] and seen["wide"] == [] and seen["clipped"] == 0
        assert 0 <= seen["stays"] < 3
        tops, bottoms = zip(*seen["answers"], strict=True)
        assert len(tops) == 4 and seen["heading"] <= tops[0] and list(tops) == sorted(tops)
        if width == 1280:
            assert bottoms[-1] < seen["precisions"] < height
        else:
            assert bottoms[2] < height
        assert "ship onnxruntime-cpu — 33.0 ms a call" in seen["text"][:200]
        assert len(seen["pictures"]) == 7
        for shown, tall, right, natural, complete, alt in seen["pictures"]:
            assert shown > 150 and tall > 100 and right <= width and natural > 0 and complete and alt
    assert len(grounds) == 2
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert file.as_uri() in asked and all(url.startswith(("data:", file.as_uri())) for url in asked)
