"""What each transport needs: each thing taken away in turn is named, with what to do about it."""

from dataclasses import replace

import pytest

from ep_moe import ConfigError
from ep_moe.dispatch import TRANSPORTS
from ep_moe.dispatch.needs import NEEDS, V1_RANKS, at_least, needs_of, unmet
from ep_moe.host import DeepEP, Host, Nvcc
from tests.hosts import CPU, H200, V1, V2, V25, h200s, with_pair

TWO = h200s(2)
V100 = replace(H200, name="NVIDIA V100", capability=(7, 0))


def lacking(name: str, host: Host, ranks: int) -> dict[str, str]:
    """what is unmet -> all that is said about it"""
    needs = unmet(needs_of(name, host, ranks))
    assert all(need.remedy for need in needs)
    return {need.what: f"{need.has} | {need.needs} | {need.remedy}" for need in needs}


def test_every_transport_has_its_needs():
    assert set(TRANSPORTS) <= set(NEEDS)
    assert list(NEEDS) == ["local", "collective", "symm", "deepep", "deepep_low_latency"]


@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.parametrize("host", [Host(), CPU, h200s(1), TWO], ids=["none", "cpu", "1", "2"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 200])
def test_a_need_has_words_and_a_remedy_unless_it_is_met(name, host, ranks):
    needs = needs_of(name, host, ranks)
    assert needs
    assert len({need.what for need in needs}) == len(needs)
    for need in needs:
        assert need.what
        assert need.needs
        assert need.has
        assert bool(need.remedy) == (need.met is not True)


def test_unknown_names_and_no_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"transport = 'nvshmem'.*local, collective, symm"):
        needs_of("nvshmem", CPU, 1)
    with pytest.raises(ConfigError, match=r"ranks = 0.*at least 1"):
        needs_of("local", CPU, 0)


def test_local():
    assert lacking("local", Host(), 1) == {}
    assert "collective" in lacking("local", TWO, 2)["ranks"]


def test_collective():
    assert lacking("collective", CPU, 1) == lacking("collective", CPU, 300) == {}
    assert lacking("collective", replace(TWO, gloo=False), 16) == {}
    assert "gloo" in lacking("collective", replace(CPU, gloo=False), 2)["gloo"]
    assert (
        "install" in lacking("collective", replace(CPU, distributed=False), 2)["torch.distributed"]
    )
    missing = lacking("collective", replace(TWO, nccl=None), 2)
    assert list(missing) == ["NCCL"]
    assert "CUDA build of torch" in missing["NCCL"]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_symm_on_as_many_gpus(ranks):
    needs = needs_of("symm", h200s(8), ranks)
    assert {need.met for need in needs} == {True}


def test_symm_says_how_the_gpus_are_linked():
    has = {need.what: need.has for need in needs_of("symm", TWO, 2)}
    assert "NV18" in has["peer access"]


@pytest.mark.parametrize(
    "host, ranks, what, words",
    [
        (h200s(8), 9, "ranks", ["9", "at most 8", "collective"]),
        (TWO, 3, "GPUs", ["2", "3, one for each", "at most 2", "collective"]),
        (replace(TWO, triton=None), 2, "Triton", ["pip install triton"]),
        (replace(TWO, symmetric_memory=False), 2, "symmetric memory", ["CUDA build of torch"]),
        (with_pair(TWO, 1, 0, access=False), 2, "peer access", ["GPU 1 to GPU 0", "NVLink"]),
        (with_pair(TWO, 0, 1, atomics=False), 2, "native atomics", ["GPU 0 to GPU 1", "NVLink"]),
        (with_pair(TWO, 0, 1, atomics=False, link="SYS"), 2, "native atomics", ["NV18, SYS"]),
    ],
)
def test_symm_without(host, ranks, what, words):
    missing = lacking("symm", host, ranks)
    assert missing.keys() - {what} == ({"GPUs"} if what == "ranks" else set())
    assert all(word in missing[what] for word in words), missing[what]


def test_symm_without_a_gpu_says_why_there_is_none():
    said = lacking("symm", CPU, 2)
    assert {"GPUs", "peer access", "native atomics", "symmetric memory"} == set(said)
    assert "without CUDA" in said["GPUs"]
    assert "install a CUDA build of torch" in said["GPUs"]
    no_driver = replace(CPU, cuda="13.0", symmetric_memory=True)
    assert "install the driver" in lacking("symm", no_driver, 2)["GPUs"]
    hidden = replace(no_driver, driver="580.65.06")
    assert "CUDA_VISIBLE_DEVICES" in lacking("symm", hidden, 2)["GPUs"]


