"""`ep-moe doctor` on machines made by hand and on this one."""

import json
from dataclasses import asdict, fields, replace

import pytest

from ep_moe import ConfigError, cli
from ep_moe.dispatch.needs import NEEDS
from ep_moe.doctor import as_json, diagnose, text
from ep_moe.host import Host
from tests.hosts import CPU, V1, V2, h200s, with_pair

TWO = h200s(2)


def usable(host: Host, ranks: int) -> dict[str, bool | None]:
    return {finding.transport: finding.usable for finding in diagnose(host, ranks).findings}


def test_a_machine_without_gpus():
    assert usable(CPU, 2) == {
        "local": False,
        "collective": True,
        "symm": False,
        "deepep": False,
        "deepep_low_latency": False,
    }
    said = text(diagnose(CPU, 2))
    assert "torch is built without CUDA" in said
    assert "-> install a CUDA build of torch" in said
    assert said.splitlines()[-1] == "auto: collective over gloo, for ranks without GPUs"


@pytest.mark.parametrize("host", [CPU, h200s(1), TWO], ids=["cpu", "1", "2"])
def test_auto_takes_local_for_one_rank(host):
    auto = diagnose(host, 1).auto
    assert (auto.takes, auto.among) == ("local", ("local",))


@pytest.mark.parametrize("ranks", [2, 8])
def test_auto_measures_what_can_run(ranks):
    auto = diagnose(h200s(ranks), ranks).auto
    assert auto.takes is None
    assert auto.among == ("collective", "symm", "deepep")
    assert "fastest of collective, symm, deepep" in auto.why
    assert "layer.warmup()" in auto.why
    assert "symm and deepep only with max_tokens_per_rank" in auto.why


@pytest.mark.parametrize(
    "host, ranks, among",
    [
        (replace(TWO, deepep=None), 2, ("collective", "symm")),
        (replace(TWO, triton=None), 2, ("collective", "deepep")),
        (replace(TWO, triton=None, nvcc=None), 2, ("collective",)),
        (replace(TWO, nccl=None), 2, ("symm",)),
        (replace(TWO, nccl=None, deepep=V1), 2, ("symm", "deepep")),
        (TWO, 16, ("collective",)),
        (replace(TWO, network_cards=("mlx5_0",)), 16, ("collective", "deepep")),
        (with_pair(TWO, 0, 1, atomics=False), 2, ("collective", "deepep")),
        (with_pair(TWO, 0, 1, atomics=None), 2, ("collective", "symm", "deepep")),
        (replace(TWO, nccl=None, triton=None), 2, ()),
        (replace(CPU, gloo=False), 2, ()),
        (replace(CPU, nccl="2.32.3"), 2, ("collective",)),
    ],
)
def test_auto_among(host, ranks, among):
    auto = diagnose(host, ranks).auto
    assert auto.among == among
    assert auto.takes == (among[0] if len(among) == 1 else None)
    assert auto.why
    for name in ("symm", "deepep"):
        assert (name in auto.why) == (name in among)
    if {"symm", "deepep"} & set(among):
        assert "max_tokens_per_rank" in auto.why
    if not among:
        assert "nothing can run" in auto.why


def test_auto_never_takes_low_latency():
    host = replace(TWO, nccl=None, triton=None, deepep=V1, symmetric_memory=False)
    host = replace(host, network_cards=("mlx5_0",))
    assert usable(host, 2)["deepep_low_latency"]
    assert diagnose(host, 2).auto.among == ("deepep",)
    assert "deepep_low_latency: can run; never auto: no backward" in text(diagnose(host, 2))


def test_what_is_unknown_may_run():
    found = diagnose(with_pair(TWO, 0, 1, atomics=None), 2)
    assert {finding.transport: finding.usable for finding in found.findings}["symm"] is None
    assert "symm: may run" in text(found)
    assert "unknown  native atomics" in text(found)


def test_no_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"ranks = 0.*at least 1"):
        diagnose(CPU, 0)


