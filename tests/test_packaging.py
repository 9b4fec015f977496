"""What is built, what an installation exposes, and what importing it does."""

import ast
import email
import email.message
import graphlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import tq_hf

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "kernels"

GENERATE = """
import torch, tq_hf
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="turboquant")).eval()
prompt = torch.arange(300)[None] % 32
cache = tq_hf.TurboQuantCache(model.config, residual_length=0)
output = model.generate(prompt, past_key_values=cache, max_new_tokens=3, min_new_tokens=3, do_sample=False)
assert output.shape == (1, 303)
assert cache.memory_footprint().packed > 0
"""

NO_TRITON = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] == "triton" else find_spec(name, *rest)
)
try:
    import triton
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("triton was not hidden")
"""

AS_COMMAND = """
import sys
sys.argv = ["tq-hf"]
import tq_hf
print("torch" in sys.modules)
tq_hf.set_up()
from transformers import AttentionInterface
print("turboquant" in AttentionInterface(), tq_hf.TurboQuantCache.__name__)
"""


def run(python: Path | str, code: str, cwd: Path) -> str:
    """Standard output of `python -c code`, run in `cwd` (which is then first on its `sys.path`)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def make_environment(folder: Path) -> Path:
    """A new virtual environment that sees the packages of the running one, but not what that one has installed in
    editable form (`.pth` files in a folder that a `.pth` file names are not read). Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=600)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    purelib = Path(run(python, "import sysconfig; print(sysconfig.get_path('purelib'), end='')", folder))
    (purelib / "running_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def required(metadata: email.message.Message) -> list[Requirement]:
    """What an installation requires, extras included."""
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


NEEDED = {"torch", "transformers", "accelerate", "safetensors", "triton", "psutil", "rich", "typer"}


@pytest.fixture(scope="module")
def of_the_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a throw-away environment in which the wheel is installed."""
    python = make_environment(tmp_path_factory.mktemp("wheel") / "venv")
    pip("--python", python, "install", "--no-deps", wheel)
    return python


INSTALLED = """
import importlib.util, json, sys

names = {}
for name in ("kernels", "tests", "examples", "conftest", "tq_kernels", "tq_hf"):
    spec = importlib.util.find_spec(name)
    names[name] = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin])]
print(json.dumps(names))
"""
LOOP = """
import tq_hf.graph_decoding.loop, tq_hf
assert callable(tq_hf.graph_decoding)
"""


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Where a process in an empty directory finds names in an environment in which the project is installed, of which
    `home` is the folder of its files."""
    if request.param == "wheel":
        python = request.getfixturevalue("of_the_wheel")
    else:
        python = make_environment(tmp_path_factory.mktemp(request.param) / "venv")
        pip("--python", python, "install", "--no-deps", "editables", "--editable", ROOT)
    names = json.loads(run(python, INSTALLED, tmp_path_factory.mktemp("empty")))
    return {"names": names, "home": python.parent.parent if request.param == "wheel" else ROOT}


TYPED = """
import tq_hf
from typing import Any, Iterator

config: Any = None
model: Any = None
reveal_type(tq_hf.TurboQuantCache(config, "4bit_nc", max_cache_len=4096))
reveal_type(tq_hf.TurboQuantCache(config).memory_footprint().ratio)
reveal_type(tq_hf.TurboQuantCache.load("prompt.safetensors", model))
reveal_type(tq_hf.TurboQuantBatching(model).generate_batch([[1, 2]]))
reveal_type(tq_hf.TurboQuantConfig.from_preset("k8v4").key_bits)
reveal_type(tq_hf.PRESETS["k8v4"].layout(128).block_bytes)
reveal_type(tq_hf.Balance.of(model))
with tq_hf.continuous_batching(model) as batching:
    reveal_type(batching)
