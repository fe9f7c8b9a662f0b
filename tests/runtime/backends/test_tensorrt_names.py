"""Every TensorRT name that the code uses exists in TensorRT-RTX, and in TensorRT 11.4 too.

TensorRT itself runs only on a GPU. Its Python bindings are a separate package, and their definitions can be inspected
on any machine once the C functions that they are linked to exist: a stub library provides these in a separate process,
which never calls them.

The code names TensorRT's objects after their classes, so the class whose members are used follows from the source.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("tensorrt-names")

pytest.importorskip("tensorrt_rtx")

ROOT = Path(__file__).parents[3]

OBJECTS = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "error": "ParserError",
    "inspector": "EngineInspector",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "profile": "IOptimizationProfile",
    "runtime": "Runtime",
    "runtime_cache": "IRuntimeCache",
    "runtime_config": "IRuntimeConfig",
    "timing_cache": "ITimingCache",
    "trt": "trt",
}
"""The class of a variable, parameter or attribute of this name, without leading underscores; exceptions have none."""

RTX_ONLY = {
    "CudaGraphStrategy.DISABLED",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "DynamicShapesKernelSpecializationStrategy.LAZY",
    "EngineValidity.INVALID",
    "IExecutionContext.is_stream_capturable",
    "IRuntimeCache.deserialize",
    "IRuntimeCache.serialize",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
    "Runtime.get_engine_validity",
    "trt.ComputeCapability",
    "trt.CudaGraphStrategy",
    "trt.DynamicShapesKernelSpecializationStrategy",
    "trt.EngineValidity",
}
"""Names that only TensorRT-RTX has. The code checks which of the two it was given before it uses them."""

BY_POLYGRAPHY = {
    "Builder.build_serialized_network",
    "Builder.create_builder_config",
    "Builder.create_network",
    "Builder.create_optimization_profile",
    "IBuilderConfig.add_optimization_profile",
    "IBuilderConfig.profiling_verbosity",
    "ILogger.log",
    "INetworkDefinition.get_input",
    "INetworkDefinition.num_inputs",
    "IOptimizationProfile.set_shape",
    "ITensor.is_shape_tensor",
    "OnnxParser.get_error",
    "OnnxParser.num_errors",
    "OnnxParser.parse_from_file",
    "ProfilingVerbosity.DETAILED",
    "trt.Builder",
    "trt.OnnxParser",
}
"""Names that Polygraphy's loaders use of either TensorRT."""

BY_POLYGRAPHY_RTX = {"IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability"}
"""Names that they use of TensorRT-RTX alone."""

LIBRARIES = ("libnvinfer.so.11", "libnvinfer_plugin.so.11", "libnvonnxparser.so.11")
SYMBOLS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry",
    "getNvOnnxParserVersion", "getPluginRegistry", "initLibNvInferPlugins",
)  # fmt: skip
"""All symbols that TensorRT 11.4's bindings import from these libraries; the import error names a missing one."""


@dataclass(frozen=True)
class Api:
    """The definitions of a TensorRT module.

    Attributes:
        version: of the module.
        members: names by class, and the module's own under "trt".
        returns: class of the object that a method returns, by "Class.method".
    """

    version: str
    members: dict[str, list[str]]
    returns: dict[str, str]

    def __contains__(self, name: str) -> bool:
        owner, _, member = name.rpartition(".")
        return member in self.members.get(owner, [])


def describe(module: str) -> None:
    """Print an :class:`Api` as JSON. Other processes run its source, so it imports all that it needs."""
    import importlib
    import json
    import re

    trt = importlib.import_module(module)
    classes = {name: value for name, value in vars(trt).items() if isinstance(value, type)}
    for outer, owner in list(classes.items()):
        classes |= {f"{outer}.{name}": value for name, value in vars(owner).items() if isinstance(value, type)}
    returns = {}
    for name, owner in classes.items():
        for member in dir(owner):
            signatures = re.findall(r"-> (?:\w+(?:\.|::))*(\w+)$", getattr(owner, member).__doc__ or "", re.MULTILINE)
            if len(set(signatures)) == 1:
                returns[f"{name}.{member}"] = signatures[0]
    members = {"trt": dir(trt), **{name: dir(owner) for name, owner in classes.items()}}
    print(json.dumps({"version": trt.__version__, "members": members, "returns": returns}))


def api(module: str, **environment: str) -> Api:
    code = f"{inspect.getsource(describe)}\ndescribe({module!r})"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Api(**json.loads(done.stdout))


@pytest.fixture(scope="module")
def rtx() -> Api:
    """TensorRT-RTX as installed."""
    return api("tensorrt_rtx")


