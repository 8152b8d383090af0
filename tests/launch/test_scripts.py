"""The shell scripts, with a stand-in for Python that claims GPUs and says what it is told."""

import os
import subprocess

import pytest

from .conftest import LAUNCH


@pytest.fixture
def python(tmp_path):
    """Makes an interpreter that sees `gpus` GPUs and 16 cores and prints its other arguments."""

    def make(gpus=0):
        path = tmp_path / "python"
        path.write_text(
            f'#!/bin/sh\n[ "$1" = -c ] && echo "{gpus} 16" && exit\n'
            'echo "threads $OMP_NUM_THREADS: $*"\n'
        )
        path.chmod(0o755)
        return str(path)

    return make


def run(*command, **variables):
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    return subprocess.run(
        command, env={**kept, **variables}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "gpus, variables, expected",
    [
        (0, {}, "threads 8: -m torch.distributed.run --nnodes=1 --nproc-per-node=2 --standalone"),
        (4, {}, "threads 4: -m torch.distributed.run --nnodes=1 --nproc-per-node=4 --standalone"),
        (4, {"NPROC": "2"}, "--nproc-per-node=2"),
        (0, {"NPROC": "32"}, "threads 1:"),
        (0, {"OMP_NUM_THREADS": "3"}, "threads 3:"),
        (
            8,
            {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"},
            "--nnodes=2 --nproc-per-node=8 --node-rank=1 --master-addr=node0 --master-port=29500",
        ),
        (
            8,
            {"NNODES": "2", "RDZV_ENDPOINT": "node0:29400"},
            "--rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=ep_moe",
        ),
    ],
)
def test_torchrun(python, gpus, variables, expected):
    done = run(LAUNCH / "torchrun.sh", "a.py", "--b=1", EP_MOE_PYTHON=python(gpus), **variables)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    assert done.stdout.endswith(" a.py --b=1\n")


@pytest.mark.parametrize(
    "gpus, variables, message",
    [
        (0, {"NPROC": "0"}, "NPROC = 0, but it must be a number of ranks"),
        (2, {"NPROC": "3"}, "NPROC = 3, but this node shows 2 GPU(s)"),
        (
            2,
            {"NNODES": "2"},
            "with NNODES = 2, set RDZV_ENDPOINT, or both NODE_RANK and MASTER_ADDR",
        ),
    ],
)
def test_torchrun_refuses(python, gpus, variables, message):
    done = run(LAUNCH / "torchrun.sh", "a.py", EP_MOE_PYTHON=python(gpus), **variables)
    assert done.returncode != 0
    assert message in done.stderr


def test_torchrun_explains_itself():
    done = run(LAUNCH / "torchrun.sh", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Start a program on every rank")
    assert run(LAUNCH / "torchrun.sh").returncode == 1


def test_quickstart_passes_its_arguments_on(python):
    done = run("bash", LAUNCH / "quickstart.sh", "--steps=7", EP_MOE_PYTHON=python())
    assert done.returncode == 0, done.stderr
    first, second = [line for line in done.stdout.splitlines() if "launch/train_lm.py" in line]
    assert "configs/runs/quickstart.yaml" in first
    assert "--steps=7 --name quickstart" in first  # what makes it the short run comes last and wins
    assert "-unbalanced --model.moe.aux_loss_coef=0 --model.moe.aux_loss_scope=micro" in first
    assert " --stop_after=" in first
    assert second.endswith("-unbalanced --steps=7")


def set_up(project, **variables):
    script = 'source "$0/launch/setup.sh"; set_up_python dev; echo "got $PYTHON"'
    return run("bash", "-euc", script, project, **variables)


@pytest.fixture
def project(tmp_path):
    """A project whose python3 makes environments that record what is installed into them."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "setup.sh").write_text((LAUNCH / "setup.sh").read_text())
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "bin").mkdir()
    python3 = tmp_path / "bin" / "python3"
    python3.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        f'"-m venv"*) mkdir -p "{tmp_path}/.venv/bin"; cp "$0" "{tmp_path}/.venv/bin/python";;\n'
        f'"-m pip install"*) shift 3; echo "$*" >> "{tmp_path}/installed";;\n'
        "esac\n"
    )
    python3.chmod(0o755)
    return tmp_path


def test_the_environment_is_made_once(project):
    path = f"{project / 'bin'}:/usr/bin:/bin"
    first = set_up(project, PATH=path, EP_MOE_TORCH="torch==9.9 --no-deps")
    assert f"got {project}/.venv/bin/python" in first.stdout, first.stderr
    expected = ["torch==9.9 --no-deps", f"-e {project}[dev]"]
    installed = project / "installed"
    assert installed.read_text().splitlines() == expected

    again = set_up(project, PATH=path, EP_MOE_TORCH="torch==9.9 --no-deps")
    assert again.stdout == f"got {project}/.venv/bin/python\n"
    assert installed.read_text().splitlines() == expected

    set_up(project, PATH=path, EP_MOE_TORCH="torch==8.8")
    assert installed.read_text().splitlines()[2:] == ["torch==8.8", expected[1]]


def test_an_old_python_is_named(project):
    (project / "bin" / "python3").write_text('#!/bin/sh\necho "Python 3.9.1"\nexit 1\n')
    for name in ("python3.11", "python3.12", "python3.13", "python3.14"):
        (project / "bin" / name).symlink_to("python3")
    done = set_up(project, PATH=f"{project / 'bin'}:/usr/bin:/bin")
    assert done.returncode != 0
    assert "needs Python 3.11 or newer, but python3 is Python 3.9.1" in done.stderr


def test_a_given_python_is_used_as_it_is(project):
    done = set_up(project, EP_MOE_PYTHON="/some/python")
    assert done.stdout == "got /some/python\n"
    assert not (project / ".venv").exists()