tq_hf.TurboQuantCache(config, max_cache_len="4096")
tq_hf.TurboQuantConfig(key_bits="4")
"""


def test_every_public_name_is_imported_for_type_checkers() -> None:
    """As itself: others are not exported to a user's checker, which reads nothing of what is imported on first use."""
    tree = ast.parse((ROOT / "tq_hf" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    names = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == set(tq_hf.__all__)


@pytest.mark.slow
def test_the_types_of_the_public_api_reach_a_user(of_the_wheel: Path, tmp_path: Path) -> None:
    """Of an installed wheel, with mypy --strict. What others' packages return is left out: torch takes a minute."""
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    skipped = "".join(f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "transformers", "triton"))
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\ncache_dir = {os.devnull}\n{skipped}")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(of_the_wheel), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    revealed = [name.split(".")[-1] for name in re.findall(r'Revealed type is "([^"]+)"', done.stdout)]
    of_results = ["dict[str, Any]", "int", "int", "Balance", "TurboQuantBatching"]
    assert revealed == ["TurboQuantCache", "float", "TurboQuantCache", *of_results], done.stdout
    errors = re.findall(r"user.py:\d+: error: Argument .*? \[([\w-]+)\]", done.stdout)
    assert errors == ["arg-type", "arg-type"] and done.stdout.count("error:") == 2, done.stdout


def test_an_installation_has_both_packages_and_no_other_names(installed: dict[str, Any]) -> None:
    found, home = dict(installed["names"]), installed["home"]
    (package,), (kernels,) = found.pop("tq_hf"), found.pop("tq_kernels")
    assert Path(package).is_relative_to(home) and Path(kernels).is_relative_to(home)
    ours = (str(ROOT), str(home))
    assert [place for places in found.values() for place in places if place.startswith(ours)] == []


def test_the_wheel_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {"tq_hf", "tq_kernels"}
    sources = [*(ROOT / "tq_hf").rglob("*.py"), *(KERNELS / "tq_kernels").rglob("*.py")]
    wanted = {str(path.relative_to(KERNELS if path.is_relative_to(KERNELS) else ROOT)) for path in sources}
    assert wanted == {name for name in names if name.endswith(".py")}
    assert {"tq_hf/py.typed", "tq_kernels/py.typed"} <= set(names)


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    pip("install", "--target", tmp_path / "hatchling", "hatchling")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "hatchling")}
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=600)
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    pip("wheel", "--no-deps", "--wheel-dir", tmp_path, sdist)
    (other,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(other) as second:
        assert {name: first.read(name) for name in first.namelist()} == {
            name: second.read(name) for name in second.namelist()
        }


def test_metadata_names_the_pythons_and_the_dependencies(
    metadata: email.message.Message, required: list[Requirement]
) -> None:
    classifiers = metadata.get_all("Classifier", [])
    pythons = [f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)]
    assert set(pythons) <= set(classifiers)
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {each.name for each in required if "extra" not in str(each.marker)} == NEEDED


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "arm64", "AMD64", "ppc64le"])
def test_triton_is_required_where_it_has_wheels(required: list[Requirement], system: str, machine: str) -> None:
    has_wheels = system == "linux" and machine in ("x86_64", "aarch64")
    (triton,) = (each for each in required if each.name == "triton")
    assert triton.marker is not None
    assert triton.marker.evaluate({"sys_platform": system, "platform_machine": machine}) is has_wheels


def test_the_kernels_folder_is_a_source_root_and_no_package() -> None:
    assert not (KERNELS / "__init__.py").exists()
    assert [path.name for path in KERNELS.iterdir() if path.name != "__pycache__"] == ["tq_kernels"]
    tests = [path for pattern in ("test_*.py", "*_test.py", "conftest.py") for path in KERNELS.rglob(pattern)]
    assert tests == []


IMPORTED = """
import json, sys
assert sys.path[0] == ""
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM
before_all = set(sys.modules)
from transformers import cache_utils, masking_utils, modeling_utils
from transformers.generation import utils
from transformers.integrations import sdpa_attention

def snapshot():
    registries = {
        "attention": modeling_utils.ALL_ATTENTION_FUNCTIONS,
        "mask": masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
        "dynamic": cache_utils.DYNAMIC_LAYER_TYPE_MAPPING,
        "static": cache_utils.STATIC_LAYER_TYPE_MAPPING,
    }
    entries = {(name, key): value for name, registry in registries.items() for key, value in registry.items()}
    for module in [value for name, value in sys.modules.items() if name.split(".")[0] == "transformers"]:
        for name, value in list(vars(module).items()):
            entries[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                entries |= {(module.__name__, name, key): member for key, member in vars(value).items()}
    return entries

before = snapshot()
import tq_hf
modules, after = set(sys.modules) - before_all, snapshot()
# Modules that the import loads, and their names in other modules, are no change; a new entry or member is.
known = lambda key: key[:-1] in before or key[0] in ("attention", "mask", "dynamic", "static")
found = {"changed": [key for key in before if after.get(key) is not before[key]], "modules": sorted(modules)}
print(json.dumps(found | {"added": sorted(":".join(key) for key in after if key not in before and known(key))}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What importing the package changes in a process at the repository's root, where it then generates."""
    return json.loads(run(sys.executable, IMPORTED + GENERATE, ROOT))


