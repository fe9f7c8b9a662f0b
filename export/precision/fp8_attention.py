"""Attention in fp8: where TensorRT fuses it, the ranges of its operands, and what it costs.

Query, key and value are rounded to E4M3 by one scale each, from calibration data, and what the softmax makes by a fixed
1/448, as NVIDIA's Model-Optimizer writes it (https://github.com/NVIDIA/Model-Optimizer, `fp8_exporter.py`). Numbers
beyond the data's are clipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.qdq import MOST_FP8
from attnforge.export.lowering.attention import Attention, attentions, in_fp8
from attnforge.export.lowering.tensorrt import why_not_in_fp8
from attnforge.export.precision.calibration import HEADROOM
from attnforge.export.precision.rounding import Rounded, peaks_of, with_errors

WITHOUT_DATA = "attention in fp8 needs ranges, which real data gives"

LEAST = 0.03
"""The least range of an operand at its product: its scale is still a normal number in fp16, in which attention is
computed beside it."""


def sites_for_fp8(
    model: ir.Model, sites: Sequence[Site], data: Sequence[Mapping[str, Array]], is_real: bool
) -> tuple[list[Rounded], dict[str, str]]:
    """The attention that fp8 is for, with its ranges, and why any other is left as it is, by the site's name.

    Args:
        model: canonical, fp32; is not touched.
        sites: its attention.
        data: inputs of the model.
        is_real: whether they are such as the model will see; else nothing is in fp8, for ranges are the data's.
    """
    kept: dict[str, str] = {}
    found: dict[str, tuple[Site, Attention]] = {}
    for site, attention in attentions(model, sites):
        if (why := why_not_in_fp8(attention) or (None if is_real else WITHOUT_DATA)) is not None:
            kept[site.name] = why
            continue
        found[str(attention.node.name)] = site, attention
    if not found:
        return [], kept
    names = {str(operand.value.name) for _, attention in found.values() for operand in attention.operands}
    peaks = peaks_of(model, sites, names, data)
    rounded = [Rounded(site, node, _scales(attention, peaks), in_fp8) for node, (site, attention) in found.items()]
    return with_errors(model, sites, rounded, data), kept


def _scales(attention: Attention, peaks: Mapping[str, float]) -> tuple[float, ...]:
    """Of query, key and value; the query's is for it as it comes, though it is rounded behind the attention's scale."""
    query, *others = (HEADROOM * peaks[str(operand.value.name)] for operand in attention.operands)
    ranges = max(query, LEAST / min(abs(attention.scale), 1.0)), *(max(peak, LEAST) for peak in others)
    return tuple(most / MOST_FP8 for most in ranges)
