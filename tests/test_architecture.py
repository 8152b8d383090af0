"""The layout of the package, held by machine: who may import whom, and how long a file may be."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ep_moe"

# A folder or file may import what stands on lines above its own, and itself.
LEVELS = [
    {"errors"},
    {"types"},
    {"config"},
    {"net"},
    {"peers"},
    {"check"},
    {"parallel"},
    {"host", "kernels", "measure", "oracle", "replay", "traces"},
    {"ops"},
    {"exact", "expert_mlp"},
    {"experts", "routing", "dispatch", "state"},
    {"layer"},
    {"doctor", "training", "planner", "integrations", "tune"},
    {"cli", "testing"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def unit(path: Path) -> str:
    """ep_moe/ops/pack.py -> ops; ep_moe/layer.py -> layer"""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            modules = [node.module or ""]
            if node.module == "ep_moe":  # from ep_moe import ops
                modules = [f"ep_moe.{alias.name}" for alias in node.names]
        else:
            continue
        units |= {m.split(".")[1] for m in modules if m.startswith("ep_moe.")}
    return units


def upward_imports(path: Path) -> list[str]:
    here = unit(path)
    return [
        f"{path.relative_to(ROOT)} imports ep_moe.{there}"
        for there in sorted(imported_units(path) - {here})
        if LEVEL.get(there, len(LEVELS)) >= LEVEL[here]
    ]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=str)
def test_imports_run_downwards(path):
    if path != PACKAGE / "__init__.py":
        assert unit(path) in LEVEL, f"{path} has no place in LEVELS"
        assert not upward_imports(path)


def test_an_upward_import_is_seen(tmp_path):
    global PACKAGE, ROOT
    before = PACKAGE, ROOT
    PACKAGE, ROOT = tmp_path / "ep_moe", tmp_path
    try:
        bad = PACKAGE / "ops" / "pack.py"
        bad.parent.mkdir(parents=True)
        bad.write_text("from ep_moe.layer import MoELayer\nfrom ep_moe import routing, types\n")
        assert len(upward_imports(bad)) == 2
    finally:
        PACKAGE, ROOT = before


def neighbours(path: Path) -> set[str]:
    """The files of its own folder that a file imports, by name, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    stems = {name.removeprefix(f"{path.parent.name}.") for name in names}
    return {stem for stem in stems if (path.parent / f"{stem}.py").exists()}


def circles(folder: Path) -> list[str]:
    """What is left once files that import nothing that is left are taken away, again and again."""
    left = {path.stem: neighbours(path) for path in folder.glob("*.py")}
    while done := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in done:
            del left[name]
    return sorted(left)


@pytest.mark.parametrize("folder", ["benchmarks", "launch"])
def test_programs_import_each_other_in_one_direction(folder):
    assert any(neighbours(path) for path in (ROOT / folder).glob("*.py"))
    assert circles(ROOT / folder) == []


def test_a_circle_is_seen(tmp_path):
    (tmp_path / "leaf.py").write_text("import ast\n")
    (tmp_path / "plots.py").write_text("from report import Row\nimport leaf\n")
    (tmp_path / "report.py").write_text("def main():\n    from plots import plot\n")
    assert circles(tmp_path) == ["plots", "report"]


def test_files_are_short():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.sh"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in listed.stdout.split()}
    assert lengths, "git lists no file"
    assert {name: n for name, n in lengths.items() if n > 500} == {}
