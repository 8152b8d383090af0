"""What each transport needs of a machine, before anybody tries it: so that a program can say what
is missing, and what to install or switch, where trying would end in a hang or a dead process.

A new transport is a function here and its line in NEEDS.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations
from typing import Literal, NamedTuple

from ep_moe.dispatch.symm import SymmTransport
from ep_moe.errors import ConfigError
from ep_moe.host import Host, Need

# DeepEP v1 has settings for some numbers of ranks, and takes no other. Within one host it needs no
# host sync.
V1_RANKS = (2, 4, 8)
DEEPEP_CAPABILITY = (9, 0)


class Versions(NamedTuple):
    """The least of each that a generation of DeepEP runs with; its kernels are compiled at run
    time, by nvcc."""

    torch: str
    cuda: str
    nvcc: str
    nccl: str


DEEPEP_VERSIONS = {
    "v2": Versions(torch="2.10", cuda="12.3", nvcc="12.3", nccl="2.30.4"),
    "v2.5": Versions(torch="2.10", cuda="12.3", nvcc="12.9", nccl="2.32.3"),
}


def needs_of(name: str, host: Host, ranks: int) -> tuple[Need, ...]:
    """All that the transport `name` needs of this host for `ranks` ranks that share the experts,
    met or not. The ranks of a host use its first GPUs, one each.

    Raises ConfigError for an unknown name or less than one rank.
    """
    if name not in NEEDS:
        raise ConfigError("transport", name, "one of " + ", ".join(NEEDS))
    if ranks < 1:
        raise ConfigError("ranks", ranks, "at least 1")
    return tuple(NEEDS[name](host, ranks))


def unmet(needs: Iterable[Need]) -> list[Need]:
    """Those that rule a transport out. One that cannot be known before it is tried does not."""
    return [need for need in needs if need.met is False]


def _need(what: str, needs: str, has: str, met: bool | None, remedy: str) -> Need:
    return Need(what, needs, has, met, "" if met else remedy)


def _local(host: Host, ranks: int) -> Iterator[Need]:
    yield _need("ranks", "1", str(ranks), ranks == 1, "use collective or auto, or one process")


def _collective(host: Host, ranks: int) -> Iterator[Need]:
    yield _need(
        "torch.distributed",
        "a torch that was built with it",
        "there" if host.distributed else "missing",
        host.distributed,
        "install a torch that has it, such as those that pip installs on Linux",
    )
    if host.gpus:
        remedy = "install a CUDA build of torch for Linux, which brings NCCL"
        yield _need("NCCL", "any version", host.nccl or "missing", host.nccl is not None, remedy)
    else:
        remedy = "install a torch that has gloo, such as those that pip installs on Linux"
        yield _need(
            "gloo",
            "a torch that was built with it",
            "there" if host.gloo else "missing",
            host.gloo,
            remedy,
        )


def _symm(host: Host, ranks: int) -> Iterator[Need]:
    most = SymmTransport.caps.max_ranks or ranks
    rule = f"use at most {most} ranks on GPUs of one host, or collective"
    yield _need("ranks", f"at most {most}", str(ranks), ranks <= most, rule)
    yield _gpus(host, ranks, shared="TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
    yield _between(host, ranks, "access")
    yield _between(host, ranks, "atomics")
    remedy = "pip install triton (there are packages for Linux)"
    yield _need("Triton", "any version", host.triton or "missing", host.triton is not None, remedy)
    yield _need(
        "symmetric memory",
        "a torch that was built with it",
        "there" if host.symmetric_memory else "missing",
        host.symmetric_memory,
        "install a CUDA build of torch for Linux",
    )


def _deepep(host: Host, ranks: int) -> Iterator[Need]:
    found = host.deepep
    known = found is not None and found.generation is not None
    remedy = "pip install ep-moe[deepep], or build DeepEP from its sources"
    yield _need("DeepEP", "v1, v2 or v2.5", _deepep_words(host), known, remedy)
    # Where there is none, what the remedy would bring.
    generation = found.generation if found and found.generation else "v2"
    yield _capability(host)
    if generation == "v1":
        yield from _v1_ranks(host, ranks)
        return
    yield _one_or_more_hosts(host, ranks)
    least = DEEPEP_VERSIONS[generation]
    yield from _versions(host, generation, least)
    yield _need(
        "nvcc",
        f"{least.nvcc} or newer at run time, for {generation}",
        f"{host.nvcc.version} ({host.nvcc.path})" if host.nvcc else "missing",
        host.nvcc is not None and at_least(host.nvcc.version, least.nvcc),
        f"install the CUDA toolkit, {least.nvcc} or newer, or set CUDA_HOME to one",
    )


def _deepep_low_latency(host: Host, ranks: int) -> Iterator[Need]:
    found = host.deepep
    yield _need(
        "DeepEP",
        "v1 or v2: its class Buffer",
        _deepep_words(host),
        found is not None and found.low_latency,
        "pip install ep-moe[deepep], which brings v2",
    )
    yield _capability(host)
    yield from _v1_ranks(host, ranks)
    yield _need(
        "network cards",
        "RDMA with IBGDA, on NVLink too: the kernels look for its queues",
        ", ".join(host.network_cards) or "none",
        bool(host.network_cards),
        "use deepep or symm, which need none",
    )
    if found is None or found.generation == "v2":  # v2 looks at them when it is imported
        yield from _versions(host, "v2", DEEPEP_VERSIONS["v2"])


NEEDS: dict[str, Callable[[Host, int], Iterator[Need]]] = {
    "local": _local,
    "collective": _collective,
    "symm": _symm,
    "deepep": _deepep,
    "deepep_low_latency": _deepep_low_latency,
}


def _no_gpu(host: Host) -> tuple[str, str]:
    """What is there instead of a GPU, and what to do about it."""
    if host.cuda is None:
        return "none: torch is built without CUDA", "install a CUDA build of torch"
    if host.driver is None:
        return "none, and no NVIDIA driver", "install the driver, or use a machine with GPUs"
    return "none that torch can use", "check CUDA_VISIBLE_DEVICES, and that nvidia-smi lists them"


def _gpus(host: Host, ranks: int, *, shared: str | None = None) -> Need:
    """One for each of `ranks` ranks on this host; `shared` is the switch that lets them share."""
    words, remedy = (str(len(host.gpus)), "") if host.gpus else _no_gpu(host)
    if host.gpus:
        fewer = f"use at most {len(host.gpus)} rank(s) here, or collective over more hosts"
        remedy = f"{fewer}; {shared}=1 lets ranks share a GPU, for tests" if shared else fewer
    met: bool | None = len(host.gpus) >= ranks
    if host.gpus and not met and shared in host.switches:
        met, words = True, f"{words}, shared: {shared}=1"
    elif host.gpus and not met and len(host.gpus) + host.hidden >= ranks:
        met, words = None, f"{words}, and {host.hidden} that this process does not see"
        remedy = "the first call will tell"
    return _need("GPUs", f"{ranks}, one for each rank, on this host", words, met, remedy)


def _one_or_more_hosts(host: Host, ranks: int) -> Need:
    """Ranks that find no GPU here are on other hosts, which RDMA reaches."""
    shared = "NCCL_MULTI_RANK_GPU_ENABLE"
    enough = len(host.gpus) + host.hidden >= ranks
    if not host.gpus or enough or shared in host.switches:
        return _gpus(host, ranks, shared=shared)
    cards = ", ".join(host.network_cards) or "no network card for RDMA"
    return _need(
        "GPUs",
        f"{ranks}, one for each rank, or RDMA to more hosts",
        f"{len(host.gpus)} here; {cards}",
        bool(host.network_cards),
        f"use at most {len(host.gpus)} rank(s) here, or hosts with network cards for RDMA",
    )


def _between(host: Host, ranks: int, kind: Literal["access", "atomics"]) -> Need:
    """Something that every pair of GPUs in use must have."""
    what = {"access": "peer access", "atomics": "native atomics"}[kind]
    pairs = {(pair.source, pair.target): pair for pair in host.pairs}
    used = list(permutations(range(min(ranks, len(host.gpus))), 2))
    has = {at: getattr(pairs[at], kind) if at in pairs else None for at in used}
    lacking = [at for at in used if has[at] is False]
    unknown = [at for at in used if has[at] is None]
    links = sorted({pairs[at].link or "" for at in used if at in pairs} - {""})
    if not host.gpus:
        words, met = "no GPUs", False
    elif not lacking and len(host.gpus) < ranks <= len(host.gpus) + host.hidden:
        words, met = "unknown of GPUs that this process does not see", None
    elif lacking or unknown:
        (source, target), *more = lacking or unknown
        words = f"{'none' if lacking else 'unknown'} from GPU {source} to GPU {target}"
        words += f" and in {len(more)} more direction(s)" if more else ""
        met = False if lacking else None
    else:
        words, met = "yes" if used else "one GPU, which needs none", True
    words += f" (links: {', '.join(links)})" if links else ""
    if not host.gpus:
        remedy = _no_gpu(host)[1]
    elif met is None:
        remedy = "the first call will tell; collective works without"
    else:
        remedy = (
            "use GPUs on NVLink (CUDA_VISIBLE_DEVICES chooses, nvidia-smi topo -m shows them), or "
            "collective"
        )
    return _need(what, "between all GPUs in use", words, met, remedy)


def _capability(host: Host) -> Need:
    major, minor = DEEPEP_CAPABILITY
    least = min(host.gpus, key=lambda gpu: gpu.capability, default=None)
    words, met = "no GPUs", False
    if least and host.cuda is None:  # torch for ROCm, whose numbers mean something else
        words = f"none of CUDA's ({least.name})"
    elif least:
        words = f"sm_{least.capability[0]}{least.capability[1]} ({least.name})"
        met = least.capability >= DEEPEP_CAPABILITY
    return _need(
        "architecture",
        f"sm_{major}{minor} or newer",
        words,
        met,
        "use Hopper GPUs or newer ones, or symm or collective" if least else _no_gpu(host)[1],
    )


def _v1_ranks(host: Host, ranks: int) -> Iterator[Need]:
    known = ", ".join(map(str, V1_RANKS))
    met = ranks in V1_RANKS
    yield _need("ranks", f"one of {known}, of one host", str(ranks), met, f"use one of {known}")
    yield _gpus(host, ranks)
    yield _between(host, ranks, "access")


def _versions(host: Host, generation: str, least: Versions) -> Iterator[Need]:
    upgrade = f'pip install "torch>={least.torch}"'
    rule = f"or newer, for {generation}"
    met = at_least(host.torch, least.torch)
    yield _need("torch", f"{least.torch} {rule}", host.torch or "unknown", met, upgrade)
    remedy = f"install a torch that was built for CUDA {least.cuda} or newer"
    met = at_least(host.cuda, least.cuda)
    yield _need("CUDA", f"{least.cuda} {rule}", host.cuda or "none in torch", met, remedy)
    major = (host.cuda or "13").split(".")[0]
    remedy = f'pip install --no-deps "nvidia-nccl-cu{major}>={least.nccl}"'
    met = at_least(host.nccl, least.nccl)
    yield _need("NCCL", f"{least.nccl} {rule}", host.nccl or "missing", met, remedy)


def _deepep_words(host: Host) -> str:
    found = host.deepep
    if found is None:
        return "missing"
    name = f"{found.distribution} {found.version}" if found.distribution else found.folder
    return f"{found.generation or 'of no known generation'} ({name})"


def at_least(version: str | None, least: str) -> bool:
    """2.10.0a0+git >= 2.9: by number, and whatever follows them aside."""
    return version is not None and _numbers(version) >= _numbers(least)


def _numbers(version: str) -> list[int]:
    found = re.findall(r"\d+", version.split("+")[0])[:3]
    return [*map(int, found), *[0] * (3 - len(found))]
