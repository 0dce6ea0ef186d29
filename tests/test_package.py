"""The package as a whole: light imports, one public surface, a complete wheel, house rules for files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import blockdraft

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "blockdraft"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
HEAVY = ("accelerate", "gguf", "numpy", "safetensors.torch", "tokenizers", "torch", "transformers")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------- light imports


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = python("import sys, blockdraft; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["generate", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['blockdraft', *{arguments!r}]\n"
        "from blockdraft.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('MODULES', *sys.modules)"
    )
    shown, _, loaded = python(code).rpartition("MODULES")
    assert "Usage" in shown
    assert not set(HEAVY) & set(loaded.split())


# ------------------------------------------------------------------------------------------ public surface


def test_every_public_name_can_be_imported() -> None:
    assert sorted(blockdraft.__all__) == blockdraft.__all__
    for name in blockdraft.__all__:
        assert getattr(blockdraft, name) is not None
    public = {name for name in dir(blockdraft) if not name.startswith("_")}
    submodules = {path.stem for path in SOURCE.iterdir()}
    plumbing = {"annotations", "import_module", "TYPE_CHECKING", "Any"}
    assert public - submodules - plumbing == set(blockdraft.__all__) - {"__version__"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        blockdraft.Engin  # noqa: B018


def test_the_changelog_knows_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert "## [Unreleased]" in changelog or f"## [{blockdraft.__version__}]" in changelog


# --------------------------------------------------------------------------------------------------- wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, stdin=subprocess.DEVNULL)
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = {
        f"blockdraft/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == package
    assert "blockdraft/py.typed" in packed


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    info = f"blockdraft-{blockdraft.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {blockdraft.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata
    assert "blockdraft = blockdraft.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()


# --------------------------------------------------------------------------------------------- house rules


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_no_source_file_outgrows_its_cap() -> None:
    sizes = {path.relative_to(ROOT): len(path.read_text("utf-8").splitlines()) for path in source_files()}
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_no_function_outgrows_its_cap() -> None:
    long = {}
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # From the first statement on: a long list of options is a signature, not a body.
                size = (node.end_lineno or 0) - node.body[0].lineno + 1
                if size > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = size
    assert long == {}


def test_every_module_says_what_it_owns() -> None:
    silent = [str(p.relative_to(ROOT)) for p in source_files() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def tracked_texts() -> dict[str, str]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    texts = {}
    for name in filter(None, listing.stdout.split("\0")):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content:
            texts[name] = content.decode("utf-8")
    return texts


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<![\w.$}])/(?:work|farm|root|home|tmp)/",  # a path of one machine
        r"\b(?:pypi\.org|files\.pythonhosted|download\.pytorch\.org)",  # the installer knows where from
        r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b",
    ],
)
def test_tracked_files_are_free_of(pattern: str) -> None:
    own = Path(__file__).relative_to(ROOT).as_posix()
    found = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in tracked_texts().items()
        if name != own
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(pattern, line)
    ]
    assert found == []


@pytest.mark.parametrize("script", ["scripts/check", "scripts/test", "scripts/demo", ".ci/run"])
def test_scripts_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111
    assert "set -euo pipefail" in (ROOT / script).read_text("utf-8")
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
