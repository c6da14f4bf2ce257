"""What is shipped beside the code: versions agree, recipes and templates are well formed, the wheel is whole."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import halocline

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def yaml_of(path):
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())


def test_one_version_everywhere():
    recipe = (ROOT / "packaging" / "conda" / "meta.yaml").read_text()
    assert PROJECT["version"] == halocline.__version__
    assert f'version = "{halocline.__version__}"' in recipe
    assert yaml_of(ROOT / "CITATION.cff")["version"] == halocline.__version__


def test_the_conda_recipe_has_the_requirements_of_the_package():
    recipe = (ROOT / "packaging" / "conda" / "meta.yaml").read_text()
    run = recipe.split("  run:\n")[1].split("\n\n")[0]
    listed = {re.split(r"[ >=]", line.strip("- "))[0] for line in run.splitlines()}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["cli"], *extras["data"], *extras["train"][1:]]
    names = {re.split(r"[>=\[]", each)[0] for each in wanted}
    assert listed == {"python", "pytorch"} | names - {"torch"}


def test_the_container_copies_what_the_build_needs():
    lines = (ROOT / "packaging" / "Containerfile").read_text().splitlines()
    words = {line.split()[0] for line in lines if line and line[0] not in "# "}
    assert words <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "ENTRYPOINT", "CMD"}
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert {"pyproject.toml", "README.md", "LICENSE", "halocline"} <= set(copied)
    assert lines.index("USER 1000") < lines.index('ENTRYPOINT ["halocline"]')


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem
)
def test_issue_templates_have_the_form_that_is_asked_for(path):
    form = yaml_of(path)
    assert {"name", "description", "body"} <= form.keys()
    for part in form["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert part["attributes"].get("label")


def test_the_extra_all_has_every_tool():
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(everything.partition("[")[2].rstrip("]").split(","))
    kept_apart = {
        "all",
        "dev",
        "docs",
        "ray",
        "taskbench",
        "cli",
        "data",
        "zoo-monai",
        "zoo-transformers",
        "zoo-neuralop",
    }
    assert named == extras.keys() - kept_apart


@pytest.mark.trial
def test_the_wheel_alone_runs(tmp_path):
    """Built, checked, and installed without the checkout; torch and the rest come from this environment."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=300, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        packed.extractall(tmp_path / "installed")
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "tools/"))]
    assert "halocline/py.typed" in names and any(name.endswith("summit.json") for name in names)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); from halocline.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "check", "unet3d"], cwd=tmp_path, timeout=300, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0 and "exact" in done.stdout, done.stderr