@pytest.fixture(scope="module")
def tensorrt(tmp_path_factory: pytest.TempPathFactory) -> Api:
    """TensorRT, from its bindings alone."""
    if find_spec("tensorrt_bindings") is None:
        pytest.skip("TensorRT's bindings are not installed; pip install --no-deps tensorrt_cu13_bindings")
    if sys.platform != "linux":
        pytest.skip("TensorRT's bindings are linked to stubs on Linux only")
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C compiler to make the stubs with that TensorRT's bindings are linked to")
    folder = tmp_path_factory.mktemp("stubs")
    source = folder / "stubs.c"
    source.write_text("".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in SYMBOLS), encoding="utf-8")
    for library in LIBRARIES:
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / library, source], check=True)
    return api("tensorrt_bindings", LD_LIBRARY_PATH=f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}")


@dataclass(frozen=True)
class Use:
    """A TensorRT name in the source, such as "Builder.create_network" or "trt.Builder"."""

    name: str
    file: str
    line: int


class Reader:
    """Collects the TensorRT names that a source uses.

    Attributes:
        uses: every name.
        misnamed: assignments whose name :data:`OBJECTS` has under another class, or not at all.
    """

    def __init__(self, file: str, source: str, api: Api) -> None:
        self._file, self._api = file, api
        tree = ast.parse(source)
        self._exceptions = {
            id(inner)
            for handler in ast.walk(tree)
            if isinstance(handler, ast.ExceptHandler)
            for inner in ast.walk(handler)
            if isinstance(inner, ast.Name) and inner.id == handler.name
        }
        self._aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(alias)], value=ast.Attribute(value=module) as value):
                    if self._class_of(module) == "trt" and (named := self._class_of(value)) is not None:
                        self._aliases[alias] = named
        self.uses = list(dict.fromkeys(use for node in ast.walk(tree) for use in self._used(node)))
        self.misnamed = [wrong for node in ast.walk(tree) for wrong in self._misnamed(node)]

    def _used(self, node: ast.AST) -> Iterator[Use]:
        match node:
            case ast.Attribute(value=value, attr=name):
                pass
            case ast.Call(ast.Name("getattr" | "hasattr" | "setattr"), [value, ast.Constant(str(name)), *_]):
                pass
            case _:
                return
        if (owner := self._class_of(value)) is not None:
            yield Use(f"{owner}.{name}", self._file, node.lineno)

    def _class_of(self, node: ast.expr | None) -> str | None:
        """Return the class of `node`, "trt" for the module, None where it cannot be inferred."""
        match node:
            case ast.Call(ast.Attribute(value=value, attr=name)):
                owner = self._class_of(value)
                if owner == "trt":
                    return name
                returned = self._api.returns.get(f"{owner}.{name}")
                return returned if returned in self._api.members else None
            case ast.Name(name) | ast.Attribute(attr=name) if known := OBJECTS.get(name.lstrip("_")):
                return None if id(node) in self._exceptions else known
            case ast.Name(name):
                return self._aliases.get(name)
            case ast.Attribute(value=value, attr=name):
                owner = self._class_of(value)
                inner = name if owner == "trt" else f"{owner}.{name}"
                return inner if inner in self._api.members else None
        return None

    def _misnamed(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                targets = [target]
            case _:
                return
        for branch in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
            owner = self._class_of(branch)
            for name in targets if owner in OBJECTS.values() else []:
                if self._class_of(name) != owner:
                    yield f"{self._file}:{node.lineno}: {ast.unparse(name)} is of {owner}"


def sources() -> dict[str, str]:
    """The modules that name TensorRT."""
    files = (file for folder in ("export", "runtime") for file in sorted((ROOT / folder).rglob("*.py")))
    texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}
    return {file: text for file, text in texts.items() if re.search(r"(\b|_)trt\.", text)}


@pytest.fixture(scope="module")
def readers(rtx: Api) -> list[Reader]:
    return [Reader(file, text, rtx) for file, text in sources().items()]


def unknown(readers: list[Reader], api: Api, known: Collection[str] = ()) -> list[str]:
    return [
        f"{use.file}:{use.line}: {use.name} is not in {api.version}"
        for reader in readers
        for use in sorted(reader.uses, key=lambda use: use.line)
        if use.name not in api and use.name not in known
    ]


def test_tensorrt_rtx_has_every_name(readers: list[Reader], rtx: Api) -> None:
    wrong = unknown(readers, rtx)
    assert not wrong, "\n".join(wrong)


def test_tensorrt_has_every_name(readers: list[Reader], tensorrt: Api) -> None:
    wrong = unknown(readers, tensorrt, RTX_ONLY)
    assert not wrong, "\n".join(wrong)