@pytest.mark.parametrize(
    "host", [Host(), CPU, h200s(1), TWO, h200s(8), replace(TWO, deepep=V2, switches=("A",))]
)
def test_the_report_is_aligned_plain_and_whole(host):
    found = diagnose(host, 2)
    said = text(found)
    assert said.isascii()
    assert "\x1b" not in said
    assert all(line == line.rstrip() for line in said.splitlines())
    for finding in found.findings:
        block = said.split(f"  {finding.transport}: ")[1].split("\n\n")[0].splitlines()[1:]
        columns = {
            line.index(f"{need.has}; needs")
            for need in finding.needs
            for line in block
            if f" {need.what} " in line and f"{need.has}; needs {need.needs}" in line
        }
        assert len(columns) == 1
        for need in finding.needs:
            assert sum(f"; needs {need.needs}" in line for line in block) >= 1
            if need.remedy:
                assert any(line.strip() == f"-> {need.remedy}" for line in block)
    for gpu in range(len(host.gpus)):
        assert f"GPU {gpu} " in said
    assert said.splitlines()[-1].startswith("auto: ")


def test_pairs_that_are_alike_share_a_line():
    said = text(diagnose(h200s(8), 8))
    assert said.count("between GPUs ") == 1
    assert "all: NV18, peer access, native atomics" in said
    said = text(diagnose(with_pair(h200s(4), 2, 1, link=None, access=False, atomics=None), 4))
    assert "2->1: link unknown, no peer access, native atomics unknown" in said
    assert said.count("between GPUs ") == 2


@pytest.mark.parametrize("host", [Host(), CPU, TWO, replace(h200s(8), deepep=None)])
@pytest.mark.parametrize("ranks", [1, 8])
def test_json_holds_all(host, ranks):
    found = diagnose(host, ranks)
    read = json.loads(as_json(found))
    assert list(read) == ["ranks", "host", "transports", "auto"]
    assert read["ranks"] == ranks
    assert list(read["host"]) == [field.name for field in fields(Host)]
    assert list(read["transports"]) == list(NEEDS)
    assert list(read["auto"]) == ["takes", "among", "why"]
    for finding in found.findings:
        there = read["transports"][finding.transport]
        assert there["usable"] is finding.usable
        assert there["needs"] == [asdict(need) for need in finding.needs]
        assert all(
            list(need) == ["what", "needs", "has", "met", "remedy"] for need in there["needs"]
        )
    assert read["host"] == json.loads(json.dumps(asdict(host)))
    assert read["auto"]["among"] == list(found.auto.among)


@pytest.mark.parametrize(
    "argv, ranks, is_json",
    [
        ([], 2, False),
        (["--ranks", "3"], 3, False),
        (["--json"], 2, True),
        (["--json", "--ranks=1"], 1, True),
        (["--ranks=1", "--json", "true"], 1, True),
        (["--json=false"], 2, False),
        (["--json", "false"], 2, False),
    ],
)
def test_the_command(argv, ranks, is_json, monkeypatch, capsys):
    monkeypatch.setattr(Host, "look", lambda: TWO)
    cli.main(["doctor", *argv])
    said = capsys.readouterr().out
    if is_json:
        assert json.loads(said)["ranks"] == ranks
    else:
        assert f"Transports for {ranks} rank(s)" in said


def test_the_command_refuses_no_ranks(monkeypatch):
    monkeypatch.setattr(Host, "look", lambda: CPU)
    with pytest.raises(SystemExit, match=r"ep-moe: ranks = 0"):
        cli.main(["doctor", "--ranks=0"])


def test_the_command_on_this_machine(capsys):
    """Without GPUs: for one rank."""
    cli.main(["doctor", "--json"])
    read = json.loads(capsys.readouterr().out)
    assert read["ranks"] == max(1, len(read["host"]["gpus"]))
    assert read["transports"]["collective"]["usable"]
