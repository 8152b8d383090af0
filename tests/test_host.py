"""What a machine has, looked up on this one, on folders written here, and through stand-ins for the
driver and its programs."""

import ctypes
import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from ep_moe import host
from ep_moe.host import GPU, Host, Pair, parse_topology
from tests.hosts import h200s

BUFFERS = {"v1": "Buffer", "v2": "ElasticBuffer", "v2.5": "EPBuffer"}

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tNODE\t0-47\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t48-95\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\t X \t\t\t\t\n"
    "\n"
    "Legend:\n\n"
    "  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "\n"
    "NIC Legend:\n\n"
    "  NIC0: mlx5_0\n"
)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """write({file: text}) -> the folder of a deep_ep that is found before any other."""
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / "deep_ep" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()
        return tmp_path / "deep_ep"

    return write


def test_this_machine():
    here = Host.look()
    assert here.torch == torch.__version__
    assert here.python == ".".join(map(str, sys.version_info[:3]))
    assert here.cuda == torch.version.cuda
    assert here.distributed
    assert len(here.gpus) == torch.cuda.device_count()
    assert len(here.pairs) == len(here.gpus) * (len(here.gpus) - 1)
    if not here.gpus:
        assert here.nccl is None or torch.version.cuda
        assert here.symmetric_memory == (torch.version.cuda is not None)


def test_a_host_made_by_hand_has_nothing():
    assert Host().gpus == ()
    assert not Host().distributed
    assert Host().nccl is Host().triton is Host().deepep is None


def test_a_look_up_that_fails_is_unknown_and_raises_nothing(monkeypatch):
    """Whatever breaks: every look-up raises, in the program that asks for all."""

    def broken(*_, **__):
        raise RuntimeError("broken")

    for name in (
        "_driver",
        "loaded_nccl",
        "_nvcc",
        "_symmetric_memory",
        "_network_cards",
        "_deepep",
    ):
        monkeypatch.setattr(host, name, broken)
    monkeypatch.setattr(host.metadata, "version", broken)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(torch.distributed, "is_gloo_available", broken)
    seen = Host.look()
    assert seen.gpus == seen.pairs == seen.network_cards == ()
    assert seen.driver is seen.nccl is seen.nvcc is seen.triton is seen.deepep is None
    assert not seen.gloo
    assert not seen.symmetric_memory


@pytest.mark.parametrize("generation", BUFFERS)
def test_a_generation_is_told_by_its_class(generation, package):
    folder = package(
        {
            "__init__.py": "from .buffers.it import *\nraise SystemExit('imported')\n",
            "buffers/it.py": f"class {BUFFERS[generation]}(object):\n    pass\n",
        }
    )
    found = Host.look().deepep
    assert found is not None
    assert found.generation == generation
    assert found.folder == str(folder)
    assert found.low_latency == (generation == "v1")
    assert found.distribution is found.version is None
    assert "deep_ep" not in sys.modules


def test_the_newest_generation_wins_and_v1_in_it_is_seen(package):
    package(
        {
            "__init__.py": "",
            "buffers/legacy.py": "class Buffer:\n    pass\n",
            "buffers/elastic.py": "class ElasticBuffer:\n    pass\n",
        }
    )
    found = Host.look().deepep
    assert found is not None
    assert (found.generation, found.low_latency) == ("v2", True)


def test_a_name_that_is_no_class_is_no_generation(package):
    package({"__init__.py": "from .c import EPBuffer\n'class ElasticBuffer:'\nBuffer = EPBuffer\n"})
    found = Host.look().deepep
    assert found is not None
    assert (found.generation, found.low_latency) == (None, False)


@pytest.mark.parametrize("text", ["", "class Buffer(:\n", "class Buf\0fer: ...", "(" * 5000])
def test_a_broken_package_is_of_no_known_generation(text, package):
    folder = package({"__init__.py": text})
    found = Host.look().deepep
    assert found == host.DeepEP(str(folder), None)