def test_only_pairs_in_use_count():
    bad = with_pair(h200s(4), 0, 3, access=False, atomics=False)
    assert lacking("symm", bad, 3) == {}
    assert set(lacking("symm", bad, 4)) == {"peer access", "native atomics"}


def test_atomics_that_are_unknown_rule_nothing_out():
    for host in (with_pair(TWO, 1, 0, atomics=None), replace(TWO, pairs=())):
        needs = {need.what: need for need in needs_of("symm", host, 2)}
        assert needs["native atomics"].met is None
        assert "unknown" in needs["native atomics"].has
        assert unmet(needs.values()) == []
    worse = with_pair(with_pair(TWO, 1, 0, atomics=None), 0, 1, atomics=False)
    assert "GPU 0 to GPU 1" in lacking("symm", worse, 2)["native atomics"]


def test_ranks_share_a_gpu_only_where_the_switch_says_so():
    switch = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    one = h200s(1)
    assert switch in lacking("symm", one, 2)["GPUs"]
    assert lacking("symm", replace(one, switches=(switch,)), 2) == {}
    assert "GPUs" in lacking("symm", replace(CPU, switches=(switch,)), 2)
    other = replace(one, switches=("NCCL_MULTI_RANK_GPU_ENABLE",))
    assert "GPUs" in lacking("symm", other, 2)
    assert lacking("deepep", other, 2) == {}


@pytest.mark.parametrize("deepep", [V1, V2, V25], ids=lambda found: found.generation)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_deepep_on_as_many_gpus(deepep, ranks):
    needs = needs_of("deepep", replace(h200s(8), deepep=deepep), ranks)
    assert {need.met for need in needs} == {True}


@pytest.mark.parametrize("generation", ["v2", "v2.5"])
def test_deepep_serves_one_rank_from_v2_on(generation):
    host = replace(h200s(1), deepep=replace(V2, generation=generation))
    assert lacking("deepep", host, 1) == {}
    assert "2, 4, 8, of one host" in lacking("deepep", replace(host, deepep=V1), 1)["ranks"]


LESS = {
    "torch": (
        replace(TWO, torch="2.9.1+cu130"),
        {"v2": '"torch>=2.10"', "v2.5": '"torch>=2.10"'},
    ),
    "CUDA": (replace(TWO, cuda="12.2"), {"v2": "CUDA 12.3", "v2.5": "CUDA 12.3"}),
    "NCCL": (
        replace(TWO, nccl="2.28.9"),
        {
            "v2": 'pip install --no-deps "nvidia-nccl-cu13>=2.30.4"',
            "v2.5": 'pip install --no-deps "nvidia-nccl-cu13>=2.32.3"',
        },
    ),
    "nvcc": (
        replace(TWO, nvcc=None),
        {
            "v2": "CUDA toolkit, 12.3 or newer, or set CUDA_HOME",
            "v2.5": "CUDA toolkit, 12.9 or newer, or set CUDA_HOME",
        },
    ),
    "architecture": (
        replace(TWO, gpus=(H200, V100)),
        dict.fromkeys(("v1", "v2", "v2.5"), "sm_70 (NVIDIA V100) | sm_90 or newer"),
    ),
    "peer access": (with_pair(TWO, 0, 1, access=False), {"v1": "GPU 0 to GPU 1"}),
}


@pytest.mark.parametrize("deepep", [V1, V2, V25], ids=lambda found: found.generation)
@pytest.mark.parametrize("what", LESS)
def test_deepep_without(what, deepep):
    host, remedies = LESS[what]
    missing = lacking("deepep", replace(host, deepep=deepep), 2)
    assert set(missing) == ({what} if deepep.generation in remedies else set())
    assert remedies.get(deepep.generation, "") in missing.get(what, "")


def test_a_gpu_of_another_maker_is_no_hopper():
    """gfx942 calls itself (9, 4)."""
    other = replace(H200, name="AMD Instinct MI300X", capability=(9, 4))
    host = replace(TWO, cuda=None, gpus=(other, other), deepep=V1)
    said = lacking("deepep", host, 2)
    assert list(said) == ["architecture"]
    assert "none of CUDA's (AMD Instinct MI300X)" in said["architecture"]


