"""What this machine has that transports need, looked up once and without a wish to use it.

Nothing here imports deep_ep: its import ends the process where NCCL does not fit, so what is
installed is read from its files. Every look-up that fails leaves "unknown": whoever asks wants to
be told what is wrong with a machine, which is just where look-ups fail.
"""

import ast
import ctypes
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Generation = Literal["v1", "v2", "v2.5"]

# The class that a generation of DeepEP is used through, the newest first.
BUFFERS: dict[str, Generation] = {"EPBuffer": "v2.5", "ElasticBuffer": "v2", "Buffer": "v1"}
DEEPEP_DISTRIBUTIONS = ("deep_ep", "deepinfer-ep", "sgl-deep-ep")
TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
SWITCHES = ("NCCL_MULTI_RANK_GPU_ENABLE", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
SECONDS = 30  # for a program that is asked; a driver in trouble may never answer


@dataclass(frozen=True)
class GPU:
    """capability (9, 0) is sm_90; memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int
    multiprocessors: int


@dataclass(frozen=True)
class Pair:
    """How GPU `source` reaches the memory of GPU `target`, both numbered as torch does.

    access   loads and stores; None = unknown, here and below
    atomics  of the hardware, not by way of a lock of the driver
    link     as `nvidia-smi topo -m` names it: NV18, PIX, SYS, ...
    """

    source: int
    target: int
    access: bool | None = None
    atomics: bool | None = None
    link: str | None = None


@dataclass(frozen=True)
class Nvcc:
    """CUDA's compiler, which DeepEP calls at run time from its second generation on."""

    version: str
    path: str


@dataclass(frozen=True)
class DeepEP:
    """What `import deep_ep` would find.

    generation    the newest whose class is there; None = of none that is known
    low_latency   has the class `Buffer` of v1, which the low-latency calls are made on
    distribution  that it was installed by, with its version; None = a folder on the path alone
    """

    folder: str
    generation: Generation | None
    low_latency: bool = False
    distribution: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class Host:
    """One machine, as this process sees it. A version is None, and a thing is missing, where there
    is none; a Host made by hand has only what it is given.

    cuda              that torch was built for
    driver            of the GPUs
    hidden            GPUs of this machine that this process does not see, as where a launcher
                      shows each rank its own
    pairs             every ordered pair of two GPUs
    distributed, gloo torch.distributed, and its transport for CPUs
    nccl              in this process, for torch; not the one that torch was built with
    symmetric_memory  torch can map the GPUs' memory into each other
    network_cards     for RDMA
    switches          environment variables that let ranks share a GPU, and are on
    """

    python: str = ""
    torch: str = ""
    cuda: str | None = None
    driver: str | None = None
    gpus: tuple[GPU, ...] = ()
    hidden: int = 0
    pairs: tuple[Pair, ...] = ()
    distributed: bool = False
    gloo: bool = False
    nccl: str | None = None
    triton: str | None = None
    nvcc: Nvcc | None = None
    symmetric_memory: bool = False
    network_cards: tuple[str, ...] = ()
    deepep: DeepEP | None = None
    switches: tuple[str, ...] = ()

    @classmethod
    def look(cls) -> "Host":
        """This machine. Never raises. Asks the GPUs, so a process that called it can no longer
        fork ones that use them."""
        gpus = _attempt(_gpus, ())
        return cls(
            python=platform.python_version(),
            torch=str(torch.__version__),
            cuda=torch.version.cuda,
            driver=_attempt(_driver, None),
            gpus=gpus,
            hidden=_attempt(lambda: max(0, _installed() - len(gpus)), 0),
            pairs=_attempt(lambda: tuple(_pairs(len(gpus))), ()),
            distributed=dist.is_available(),
            gloo=_attempt(dist.is_gloo_available, False),
            nccl=_attempt(loaded_nccl, None),
            triton=_attempt(_triton, None),
            nvcc=_attempt(_nvcc, None),
            symmetric_memory=_attempt(_symmetric_memory, False),
            network_cards=_attempt(_network_cards, ()),
            deepep=_attempt(_deepep, None),
            switches=tuple(name for name in SWITCHES if os.environ.get(name) == "1"),
        )


@dataclass(frozen=True)
class Need:
    """One thing that a transport needs of a machine, in words.

    what    its short name
    needs   what would be accepted
    has     what there is
    met     None = cannot be known before it is tried
    remedy  what to install or switch; empty where it is met
    """

    what: str
    needs: str
    has: str
    met: bool | None
    remedy: str = ""


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The table of `nvidia-smi topo -m` -> the link's name of each ordered pair of GPUs, by the
    numbers of nvidia-smi.

            GPU0  GPU1  NIC0  CPU Affinity
      GPU0   X    NV18  PIX   0-47          ->  {(0, 1): "NV18", (1, 0): "NV18"}
      GPU1  NV18   X    SYS   48-95
    """
    lines = [line.split() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()]
    lines = [words for words in lines if words]
    gpu = re.compile(r"GPU(\d+)$")
    columns: list[tuple[int, int]] = []  # the cell of a row, and whose it is
    links = {}
    for words in lines:
        if not columns:  # the head: all before "CPU Affinity" are one word each
            columns = [(at, int(m[1])) for at, word in enumerate(words) if (m := gpu.match(word))]
        elif match := gpu.match(words[0]):
            cells = words[1:]
            links |= {(int(match[1]), of): cells[at] for at, of in columns if at < len(cells)}
    return {pair: link for pair, link in links.items() if pair[0] != pair[1]}


def _attempt(look: Callable[[], T], otherwise: T) -> T:
    """A broken driver, library or package is a finding, and raises whatever it likes."""
    try:
        return look()
    except Exception:
        return otherwise


def _say(*command: str) -> str:
    """What a program prints, without a terminal's colours."""
    run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    return run.stdout


def _gpus() -> tuple[GPU, ...]:
    if not torch.cuda.is_available():
        return ()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(
        GPU(gpu.name, (gpu.major, gpu.minor), gpu.total_memory, gpu.multi_processor_count)
        for gpu in found
    )


def _installed(folder: str = "/proc/driver/nvidia/gpus") -> int:
    """The driver's, whatever CUDA_VISIBLE_DEVICES says."""
    return len(list(Path(folder).iterdir()))


def _driver() -> str | None:
    """Read from the kernel: that also works where torch was built without CUDA."""
    text = Path("/proc/driver/nvidia/version").read_text()
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    return found[1] if found else None


def _pairs(count: int) -> Iterator[Pair]:
    if count < 2:
        return
    links = _attempt(lambda: _links(count), {})
    atomics = _attempt(lambda: _atomics(count), {})
    for source in range(count):
        for target in range(count):
            if source != target:
                pair = source, target
                access = _attempt(lambda p=pair: bool(torch.cuda.can_device_access_peer(*p)), None)
                yield Pair(source, target, access, atomics.get(pair), links.get(pair))


def _links(count: int) -> dict[tuple[int, int], str]:
    """By torch's numbers. nvidia-smi counts all GPUs in the order of the bus, torch the visible
    ones, often the fastest first: their serial numbers say which is which."""
    listed = _say("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader").splitlines()
    cells = [line.split(", ") for line in listed if line]
    number = {uuid.strip().removeprefix("GPU-"): int(index) for index, uuid in cells}
    serials = [str(torch.cuda.get_device_properties(at).uuid) for at in range(count)]
    ours = [number.get(serial.removeprefix("GPU-")) for serial in serials]
    named = parse_topology(_say("nvidia-smi", "topo", "-m"))
    return {
        (source, target): named[there]
        for source, a in enumerate(ours)
        for target, b in enumerate(ours)
        if a is not None and b is not None and (there := (a, b)) in named
    }


def _atomics(count: int) -> dict[tuple[int, int], bool]:
    """torch does not ask the driver for this one."""
    driver = ctypes.CDLL("libcuda.so.1")
    if driver.cuInit(0):
        return {}
    handles = [ctypes.c_int() for _ in range(count)]
    if any(driver.cuDeviceGet(ctypes.byref(handle), at) for at, handle in enumerate(handles)):
        return {}
    found = {}
    for source, a in enumerate(handles):
        for target, b in enumerate(handles):
            answer = ctypes.c_int()
            asked = ctypes.byref(answer), NATIVE_ATOMICS, a, b
            if source != target and not driver.cuDeviceGetP2PAttribute(*asked):
                found[source, target] = bool(answer.value)
    return found


def loaded_nccl() -> str | None:
    """torch.cuda.nccl.version() is a constant of torch's build: it does not see an NCCL that was
    installed over torch's, or preloaded."""
    if not dist.is_nccl_available():
        return None
    try:
        loaded = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # linked into torch: then the constant is right
        from torch.cuda import nccl

        return ".".join(map(str, nccl.version()[:3]))
    return nccl_version(loaded)


def nccl_version(library: ctypes.CDLL) -> str | None:
    number = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)):
        return None
    major, rest = divmod(number.value, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _triton() -> str | None:
    versions = (_attempt(lambda n=name: metadata.version(n), None) for name in TRITON_DISTRIBUTIONS)
    return next((version for version in versions if version), None)


def _nvcc() -> Nvcc | None:
    """The first that answers, in the order in which torch and DeepEP look."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    for path in [*found, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]:
        said = _attempt(lambda path=path: _say(path, "--version"), "") if path else ""
        if path and (release := re.search(r"release (\d+\.\d+)", said)):
            return Nvcc(release[1], path)
    return None


def _symmetric_memory() -> bool:
    name = "torch.distributed._symmetric_memory"
    return torch.version.cuda is not None and importlib.util.find_spec(name) is not None


def _network_cards(folder: str = "/sys/class/infiniband") -> tuple[str, ...]:
    return tuple(sorted(card.name for card in Path(folder).iterdir()))


def _deepep() -> DeepEP | None:
    spec = importlib.util.find_spec("deep_ep")  # of a package at the top: imports nothing
    if spec is None:
        return None
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    folder = Path(places[0])
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    classes = set[str]().union(*(_attempt(lambda f=file: _classes(f), set()) for file in files))
    known: list[Generation] = [kind for name, kind in BUFFERS.items() if name in classes]
    name, version = _installed_as(folder)
    return DeepEP(str(folder), known[0] if known else None, "Buffer" in classes, name, version)


def _classes(file: Path) -> set[str]:
    tree = ast.parse(file.read_bytes())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _installed_as(folder: Path) -> tuple[str | None, str | None]:
    """Several distributions bring a deep_ep, and a folder on the path may hide them all."""
    for name in DEEPEP_DISTRIBUTIONS:
        found = _attempt(lambda name=name: metadata.distribution(name), None)
        if found and Path(str(found.locate_file("deep_ep"))).resolve() == folder.resolve():
            return name, found.version
    return None, None