def test_a_broken_file_hides_no_other(package):
    package({"__init__.py": "class (:\n", "ep.py": "class EPBuffer: ...\n"})
    found = Host.look().deepep
    assert found is not None
    assert found.generation == "v2.5"


def test_no_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert host._deepep() is None


@pytest.mark.parametrize("name", host.DEEPEP_DISTRIBUTIONS)
def test_the_distribution_that_a_package_is_from(name, package):
    folder = package({"__init__.py": "class Buffer: ...\n"})
    info = folder.parent / f"{name.replace('-', '_')}-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n")
    found = Host.look().deepep
    assert found is not None
    assert (found.distribution, found.version) == (name, "1.2.3")


def test_a_distribution_elsewhere_is_not_the_package_that_hides_it(package, tmp_path, monkeypatch):
    package({"__init__.py": "class Buffer: ...\n"})
    info = tmp_path / "site" / "deep_ep-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deep_ep\nVersion: 9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "site"), *sys.path])
    assert host.metadata.version("deep_ep") == "9"
    found = Host.look().deepep
    assert found is not None
    assert found.version is None


def test_looking_imports_nothing_that_may_end_the_process(package):
    """In a process of its own: neither deep_ep nor Triton, which a test before this one may have
    imported."""
    folder = package({"__init__.py": "import os\nos._exit(3)\n", "b.py": "class Buffer: ...\n"})
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(folder.parent)!r})\n"
        "from ep_moe.host import Host\n"
        "assert 'v1' == Host.look().deepep.generation\n"
        "assert not {'deep_ep', 'triton', 'torch._dynamo'} & set(sys.modules), sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_topology():
    assert parse_topology(TOPOLOGY) == {
        (0, 1): "NV18",
        (1, 0): "NV18",
        (0, 2): "SYS",
        (2, 0): "SYS",
        (1, 2): "PHB",
        (2, 1): "PHB",
    }


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML: Driver/library mismatch\n"])
def test_no_topology(text):
    assert parse_topology(text) == {}


def test_a_topology_with_gpus_after_cards_and_a_row_cut_short():
    text = "      NIC0  GPU0  GPU3\nGPU0  PIX   X     NV4\nNIC0  X  PIX  PIX\nGPU3  SYS  NV4\n"
    assert parse_topology(text) == {(0, 3): "NV4", (3, 0): "NV4"}


class Driver:
    """libcuda's functions, of two GPUs: native atomics from 0 to 1 alone."""

    def __init__(self, started=0, asked=0):
        self.started, self.asked = started, asked

    def cuInit(self, flags):
        return self.started

    def cuDeviceGet(self, handle, ordinal):
        handle._obj.value = 70 + ordinal
        return 0

    def cuDeviceGetP2PAttribute(self, answer, attribute, source, target):
        assert attribute == 3
        answer._obj.value = int((source.value, target.value) == (70, 71))
        return self.asked


@pytest.fixture
def two_gpus(monkeypatch):
    """torch sees the two other than nvidia-smi: its GPU 0 is the last on the bus."""
    props = [
        SimpleNamespace(
            name=f"GPU of {serial}",
            major=9,
            minor=0,
            total_memory=2**30,
            multi_processor_count=132,
            uuid=serial,
        )
        for serial in ("cc", "aa")
    ]
    said = {
        "--query-gpu=index,uuid": "0, GPU-aa\n1, GPU-bb\n2, GPU-cc\n",
        "topo": TOPOLOGY,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: props[at])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) == (1, 0))
    monkeypatch.setattr(host, "_say", lambda program, what, *_: said[what])
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Driver())
    return said


def test_gpus_and_pairs(two_gpus):
    seen = Host.look()
    assert seen.gpus[0] == GPU("GPU of cc", (9, 0), 2**30, 132)
    assert len(seen.gpus) == 2
    assert seen.pairs == (
        Pair(0, 1, access=False, atomics=True, link="SYS"),
        Pair(1, 0, access=True, atomics=False, link="SYS"),
    )