@pytest.mark.parametrize(
    "deepep, changes, met",
    [
        (V2, {"nccl": "2.30.4"}, True),
        (V2, {"nccl": "2.30.3"}, False),
        (V25, {"nccl": "2.32.2"}, False),
        (V25, {"nccl": "2.32.3"}, True),
        (V2, {"nvcc": Nvcc("12.3", "nvcc")}, True),
        (V2, {"nvcc": Nvcc("12.2", "nvcc")}, False),
        (V25, {"nvcc": Nvcc("12.8", "nvcc")}, False),
        (V25, {"nvcc": Nvcc("12.9", "nvcc")}, True),
        (V2, {"torch": "2.10.0"}, True),
        (V2, {"cuda": "12.3"}, True),
    ],
)
def test_the_least_that_deepep_runs_with(deepep, changes, met):
    assert (lacking("deepep", replace(TWO, deepep=deepep, **changes), 2) == {}) == met


def test_nccl_is_of_the_cuda_of_torch():
    host = replace(TWO, deepep=V2, nccl="2.28.9", cuda="12.8")
    assert "nvidia-nccl-cu12>=2.30.4" in lacking("deepep", host, 2)["NCCL"]


def test_deepep_that_is_not_there_or_not_known():
    said = lacking("deepep", replace(TWO, deepep=None), 2)
    assert list(said) == ["DeepEP"]
    assert "missing" in said["DeepEP"]
    assert "pip install ep-moe[deepep]" in said["DeepEP"]
    unknown = replace(TWO, deepep=DeepEP("/somewhere/deep_ep", None))
    assert "of no known generation (/somewhere/deep_ep)" in lacking("deepep", unknown, 2)["DeepEP"]


def test_deepep_over_more_hosts_needs_network_cards():
    host = replace(h200s(8), deepep=V2)
    said = lacking("deepep", host, 16)
    assert list(said) == ["GPUs"]
    assert "RDMA" in said["GPUs"]
    assert lacking("deepep", replace(host, network_cards=("mlx5_0",)), 16) == {}
    assert "GPUs" in lacking("deepep", replace(CPU, network_cards=("mlx5_0",)), 16)


def test_deepep_v1_needs_a_gpu_for_each_rank():
    host = replace(h200s(4), deepep=V1, network_cards=("mlx5_0",))
    assert lacking("deepep", host, 4) == {}
    assert "at most 4" in lacking("deepep", host, 8)["GPUs"]


@pytest.mark.parametrize("name", ["deepep", "deepep_low_latency"])
def test_deepep_v1_serves_some_numbers_of_ranks(name):
    host = replace(h200s(8), deepep=V1, network_cards=("mlx5_0",))
    serves = [ranks for ranks in range(1, 170) if "ranks" not in lacking(name, host, ranks)]
    assert serves == list(V1_RANKS)


def test_gpus_that_a_launcher_hides_rule_nothing_out():
    """Each rank sees its own alone, as with Slurm's --gpus-per-task=1."""
    host = replace(h200s(1), hidden=7)
    for name, unknown in (
        ("symm", ["GPUs", "peer access", "native atomics"]),
        ("deepep", ["GPUs"]),
    ):
        needs = needs_of(name, host, 8)
        assert [need.what for need in needs if need.met is None] == unknown
        assert unmet(needs) == []
        assert "7 that this process does not see" in next(n.has for n in needs if n.what == "GPUs")
        assert "GPUs" in lacking(name, replace(host, hidden=6), 8)


WITH_CARDS = replace(TWO, network_cards=("mlx5_0",))


def test_low_latency_needs_the_class_of_v1():
    for deepep in (V1, V2):
        assert lacking("deepep_low_latency", replace(WITH_CARDS, deepep=deepep), 2) == {}
    for deepep in (V25, None):
        said = lacking("deepep_low_latency", replace(WITH_CARDS, deepep=deepep), 2)
        assert list(said) == ["DeepEP"]
        assert "pip install ep-moe[deepep]" in said["DeepEP"]


def test_low_latency_needs_rdma_though_on_nvlink():
    said = lacking("deepep_low_latency", replace(TWO, deepep=V2), 2)
    assert list(said) == ["network cards"]
    assert "IBGDA" in said["network cards"]


def test_low_latency_of_v2_needs_the_nccl_of_v2():
    old = replace(WITH_CARDS, nccl="2.28.9")
    assert list(lacking("deepep_low_latency", replace(old, deepep=V2), 2)) == ["NCCL"]
    assert lacking("deepep_low_latency", replace(old, deepep=V1), 2) == {}


@pytest.mark.parametrize(
    "version, least, enough",
    [
        ("2.10.0", "2.9", True),
        ("2.9.1", "2.10", False),
        ("2.10.0a0+git1f3b", "2.10", True),
        ("2.10", "2.10.0", True),
        ("13.0", "12.9", True),
        (None, "1", False),
        ("", "1", False),
    ],
)
def test_versions_compare_by_number(version, least, enough):
    assert at_least(version, least) == enough