def test_names_of_tensorrt_rtx_alone_are_used_and_only_it_has_them(
    readers: list[Reader], rtx: Api, tensorrt: Api
) -> None:
    used = {use.name for reader in readers for use in reader.uses}
    assert used >= RTX_ONLY
    assert {name for name in RTX_ONLY if name not in rtx} == set()
    assert {name for name in RTX_ONLY if name in tensorrt} == set()


def test_objects_are_named_after_their_classes(readers: list[Reader]) -> None:
    wrong = [line for reader in readers for line in reader.misnamed]
    assert not wrong, "\n".join(wrong)


def test_the_reader_collects_the_names_that_the_code_uses(readers: list[Reader]) -> None:
    """A reader that collects no names would report no errors."""
    assert {"export/tensorrt/process.py", "runtime/backends/tensorrt.py"} <= sources().keys()
    used = {use.name for reader in readers for use in reader.uses}
    assert used >= {
        "BuilderFlag.TF32",
        "IBuilderConfig.create_timing_cache",
        "IBuilderConfig.set_flag",
        "ICudaEngine.create_execution_context",
        "IExecutionContext.execute_async_v3",
        "INetworkDefinition.num_inputs",
        "ITimingCache.serialize",
        "Runtime.deserialize_cuda_engine",
        "trt.ComputeCapability",
    }
    assert len(used) >= 30


def test_both_have_the_names_that_polygraphy_uses(rtx: Api, tensorrt: Api) -> None:
    folder = Path(str(next(iter(find_spec("polygraphy").submodule_search_locations)))) / "backend"  # type: ignore
    text = "".join(
        file.read_text(encoding="utf-8") for name in ("trt", "tensorrt_rtx") for file in (folder / name).glob("*.py")
    )
    names = {re.escape(name.partition(".")[2]) for name in BY_POLYGRAPHY | BY_POLYGRAPHY_RTX}
    assert [name for name in names if not re.search(rf"(\.|def ){name}\b", text)] == []
    assert {name for name in BY_POLYGRAPHY | BY_POLYGRAPHY_RTX if name not in rtx} == set()
    assert {name for name in BY_POLYGRAPHY if name not in tensorrt} == set()
    assert {name for name in BY_POLYGRAPHY_RTX if name in tensorrt} == set()


def test_the_two_have_the_expected_versions(rtx: Api, tensorrt: Api) -> None:
    """Both define many members, so the checks for presence are meaningful."""
    assert rtx.version.startswith("1.") and tensorrt.version.startswith("11.")
    for library in (rtx, tensorrt):
        assert len(library.members["trt"]) > 100 and len(library.members["ICudaEngine"]) > 30
        assert "ICudaEngine.nonsense" not in library and "Nonsense.name" not in library
        assert library.returns["ICudaEngine.create_execution_context"] == "IExecutionContext"


PLANTED = """
class Runner:
    def __init__(self, trt, file):
        self._trt = trt
        runtime = self._trt.Runtime(trt.Logger(trt.Logger.LOUD))
        self._engine = runtime.deserialize_cuda_engine(file.read_bytes())
        self._context = self._engine.create_execution_contexts()
        self._state = self._engine.create_runtime_config() if file else None
        self.first = self._context

    def run(self, config, name):
        try:
            capability = self._trt.ComputeCapability
            return getattr(capability, name), capability.SM00
            config.set_compute_capability(self._trt.ComputeCapability.SM89, 0)
        except RuntimeError as error:
            error.add_note("the exception's own")
        config.num_profiles = 1
        self._engine.create_execution_context().execute_async_v2(0)
        return hasattr(self._engine, "get_tensor_shapes") or self._context.engine.name.lower()
"""


def test_the_reader_finds_planted_errors(rtx: Api) -> None:
    reader = Reader("planted.py", PLANTED, rtx)
    assert unknown([reader], rtx) == [
        f"planted.py:{line}: {name} is not in {rtx.version}"
        for line, name in (
            (5, "Logger.LOUD"),
            (7, "ICudaEngine.create_execution_contexts"),
            (14, "ComputeCapability.SM00"),
            (18, "IBuilderConfig.num_profiles"),
            (19, "IExecutionContext.execute_async_v2"),
            (20, "ICudaEngine.get_tensor_shapes"),
        )
    ]
    assert {use.name for use in reader.uses if use.name in rtx} == {
        "ComputeCapability.SM89",
        "IBuilderConfig.set_compute_capability",
        "ICudaEngine.create_execution_context",
        "ICudaEngine.create_runtime_config",
        "ICudaEngine.name",
        "IExecutionContext.engine",
        "Runtime.deserialize_cuda_engine",
        "trt.ComputeCapability",
        "trt.Logger",
        "trt.Runtime",
    }
    assert reader.misnamed == [
        "planted.py:8: self._state is of IRuntimeConfig",
        "planted.py:9: self.first is of IExecutionContext",
    ]
