"""The walks from a softmax return a record of what they passed, or why and where they ended; passes report whether
they changed the graph."""

import onnx_ir as ir
import pytest

from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.attention.layout import Layout
from attnforge.export.attention.operands import Position
from attnforge.export.attention.softmax import restore_softmax
from attnforge.export.attention.walk_back import Bias, Ended, Fill, Scores, Steps, both_computed, walk_to_product
from attnforge.export.attention.walk_forward import walk_to_outputs
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt

SCORES = "float[2,4,5,7]"


def model(*body: str) -> ir.Model:
    """Scores `s`, from which `body` computes `t`, a softmax, and the product with the values."""
    lines = ["s = MatMul(q, k)", *body, "w = Softmax<axis = -1>(t)", "y = MatMul(w, v)"]
    return ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 23]>\n'
        f"g (float[2,4,5,8] q, float[2,4,8,7] k, float[2,4,7,8] v, bool[5,7] mask, bool[2,4,5,7] whole, "
        f"{SCORES} bias) "
        f"=> (float[2,4,5,8] y) <{SCORES} s, {SCORES} t, {SCORES} u, {SCORES} w, "
        "float c = {0.5}, float low = {-1e9}> {\n" + "\n".join(lines) + "\n}"
    )


def softmax(graph: ir.Graph) -> ir.Node:
    return next(node for node in graph if node.op_type == "Softmax")


def position(value: ir.Value) -> Position:
    layout = Layout.fresh(value)
    return Position(value, layout, layout.dims[-1][0])


def walked_back(*body: str) -> Scores | Ended:
    source = softmax(model(*body).graph).inputs[0]
    assert source is not None
    return walk_to_product(position(source))


def test_a_walk_back_records_what_it_passed() -> None:
    scores = walked_back("u = Add(s, bias)", "t = Where(mask, u, low)")
    assert isinstance(scores, Scores)
    assert scores.steps.path == ("Where", "Add", "MatMul")
    fill, bias = scores.steps.masking
    assert isinstance(fill, Fill) and fill.number == pytest.approx(-1e9) and not fill.inverted
    assert isinstance(bias, Bias) and bias.operand.value.name == "bias" and bias.factor == 1.0
    assert (scores.query.value.name, scores.key.value.name) == ("q", "k")
    assert both_computed(scores)


@pytest.mark.parametrize("product", ["Mul(s, u)", "Mul(u, s)"])
def test_a_mask_as_large_as_the_scores_multiplies_them_on_either_side(product: str) -> None:
    scores = walked_back("u = Cast<to = 1>(whole)", f"t = {product}")
    assert isinstance(scores, Scores), scores
    (fill,) = scores.steps.masking
    assert isinstance(fill, Fill) and fill.multiplied and fill.number == 0 and scores.query.value.name == "q"


@pytest.mark.parametrize(
    ("rows", "is_site"), [("n", True), ("1", True), ("m", False), ("last", True), ("seventh", False)]
)
def test_a_dim_of_another_name_may_be_one(rows: str, is_site: bool) -> None:
    """A bias of `m` rows is valid with one row and with one row per query, and attention takes only one of the two. The
    number of rows that MPT cuts from its table, 128 - max(0, 128 - n), is the number of queries wherever it is valid.
    """
    graph = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 23]>\n'
        f"g (float[2,4,n,8] q, float[2,4,8,k] key, float[2,4,k,8] v, float[{rows},k] bias) => (float[2,4,n,8] y) "
        "<float[2,4,n,k] s, float[2,4,n,k] t, float[2,4,n,k] w> "
        "{ s = MatMul(q, key) t = Add(s, bias) w = Softmax<axis = -1>(t) y = MatMul(w, v) }"
    )
    if expression := {"last": "128 - Max(0, 128 - n)", "seventh": "Mod(n, 7)"}.get(rows):
        graph.graph.inputs[3].shape = ir.Shape([ir.SymbolicDim(expression), "k"])
    (site,) = canonicalize(graph).sites
    assert (site.node is not None) is is_site
    assert is_site or "does not broadcast to the scores" in str(site.reason)


def test_a_walk_back_multiplies_factors() -> None:
    scores = walked_back("u = Mul(s, c)", "t = Div(u, low)")
    assert isinstance(scores, Scores) and scores.steps.scale == pytest.approx(0.5 / -1e9)


@pytest.mark.parametrize(
    ("body", "path", "reason"),
    [
        (["t = Sin(s)"], ("Sin",), "the scores come from Sin"),
        (["u = Exp(s)", "t = Mul(u, c)"], ("Mul", "Exp"), "the scores come from Exp"),
        (["u = Sin(s)", "t = Add(u, bias)"], ("Add",), "neither side of Add is an inner product"),
    ],
)
def test_a_walk_back_that_ends_reports_where_and_why(body: list[str], path: tuple[str, ...], reason: str) -> None:
    ended = walked_back(*body)
    assert isinstance(ended, Ended)
    assert ended.steps.path == path and reason in ended.reason
    assert not both_computed(ended)


def test_a_walk_forward_gives_one_record_for_each_product() -> None:
    graph = model("t = Mul(s, c)").graph
    walk = walk_to_outputs(position(softmax(graph).outputs[0]), Steps())
    assert not isinstance(walk, Ended)
    (weights,) = walk
    assert (
        weights.steps.path == ("MatMul",) and weights.value.value.name == "v" and weights.product.outputs[0].name == "y"
    )


def test_a_walk_forward_that_ends_reports_where_and_why() -> None:
    graph = model("t = Mul(s, c)").graph
    node = softmax(graph)
    graph.outputs.append(node.outputs[0])
    ended = walk_to_outputs(position(node.outputs[0]), Steps())
    assert isinstance(ended, Ended) and ended.steps.path == () and "are an output of the model" in ended.reason


def test_passes_report_whether_they_changed_the_graph() -> None:
    graph = model("t = Mul(s, c)")
    assert not restore_softmax(graph).modified
    first = canonicalize(graph)
    assert first.model is graph and first.modified and [site.node for site in first.sites] == ["graph/Attention"]
    second = canonicalize(graph)
    assert not second.modified and [site.node for site in second.sites] == ["graph/Attention"]
    for target in ("onnxruntime", "tensorrt"):
        copy = graph.clone()
        if target == "onnxruntime":
            lowered = for_onnxruntime.lower(copy, first.sites, {})
        else:
            lowered = for_tensorrt.lower(copy, first.sites)
        assert [record.site for record in lowered] == ["graph"]


def test_a_pass_that_refuses_every_site_changes_nothing() -> None:
    graph = model("t = Sin(s)")
    canonicalize(graph)  # removes the constants that nothing reads
    result = canonicalize(graph)
    (site,) = result.sites
    assert not result.modified and site.node is None and site.reason is not None and "Sin" in site.reason
