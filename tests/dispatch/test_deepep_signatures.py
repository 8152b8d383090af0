"""The fakes take the parameters that the packages take: names, order, kinds and defaults.

The packages are fetched and read, never imported: they need GPUs, and three of one name.
"""

import ast
import importlib
import inspect
import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

PACKAGES = {  # requirement, how pip must fetch it, and where the fake's classes are defined
    "v1": (
        "sgl-deep-ep==0.1.0",
        ["--only-binary", ":all:"],
        {"Buffer": "buffer.py", "EventOverlap": "utils.py"},
    ),
    "v2": (
        "sgl-deep-ep==0.1.1",
        ["--only-binary", ":all:"],
        {
            "ElasticBuffer": "buffers/elastic.py",
            "EPHandle": "buffers/elastic.py",
            "Buffer": "buffers/legacy.py",
            "EventOverlap": "utils/event.py",
        },
    ),
    "v25": (
        "deepinfer-ep==2.5.0",
        ["--no-binary", ":all:", "--no-build-isolation"],
        {
            "EPBuffer": "buffers/ep.py",
            "EPHandle": "buffers/ep.py",
            "EventOverlap": "utils/event.py",
        },
    ),
}
# pip asks a source archive's setup.py for metadata, and that one looks for NCCL, torch and CUDA.
UNBUILT = {
    "lib/libnccl.so.2": "",
    "torch/__init__.py": "",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": """
from setuptools import Extension
from setuptools.command.build_ext import build_ext as BuildExtension
CUDAExtension = lambda name, sources, **kwargs: Extension(name, sources)
""",
}
GONE = {"v25": {"Buffer", "ElasticBuffer", "Config"}, "v2": {"EPBuffer"}, "v1": {"topk_idx_t"}}


def fetched(requirement: str, how: list[str], folder: Path) -> Path:
    """The package's `deep_ep` folder, unpacked."""
    unbuilt, archives = folder / "unbuilt", folder / "archives"
    for name, text in UNBUILT.items():
        (unbuilt / name).parent.mkdir(parents=True, exist_ok=True)
        (unbuilt / name).write_text(text)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", *how]
    ran = subprocess.run(
        [*command, "--dest", str(archives), requirement],
        env={**os.environ, "EP_NCCL_ROOT_DIR": str(unbuilt), "PYTHONPATH": str(unbuilt)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if ran.returncode:
        pytest.skip(f"{requirement} cannot be downloaded: {ran.stderr.strip().splitlines()[-1:]}")
    (archive,) = archives.iterdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [n for n in wheel.namelist() if n.endswith(".py")])
    else:
        with tarfile.open(archive) as sdist:
            sdist.extractall(folder, filter="data")
    (initial,) = folder.rglob("deep_ep/__init__.py")
    return initial.parent


def parameters(function: ast.FunctionDef) -> list[tuple[str, str, str]]:
    """(kind, name, default as written), and first of all whether it is static."""
    arguments = function.args
    static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
    found = [("static" if static else "method", function.name, "")]
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    for argument, default in zip(positional, defaults, strict=True):
        kind = "positional only" if argument in arguments.posonlyargs else "positional"
        found.append((kind, argument.arg, "" if default is None else ast.unparse(default)))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(("keyword", argument.arg, "" if default is None else ast.unparse(default)))
    for kind, argument in (("*", arguments.vararg), ("**", arguments.kwarg)):
        if argument is not None:
            found.append((kind, argument.arg, ""))
    return found


def methods_of_fake(cls: type) -> dict[str, list]:
    """Every public method, and the dunders that take parameters, wherever they are inherited."""
    found = {}
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        member = member.fget if isinstance(member, property) else member
        function = getattr(member, "__func__", member)
        public = not name.startswith("_") or name in ("__init__", "__call__", "__exit__")
        if public and inspect.isfunction(function):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(member))).body
            found[name] = parameters(node)
    return found


def methods_of_package(file: Path, cls: str) -> dict[str, list]:
    (node,) = [
        n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef) and n.name == cls
    ]
    return {n.name: parameters(n) for n in node.body if isinstance(n, ast.FunctionDef)}


def names_of_package(initial: Path) -> set[str]:
    """What `import deep_ep` offers, by the statements that bind it."""
    names = set()
    for node in ast.walk(ast.parse(initial.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def differences(fake, package: Path, files: dict[str, str]) -> list[str]:
    found = []
    for cls, file in files.items():
        theirs = methods_of_package(package / file, cls)
        for name, ours in methods_of_fake(getattr(fake, cls)).items():
            if theirs.get(name) != ours:
                found.append(f"{cls}.{name}: {ours} is not {theirs.get(name)}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("generation", PACKAGES)
def test_parameters(generation, tmp_path):
    requirement, how, files = PACKAGES[generation]
    fake = importlib.import_module(f"tests.dispatch.fake_deepep.{generation}")
    package = fetched(requirement, how, tmp_path)
    assert differences(fake, package, files) == []
    offered = names_of_package(package / "__init__.py")
    assert set(fake.__all__) <= offered
    assert not GONE[generation] & (offered | set(fake.__all__))
