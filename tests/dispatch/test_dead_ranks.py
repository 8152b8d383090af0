"""A rank that dies, leaves or hangs: all the others end by themselves, non-zero, in time, and say
which rank it was and what they waited for."""

import ast
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("training_loop.py")

START = 120.0  # seconds until all ranks have met: they import torch on a busy machine
LIMIT = 40.0  # seconds for all to be gone; they take about one, and less than a tenth to say why
TIMEOUT = 6.0  # of the group, in seconds, where a rank waits in vain


class Run:
    """A started training_loop.py. Its end takes all processes along, whatever they do."""

    def __init__(self, folder: Path, world_size: int, **environ: str) -> None:
        self.folder, self.world_size = folder, world_size
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        self.launcher = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(world_size), str(folder)],
            env=os.environ
            | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            | {"GLOO_SOCKET_IFNAME": "lo", "TIMEOUT": "60", "CUDA_VISIBLE_DEVICES": ""}
            | environ,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self.launcher.pid, signal.SIGKILL)
        self.launcher.communicate()

    def pids(self) -> list[int]:
        """Of all ranks, once they have met."""
        deadline = time.monotonic() + START
        while not all((self.folder / f"ready.{r}").exists() for r in range(self.world_size)):
            assert time.monotonic() < deadline, f"the ranks did not meet: {self.stderr()}"
            time.sleep(0.01)
        return ast.literal_eval(self.launcher.stdout.readline())

    def exit_codes(self) -> list[int]:
        """Of all ranks, which must end by themselves."""
        out, _ = self.launcher.communicate(timeout=LIMIT)
        return ast.literal_eval(out.splitlines()[-1])

    def stderr(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("stderr.*"))]


def assert_all_name(run: Run, victim: int, codes: list[int], stage: str, why: str) -> None:
    """Every survivor ended non-zero and said that it lost the victim, where, and why."""
    for rank, (code, text) in enumerate(zip(codes, run.stderr(), strict=True)):
        if rank != victim:
            assert code != 0, f"rank {rank} ended well: {text}"
            found = re.search(rf"rank {rank} lost rank {victim} at (.*): rank {victim} (.*)", text)
            assert found, text
            assert stage in found[1], found[1]
            assert why in found[2], found[2]


@pytest.mark.parametrize(
    "world_size, victim, stage, environ",
    [
        (2, 0, "layer 0, call 1, forward, ids and gates out", {}),
        (3, 1, "layer 1, call 2, forward, ids and gates out", {"EP_MOE_CHECK": "1"}),
        (3, 2, "layer 1, call 2, backward, rows out", {}),
        (3, 0, "layer 1, call 2, backward, rows back", {"DEAF": "1"}),
    ],
    ids=["at the start", "with EP_MOE_CHECK", "in backward", "exchanges that do not fail"],
)
def test_a_killed_rank_is_named(world_size, victim, stage, environ, tmp_path):
    with Run(tmp_path, world_size, VICTIM=str(victim), AT=stage, DO="kill", **environ) as run:
        run.pids()
        codes = run.exit_codes()
    assert codes[victim] == -signal.SIGKILL
    assert_all_name(run, victim, codes, stage, "without a word")


def test_a_rank_that_raises_is_named(tmp_path):
    stage = "the sum of a tensor"
    with Run(tmp_path, 3, VICTIM="0", AT=stage, DO="raise") as run:
        run.pids()
        codes = run.exit_codes()
    assert codes == [1, 1, 1]
    assert_all_name(run, 0, codes, stage, "ended with ZeroDivisionError: planted")


def test_a_stuck_rank_is_named(tmp_path):
    stage = "layer 1, call 3, backward, rows back"
    with Run(tmp_path, 3, VICTIM="1", AT=stage, DO="stop", TIMEOUT=str(TIMEOUT)) as run:
        pids = run.pids()
        deadline = time.monotonic() + TIMEOUT + LIMIT
        while not all("DispatchTimeout: " in text for text in run.stderr()[::2]):
            assert time.monotonic() < deadline, run.stderr()
            time.sleep(0.1)
        os.kill(pids[1], signal.SIGKILL)
        codes = run.exit_codes()
    assert codes == [1, -signal.SIGKILL, 1]
    for text in run.stderr()[::2]:
        assert re.search(rf"DispatchTimeout: .*{stage}.*rank 1 does not answer", text), text


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_killed_rank_is_named_on_gpus(when, require_gpu, tmp_path):
    """NCCL's exchanges do not fail, and its destructors may wait for the dead."""
    stage = f"layer 1, call 2, {when}, rows out"
    environ = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    with Run(tmp_path, 2, VICTIM="1", AT=stage, DO="kill", **environ) as run:
        run.pids()
        codes = run.exit_codes()
    assert_all_name(run, 1, codes, "layer ", "without a word")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_random_rank_killed_at_a_random_moment(tmp_path):
    """20 times, from the moment when the ranks have met. Run with -s for the figures."""
    generator = random.Random(0)
    for i in range(20):
        folder = tmp_path / str(i)
        folder.mkdir()
        victim, moment = generator.randrange(3), generator.uniform(0.0, 1.5)
        with Run(folder, 3) as run:
            pids = run.pids()
            time.sleep(moment)
            os.kill(pids[victim], signal.SIGKILL)
            killed = time.monotonic()
            codes = run.exit_codes()
            took = time.monotonic() - killed
        assert_all_name(run, victim, codes, "", "without a word")
        lines = [re.findall(r"(?:\w+: )?rank \d lost .*", text)[-1:] for text in run.stderr()]
        print(f"{i}: rank {victim} after {moment:.2f} s, all gone in {took:.2f} s, codes {codes}")
        print(*[f"    {line[0]}" for line in lines if line], sep="\n", flush=True)
