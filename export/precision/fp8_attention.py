"""fp8 attention: where TensorRT fuses it, the ranges of its operands, and its error.

Query, key and value are rounded to E4M3 with one scale each, from calibration data, and the softmax's output with a
fixed 1/448, as in NVIDIA's Model-Optimizer (https://github.com/NVIDIA/Model-Optimizer, `fp8_exporter.py`). Numbers
beyond the data's range are clipped.
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

WITHOUT_DATA = "fp8 attention needs ranges from real data"

LEAST = 0.03
"""The least range of an operand of a product: its scale is still a normal number in fp16, the type of attention around
it."""


def sites_for_fp8(
    model: ir.Model, sites: Sequence[Site], data: Sequence[Mapping[str, Array]], is_real: bool
) -> tuple[list[Rounded], dict[str, str]]:
    """The sites whose attention can be in fp8, with their ranges, and why any other is left unchanged, by site name.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        data: inputs of the model.
        is_real: whether they are like what the model will see; if not, nothing is in fp8, because ranges depend on the
            data.
    """
    kept: dict[str, str] = {}
    fitting: dict[str, tuple[Site, Attention]] = {}
    for site, attention in attentions(model, sites):
        if (why := why_not_in_fp8(attention) or (None if is_real else WITHOUT_DATA)) is not None:
            kept[site.name] = why
            continue
        fitting[str(attention.node.name)] = site, attention
    if not fitting:
        return [], kept
    names = {str(operand.value.name) for _, attention in fitting.values() for operand in attention.operands}
    peaks = peaks_of(model, sites, names, data)
    rounded = [Rounded(site, node, _scales(attention, peaks), in_fp8) for node, (site, attention) in fitting.items()]
    return with_errors(model, sites, rounded, data), kept


def _scales(attention: Attention, peaks: Mapping[str, float]) -> tuple[float, ...]:
    """Scales of query, key and value; the query's is for its original numbers, although it is rounded after scaling."""
    query, *others = (HEADROOM * peaks[str(operand.value.name)] for operand in attention.operands)
    ranges = max(query, LEAST / min(abs(attention.scale), 1.0)), *(max(peak, LEAST) for peak in others)
    return tuple(most / MOST_FP8 for most in ranges)