def test_pairs_without_the_drivers_programs_and_answers(two_gpus, monkeypatch):
    def raises(*_, **__):
        raise OSError("no such thing")

    monkeypatch.setattr(host, "_say", raises)
    monkeypatch.setattr(ctypes, "CDLL", raises)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", raises)
    assert Host.look().pairs == (Pair(0, 1), Pair(1, 0))


@pytest.mark.parametrize("driver", [Driver(started=100), Driver(asked=1)])
def test_a_driver_that_refuses_leaves_atomics_unknown(two_gpus, monkeypatch, driver):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: driver)
    assert {pair.atomics for pair in Host.look().pairs} == {None}


def test_a_gpu_that_nvidia_smi_does_not_list_has_no_link(two_gpus):
    two_gpus["--query-gpu=index,uuid"] = "0, GPU-aa\n"
    assert {pair.link for pair in Host.look().pairs} == {None}


def test_the_nccl_in_the_process_counts_not_the_one_torch_was_built_with(monkeypatch):
    from torch.cuda import nccl

    class Library:
        def ncclGetVersion(self, number):
            number._obj.value = 23203
            return 0

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: Library())
    assert host.loaded_nccl() == "2.32.3"

    def absent(name, mode):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert host.loaded_nccl() == "2.28.9"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert host.loaded_nccl() is None


def compiler(folder, release: str | None) -> str:
    """A stand-in for nvcc, which says its version or fails."""
    path = folder / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    said = f"echo 'Cuda compilation tools, release {release}, V{release}.88'"
    path.write_text(f"#!/bin/sh\n{said if release else 'exit 1'}\n")
    path.chmod(0o755)
    return str(path)


def test_nvcc_is_the_first_that_answers(tmp_path, monkeypatch):
    paths = {name: tmp_path / name for name in ("home", "path", "search")}
    home, second = compiler(paths["home"], "12.4"), compiler(paths["path"], "12.8")
    third = compiler(paths["search"], "13.1")
    monkeypatch.setenv("CUDA_HOME", str(paths["home"]))
    monkeypatch.setenv("CUDA_PATH", str(paths["path"]))
    monkeypatch.setenv("PATH", f"{paths['search'] / 'bin'}:/usr/bin:/bin")
    assert host._nvcc() == host.Nvcc("12.4", home)
    (paths["home"] / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert host._nvcc() == host.Nvcc("12.8", second)
    monkeypatch.delenv("CUDA_PATH")
    assert host._nvcc() == host.Nvcc("13.1", third)


@pytest.mark.parametrize("name", host.TRITON_DISTRIBUTIONS)
def test_triton_by_any_of_its_names(name, monkeypatch):
    def version(of):
        if of != name:
            raise host.metadata.PackageNotFoundError(of)
        return "3.6.0"

    monkeypatch.setattr(host.metadata, "version", version)
    assert Host.look().triton == "3.6.0"


def test_network_cards(tmp_path):
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert host._network_cards(str(tmp_path)) == ("mlx5_0", "mlx5_1")


def test_the_driver_is_read_from_the_kernel(monkeypatch):
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    gcc = "GCC version:  gcc version 12.3.0 (Ubuntu)\n"
    monkeypatch.setattr(host.Path, "read_text", lambda path: line + gcc)
    assert host._driver() == "580.65.06"


def test_switches(monkeypatch):
    for name in host.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert Host.look().switches == ()
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert Host.look().switches == ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",)


def test_gpus_that_this_process_does_not_see(tmp_path, monkeypatch):
    for bus in ("0000:18:00.0", "0000:2a:00.0", "0000:3a:00.0"):
        (tmp_path / bus).mkdir()
    installed = host._installed
    monkeypatch.setattr(host, "_installed", lambda: installed(str(tmp_path)))
    monkeypatch.setattr(host, "_gpus", lambda: h200s(1).gpus)
    assert Host.look().hidden == 2
    monkeypatch.setattr(host, "_installed", lambda: installed(str(tmp_path / "nothing")))
    assert Host.look().hidden == 0