def test_importing_registers_the_attention_and_its_mask_and_changes_nothing_else(imported: dict[str, Any]) -> None:
    """And from the repository's root transformers is imported, and generates: `kernels/` there is no package."""
    assert imported["changed"] == [] and imported["added"] == ["attention:turboquant", "mask:turboquant"]


def test_importing_adds_little_to_transformers(imported: dict[str, Any]) -> None:
    """Counted in modules: no package that transformers' own generation does not import, and about a hundred of ours."""
    tops = [name.partition(".")[0] for name in imported["modules"]]
    others = [top for top in tops if top not in ("tq_hf", "tq_kernels")]
    assert 90 < len(tops) - len(others) <= 110 and len(others) <= 5, imported["modules"]
    assert {re.split(r"\W", top)[0] for top in others} <= {"torch", "transformers"}


def test_a_command_of_the_wheel_generates_without_triton(of_the_wheel: Path, tmp_path: Path) -> None:
    """It registers attention before it loads a model. The loop is a function, though `tq_hf.graph_decoding` is also the
    name of a room, to which importing one of its modules would bind it."""
    printed = run(of_the_wheel, NO_TRITON + AS_COMMAND + LOOP + GENERATE, tmp_path)
    assert printed.splitlines() == ["False", "True TurboQuantCache"]


def imported_modules(path: Path, module: str) -> set[str]:
    """Absolute names of what a file imports, anywhere in it: what it imports for type checking only, too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            # `from . import dispatch` and `from .dispatch import attend` both import the module `dispatch`.
            names |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return names


def import_graph(folder: Path) -> dict[str, set[str]]:
    """Each module of a package, with the modules of the same package that it imports."""
    modules = {
        ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts)): path
        for path in folder.rglob("*.py")
        if path.stem != "__init__"
    }
    return {name: imported_modules(path, name) & set(modules) for name, path in modules.items()}


@pytest.mark.parametrize("folder", [ROOT / "tq_hf", KERNELS / "tq_kernels"], ids=lambda folder: folder.name)
def test_imports_inside_a_package_go_one_way(folder: Path) -> None:
    graph = import_graph(folder)
    assert graph
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of a cycle


def test_kernels_import_neither_the_package_nor_transformers() -> None:
    for path in (KERNELS / "tq_kernels").rglob("*.py"):
        tops = {name.partition(".")[0] for name in imported_modules(path, "tq_kernels.room.module")}
        assert tops <= {"torch", "triton", "tq_kernels", *sys.stdlib_module_names}, f"{path.name} imports {tops}"


def test_the_reference_knows_nothing_of_the_cache() -> None:
    """The oracle is below what it judges: it imports neither the operations, the kernels (but what both hold:
    format, sizes and types) nor anything of a cache."""
    graph = import_graph(ROOT / "tq_hf")
    above = ("ops", "stores", "layers", "saving", "tools", "cache", "attention", "memory")
    for name in [name for name in graph if name.startswith("tq_hf.codec.")]:
        assert not [other for other in graph[name] if other.split(".")[1] in above]
        imports = imported_modules(ROOT / (name.replace(".", "/") + ".py"), name)
        kernels = {other for other in imports if other.startswith("tq_kernels")}
        assert {other.split(".")[1] for other in kernels} <= {"format", "layout", "types"}


def test_the_demo_installs_what_it_runs_on_and_nothing_else(required: list[Requirement]) -> None:
    """No tools of development, every package that it imports, and what reads the weights of the real model."""
    lines = subprocess.run(
        ["make", "--dry-run", "--always-make", "demo"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    (install,) = [line for line in lines.splitlines() if "pip install" in line]
    assert install.split("-e ")[1].split()[0] == '".[real]"'
    reading = {each.name for each in required if each.marker and each.marker.evaluate({"extra": "real"})}
    assert reading - NEEDED == {"gguf", "sentencepiece"}
    names = ("quickstart", "provenance", "needle_data", "real_model")
    files = {name: imported_modules(ROOT / "examples" / f"{name}.py", f"examples.{name}") for name in names}
    imported = {name.split(".")[0] for modules in files.values() for name in modules}
    own = {"examples", "needle_data", "provenance", "real_model", "tq_hf", "tq_kernels"}
    assert imported - own - set(sys.stdlib_module_names) <= NEEDED
