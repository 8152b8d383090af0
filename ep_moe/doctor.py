"""`ep-moe doctor`: what each transport needs of this machine, what is there, what to do about the
rest, and which transport `auto` would take."""

import json
from dataclasses import asdict, dataclass
from itertools import groupby

from ep_moe.dispatch.auto import MEASURED
from ep_moe.dispatch.needs import NEEDS, needs_of, unmet
from ep_moe.errors import ConfigError
from ep_moe.host import Host, Need, Pair


@dataclass(frozen=True)
class Finding:
    """One transport. usable: None = nothing that is known to be missing, something unknown."""

    transport: str
    usable: bool | None
    needs: tuple[Need, ...]


@dataclass(frozen=True)
class Auto:
    """takes  the transport; None = the fastest among several, or none can run
    among  those that can run here, in the order of the transports' table
    why    a sentence
    """

    takes: str | None
    among: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Diagnosis:
    host: Host
    ranks: int
    findings: tuple[Finding, ...]
    auto: Auto


def diagnose(host: Host, ranks: int) -> Diagnosis:
    """What `ranks` ranks that share the experts could use on this host. Asks nothing but `host`.

    Raises ConfigError for less than one rank.
    """
    if ranks < 1:
        raise ConfigError("ranks", ranks, "at least 1")
    findings = tuple(_finding(name, host, ranks) for name in NEEDS)
    return Diagnosis(host, ranks, findings, _auto(host, ranks, findings))


def as_json(diagnosis: Diagnosis) -> str:
    """Keys: ranks, host (the fields of Host), transports (by name: usable, needs), auto."""
    transports = {
        finding.transport: {
            "usable": finding.usable,
            "needs": [asdict(need) for need in finding.needs],
        }
        for finding in diagnosis.findings
    }
    whole = {
        "ranks": diagnosis.ranks,
        "host": asdict(diagnosis.host),
        "transports": transports,
        "auto": asdict(diagnosis.auto),
    }
    return json.dumps(whole, indent=2)


def text(diagnosis: Diagnosis) -> str:
    """For people: one fact a line, what is missing with what to do about it."""
    lines = ["This machine", *_table(_machine(diagnosis.host), "  ")]
    lines += ["", f"Transports for {diagnosis.ranks} rank(s)"]
    words = {True: "can run", None: "may run", False: "cannot run"}
    for finding in diagnosis.findings:
        never = "" if finding.transport in (*MEASURED, "local") else "; never auto: no backward"
        lines += ["", f"  {finding.transport}: {words[finding.usable]}{never}"]
        lines += _table([row for need in finding.needs for row in _rows(need)], "    ")
    return "\n".join([*lines, "", f"auto: {diagnosis.auto.why}"])


def _finding(name: str, host: Host, ranks: int) -> Finding:
    needs = needs_of(name, host, ranks)
    sure = all(need.met for need in needs)
    return Finding(name, False if unmet(needs) else (sure or None), needs)


def _auto(host: Host, ranks: int, findings: tuple[Finding, ...]) -> Auto:
    if ranks == 1:
        return Auto("local", ("local",), "local, for one rank")
    can_run = {finding.transport for finding in findings if finding.usable is not False}
    among = [name for name in MEASURED if name in can_run]
    if not among:
        return Auto(None, (), f"nothing can run {ranks} ranks here: collective says why, above")
    fixed = [name for name in among if MEASURED[name].caps.fixed_size]
    condition = f"{' and '.join(fixed)} only with max_tokens_per_rank in the config"
    if len(among) > 1:
        why = (
            f"the fastest of {', '.join(among)} in a short measurement at the first call or in "
            f"layer.warmup(); {condition}"
        )
        return Auto(None, tuple(among), why)
    only = among[0]
    if not host.gpus:
        return Auto(only, (only,), f"{only} over gloo, for ranks without GPUs")
    why = f"{only}, the only one that can run here" + (f"; {condition}" if fixed else "")
    return Auto(only, (only,), why)


def _rows(need: Need) -> list[tuple[str, ...]]:
    mark = {True: "ok", None: "unknown", False: "missing"}[need.met]
    rows = [(mark, need.what, f"{need.has}; needs {need.needs}")]
    return [*rows, ("", "", f"-> {need.remedy}")] if need.remedy else rows


def _table(rows: list[tuple[str, ...]], margin: str) -> list[str]:
    """Columns as wide as their widest cell, but for the last."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return [
        margin + "  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip() for row in rows
    ]


def _machine(host: Host) -> list[tuple[str, ...]]:
    def known(value: str | None, otherwise: str = "none") -> str:
        return value or otherwise

    deepep = host.deepep
    rows = [
        ("Python", known(host.python, "unknown")),
        ("torch", f"{known(host.torch, 'unknown')}, CUDA {known(host.cuda)}"),
        ("driver", known(host.driver)),
    ]
    rows += [
        (
            f"GPU {at}",
            f"{gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}, "
            f"{gpu.memory / 2**30:.0f} GiB, {gpu.multiprocessors} multiprocessors",
        )
        for at, gpu in enumerate(host.gpus)
    ]
    rows += [] if host.gpus else [("GPUs", "none")]
    rows += [("between GPUs", line) for line in _links(host.pairs)]
    rows += [
        ("Triton", known(host.triton)),
        ("NCCL", known(host.nccl)),
        ("nvcc", f"{host.nvcc.version}, {host.nvcc.path}" if host.nvcc else "none"),
        ("symmetric memory", "yes" if host.symmetric_memory else "no"),
        ("network cards", ", ".join(host.network_cards) or "none for RDMA"),
        ("DeepEP", f"{deepep.generation or 'unknown'}, {deepep.folder}" if deepep else "none"),
    ]
    return [*rows, *(("switch", f"{name}=1") for name in host.switches)]


def _links(pairs: tuple[Pair, ...]) -> list[str]:
    """Pairs that are alike, on one line: eight GPUs have 56."""

    def words(pair: Pair) -> str:
        answer = {True: "{}", False: "no {}", None: "{} unknown"}
        access = answer[pair.access].format("peer access")
        atomics = answer[pair.atomics].format("native atomics")
        return f"{pair.link or 'link unknown'}, {access}, {atomics}"

    lines = []
    for alike, group in groupby(sorted(pairs, key=words), words):
        members = [f"{pair.source}->{pair.target}" for pair in group]
        whose = "all" if len(members) == len(pairs) else " ".join(members)
        lines.append(f"{whose}: {alike}")
    return lines
