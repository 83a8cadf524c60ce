"""The wheel holds all that the package needs, and works from where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}") or shutil.which("uv")
TRIED = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import arborl
from arborl.models.model_files import resolve
from arborl.view.web.app import make_app
from arborl.view.web.token_text import decoder_of

home = Path(sys.argv[1])
assert home in Path(arborl.__file__).parents
assert home in Path(resolve("seedling")).parents and (resolve("seedling") / "model.safetensors").is_file()
run = arborl.run(stub=True, steps=1, output_dir="run")
assert (run.folder / "report.html").stat().st_size > 10_000
make_app(Path("."))
assert decoder_of(run.folder)([0]) is not None
from arborl.diagnosis import examine_run
assert examine_run(run.folder)[0].state == "ok"
from typer.testing import CliRunner
from arborl.cli.main import app
assert CliRunner().invoke(app, ["init", "--recipe", "statelm"]).exit_code == 0
assert Path("recipes/statelm/run.yaml").is_file()
"""


@pytest.mark.slow
@pytest.mark.skipif(UV is None, reason="needs uv, which `make` installs, to build the wheel")
def test_the_wheel_holds_every_file_of_the_package_and_works(tmp_path):
    subprocess.run([str(UV), "build", "--wheel", "--quiet", "--out-dir", str(tmp_path / "dist"), str(ROOT)], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "home")
    source = ROOT / "src"
    ours = {str(path.relative_to(source)) for path in (source / "arborl").rglob("*") if path.is_file()}
    missing = {name for name in ours if "__pycache__" not in name} - set(zipfile.ZipFile(wheel).namelist())
    assert missing == set()
    (tmp_path / "try.py").write_text(TRIED)
    subprocess.run([sys.executable, "try.py", str(tmp_path / "home")], cwd=tmp_path, check=True)
